"""Workers on a Ray cluster of many machines.

Reading order: ray_backend, cluster, shared_folder, head_watch, reference_waiter, worker, actor, fork_servers, gpus,
weight_delivery.
"""

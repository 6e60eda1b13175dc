"""The loop in real time: the controller, and the backends that carry out its orders.

Reading order: controller, backend, worker_backend, local, gpus_here, mps, machine_probe, run, launch,
fake_backend, model_export.
"""

"""The loop in real time: the controller, and the backends that carry out its orders.

Reading order: controller, backend, worker_backend, local, mps, machine_probe, run, launch,
fake_backend, model_export.
"""

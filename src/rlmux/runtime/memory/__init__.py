"""Memory of devices and hosts: what there is, what pipelines need, what fits.

Reading order: memory_budget, machine_probe.
"""

"""Memory of devices and hosts: what pipelines need, what fits.

Reading order: memory_budget.
"""

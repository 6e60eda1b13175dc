"""The queue for admission: who is next, who may hold how much, and why a pipeline waits.

Reading order: admission, fair_share, quotas, budgets, accounts, time_slicing, wait_reasons.
"""

"""The queue for admission: who is next, who may hold how much, and why a pipeline waits.

Reading order: lifecycle_events, admission, queue_order, fair_share, decayed_usage, quotas, budgets, accounts,
parking, filler_placement, time_slicing, admin_events, wait_reasons.
"""

"""What a fact changes, and what follows from it: every function here takes `Parts`, the whole scheduler.

Reading order: parts, lifecycle_events, step_events, node_events, admin_events, placer, parking, filler_placement,
dispatch, plan_check, plain_order.
"""

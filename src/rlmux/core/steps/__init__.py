"""Steps and orders: what runs next in a group, and the legal moves of all work.

Reading order: step_machine, groups, orders, leases, on_demand_work, expected_steps, idle_check.
"""

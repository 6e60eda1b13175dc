"""Steps and orders: what runs next in a group, and the legal moves of all work.

Reading order: step_machine, step_events, dispatch, plan_check, planned, plain_order, orders, leases, cycles,
cycle_slots, on_demand_work, colocation, switches, idle_check.
"""

"""The simulator: the scheduler in virtual time, and the model of the world it acts on.

Reading order: simulator, kernel, world, sim_state, sim_orders, clients, fillers, node_changes, pauses, api, what_if,
bounds, split_search, spot_trace, data_tables.
"""

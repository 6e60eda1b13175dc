"""Look-ahead inside a group: forecasts, playouts, migration.

Reading order: problem, forecast, playout, search, priorities, dispatching, side_by_side, migration, measured_tails,
node_tails, tool_waits, cycle_priorities.
"""

"""Placement: which nodes a pipeline gets, and the groups that share them.

Reading order: placement_ledger, choice, own_nodes, view, group_snapshot, group_load, step_bounds, group_index,
pool_nodes, free_nodes, rollback.
"""

"""Placement: which nodes a pipeline gets, and the groups that share them.

Reading order: placer, placement_ledger, choice, own_nodes, view, groups, group_snapshot, group_load, group_index,
pool_nodes, node_events, rollback.
"""

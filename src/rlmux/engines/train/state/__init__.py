"""A trainer's state: parameters and moments, on one rank or sharded, in memory and on disk.

Reading order: trainer_state, moments, flat_parameters, ranks, model_parts, sharded_state, tree_sum, snapshot,
checkpoint.
"""

"""A trainer's state: parameters and moments, on one rank or sharded, in memory and on disk.

Reading order: trainer_state, flat_parameters, model_parts, sharded_state, snapshot, checkpoint.
"""

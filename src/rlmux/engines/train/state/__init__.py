"""A trainer's state: parameters and moments, on one rank or sharded, in memory and on disk.

Reading order: trainer_state, flat_parameters, model_parts, row_files, sharded_state, snapshot, checkpoint.
"""

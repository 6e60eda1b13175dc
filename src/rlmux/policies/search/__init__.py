"""Search for placements: partitions, regrouping, dollars.

Reading order: shared_placement, candidates, layouts, packing, partition, set_partition, cycle_steps, greedy,
regrouping, economy, economic_placement, economic_regrouping, slo_repair, readmission, ranking, linear_program.
"""

"""Orders being carried out: planned steps, request batches, permits, on one call loop.

Modules of their own: rollout_record, what the log keeps of a step; train_driver, the stages of training.

Reading order: running_orders, resident_states, planned_pipelines, rollout_driver, rollout_shard, rollout_legs,
rollout_epochs, rollout_race, prompt_sharding, rollout_record, train_driver, determinism_check, on_demand,
request_batches, shared_sampling, shared_training, idle_timeout, external_programs.
"""

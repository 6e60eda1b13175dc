"""Orders being carried out: planned steps, request batches, permits, on one call loop.

Reading order: call_loop, running_orders, outbox, resident_states, rollout_driver, rollout_shard, rollout_legs,
rollout_epochs, rollout_race, prompt_sharding, train_driver, on_demand, request_batches, shared_sampling,
shared_training, idle_timeout, external_programs.
"""

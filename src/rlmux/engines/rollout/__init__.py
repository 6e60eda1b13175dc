"""Our rollout engine: slots, decode steps, partial trajectories.

Reading order: protocol, slot_engine, tenants, slots, slot_table, request_queue, request_limits, live_trajectory,
recorded_trajectory, sampling, stop_texts, prefill_ahead, adapter_table, chunk_tally, batch_probe.
"""

"""The door for clients that speak the Tinker API: their requests become batches of work for our engines.

Reading order: routes, front, requests, bodies, codec, wire_pb2, registry, ledger, futures, sample_requests,
model_catalog, names, rng_keys, reorder_buffer, session_tags, keys, project_budgets, checkpoint_files.
"""

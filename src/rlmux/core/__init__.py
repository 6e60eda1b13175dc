"""The brain: events in, orders out. Standard library only; no clock, no I/O.

Reading order: model, events, actions, errors, policy, views, scheduler, policy_faults, state, pipeline_run, work,
parts, query, journal, invariants, json_text.
"""

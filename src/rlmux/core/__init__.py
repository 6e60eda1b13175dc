"""The brain: events in, orders out. Standard library only; no clock, no I/O.

Floors, each importing only those below it (tests/test_layers.py):

    scheduler, query, invariants
    settle/                         functions that take all parts: what a fact changes, and what follows from it
    steps/                          legal moves, orders and leases of a group
    queue/                          who is next, and why another waits
    decision/                       what a policy sees and answers
    state, pipeline_run             what is remembered
    placement/                      nodes and groups
    estimation/                     seconds, learned online
    model, events, actions, work, queue_order, decayed_usage, journal, errors, json_text

Reading order: model, events, actions, errors, scheduler, state, pipeline_run, work, queue_order, decayed_usage, query,
journal, invariants, json_text.
"""

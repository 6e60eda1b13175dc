"""Estimates of durations, learned online: a step, its tail, its upper bound.

Reading order: estimates, measured_steps, alike_seconds, expected_steps, step_bounds, on_demand_seconds, tail_gain,
batch_slowdowns.
"""

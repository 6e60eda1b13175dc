"""Estimates of durations, learned online: a step, its tail, its slowdown beside another.

Reading order: decode_rate, estimates, measured_steps, alike_seconds, on_demand_seconds, cycles, switches, colocation,
tail_gain, batch_slowdowns.
"""

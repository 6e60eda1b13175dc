"""What this machine's devices cost: micro-benchmarks, switches, the profile file.

Reading order: micro_benchmarks, engine_probe, interference_probe, neighbours, switch_times, switch_costs,
profile_file.
"""

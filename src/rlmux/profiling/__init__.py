"""What this machine's devices cost: micro-benchmarks, switches, migrations, the profile file.

Reading order: micro_benchmarks, engine_probe, interference_probe, neighbours, switch_times, migration_times,
device_costs, profile_file.
"""

"""What this machine's devices cost: micro-benchmarks, switches, migrations, steps, the profile file.

Reading order: micro_benchmarks, engine_probe, interference_probe, neighbours, switch_times, migration_times,
device_costs, step_estimates, roofline_estimates, recorded_steps, gpu_choice, step_times, profile_file,
trainer_logs, logged_estimates.
"""

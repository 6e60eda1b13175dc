"""What this machine's devices cost: micro-benchmarks, switches, the profile file."""

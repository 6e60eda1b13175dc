"""Who arrives when: named workloads, traces, recorded runs."""

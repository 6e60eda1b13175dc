"""Pipelines and their arrivals: named workloads, traces, recorded runs.

Reading order: catalog, arrivals, noise, spec_file, recorded, recorded_rollout, trace_csv, csv_rows, spread, ongoing,
rollout_tails, spot, substage_pairs.
"""

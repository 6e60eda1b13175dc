"""Pipelines and their arrivals: named workloads, traces, recorded runs."""

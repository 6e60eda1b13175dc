"""Numbers and timelines from the run log alone.

    controller ──▶ log (run.db) ──▶ timeline ──▶ summary.json, trace.json, timeline.html

`log` is written before anything takes effect; everything else here only reads it, while the run is on, after
it, or after a crash.

Reading order: reports, mechanisms, summary, status, usage, samples, slos, alerts, acknowledgements, comparison,
weight_sums, report_cache.
"""

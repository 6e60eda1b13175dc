"""The timeline: every second of every device, folded from the log.

Reading order: build, history, records, condensed_state, intervals, order_layout, delivery, step_rows, step_causes,
step_work, batch_arrivals, run_clock, gaps, live_timeline, live_steps.
"""

"""A run's files beside its log: metrics, samples, outputs, inputs, ends.

Reading order: folders, run_folder, metrics_writer, live_trackers, usage_notes, hardware, sample_archive,
filler_outputs, input_files, end_records.
"""

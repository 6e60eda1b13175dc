"""The event log: one append-only SQLite file, its rows, blocks and recovery.

Reading order: run_log, notes, value_codec, block_codec, segments, run_state, restored_shares, progress_rows,
damaged_log, folder_lock.
"""

"""The index of a run: a file beside its log with all that pages show, made from the log alone; it may be deleted.

Reading order: indexer, store, interval_rows, columns, tiles, lanes.
"""

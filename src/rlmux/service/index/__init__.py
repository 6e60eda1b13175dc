"""The index of a run: a file beside its log with the pages' data, rebuilt from the log if it is deleted.

Reading order: indexer, kept_fold, store, interval_rows, columns, tiles, lanes, search, selection, groups.
"""

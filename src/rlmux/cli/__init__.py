"""The command line: words in, pictures out. One function per command, no scheduling logic of its own.

Reading order: main, inputs, starting_points, checked_file, output, tables, live, progress, remote, lookups,
exit_codes, chaos, doctor, doctor_engine, verification, what_if, memory_rows, profile_tables.
"""

from rlmux.cli.main import main

__all__ = ["main"]

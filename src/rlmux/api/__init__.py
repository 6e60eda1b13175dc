"""rlmux for Python: what the command line does, with values instead of text. `import rlmux` offers these names.

Reading order: commands, run_handle, connection, files.
"""

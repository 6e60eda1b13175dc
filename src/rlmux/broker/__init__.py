"""Permits: programs that are not ours take turns on the pools of a file. Start reading at `desk.py`."""

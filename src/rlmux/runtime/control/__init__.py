"""Requests to a run in progress: from its folder, from other threads, from a user.

Reading order: control_socket, control_requests, unfinished, retries, supervised_thread, removals, run_control, inbox,
notices, run_status, backup.
"""

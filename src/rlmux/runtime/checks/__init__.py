"""Checks of a run: before it starts, by replaying it, by killing it.

Reading order: preflight, replay_verification, run_comparison, chaos_kills.
"""

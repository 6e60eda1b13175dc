"""Permits: programs that are not ours take turns on the pools of a file. Start reading at `permit_manager.py`.

Reading order: broker_run, embedded, permit_manager, program_roster, permit_ledger, registration, recovery, server,
certificate, wire, program_processes.
"""

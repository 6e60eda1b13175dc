"""Worker processes: spawned, watched, replaced, called; and the objects that live in them.

Reading order: worker_pool, call_loop, outbox, processes, tenant_process, supervisor, pipeline_workers, planned_workers,
tenant_hosts, request_workers, worker_calls, packed_partials, heartbeat, standstill, fork_server_imports.
"""

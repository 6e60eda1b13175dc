"""Worker processes: spawned, watched, replaced; and the objects that live in them.

Reading order: worker_pool, processes, tenant_process, supervisor, pipeline_workers, planned_workers, tenant_hosts,
request_workers, worker_calls, packed_partials, heartbeat, standstill, fork_server_imports.
"""

"""The pages of runs, and the API under /api/v1 that they and other programs use.

Modules of their own, although one module imports them: audit_handlers, control, cost, finding_handlers, indexing,
openapi, pages, prometheus, sample_handlers, stream, timeline_handlers, webhook and what_if_jobs each hold one address
or one thread, and `dashboard` wires them.

Reading order: dashboard, router, parameters, handlers, labels, timeline_handlers, sample_handlers,
finding_handlers, audit_handlers, stream, control, what_if_jobs, cost, prometheus, webhook, indexing, pages, openapi.
"""

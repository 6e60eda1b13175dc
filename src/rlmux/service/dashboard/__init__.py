"""The pages of runs, and the API under /api/v1 that they and other programs use.

Reading order: dashboard, router, parameters, problems, handlers, timeline_handlers, sample_handlers, audit_handlers,
stream, control, what_if_jobs, cost, audit, prometheus, webhook, indexing, pages, openapi.
"""

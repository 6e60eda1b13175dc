"""Bodies and answers of the API, as pydantic models.

Reading order: run_schemas, timeline_schemas, usage_schemas.
"""

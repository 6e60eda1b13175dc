"""Engines: what samples and what trains. Passive; every call is bounded."""

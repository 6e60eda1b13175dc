"""Authentication and authorization: users, sessions, tokens, hosts, and the log of who did what.

Reading order: access, users, sessions, tokens, oidc, visibility, host_middleware, audit, atomic_json.
"""

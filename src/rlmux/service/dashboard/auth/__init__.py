"""Authentication and authorization: users, sessions, tokens, hosts.

Reading order: access, users, sessions, tokens, visibility, host_middleware, atomic_json.
"""

"""The long-running server: one address with an API under it for each kind of client.

Reading order: app, http_server, addresses, http_head, http_patience, problems, refusals, folder_address,
model_serving, served_verification.
"""

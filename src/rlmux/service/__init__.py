"""The server that people leave running: one address, and a door under it for each kind of client.

Reading order: app, http_server, addresses, http_head, refusals, folder_address, model_serving, served_verification.
"""

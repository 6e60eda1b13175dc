"""The long-running server: one address with an API under it for each kind of client.

Reading order: service, hosted_lane, lane_apis, http_server, health, addresses, http_patience, problems, refusals,
folder_address, model_serving, served_verification.
"""

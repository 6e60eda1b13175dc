"""Rollout engines of others, each a server process in its own environment: tokens in, tokens out, over loopback.

Reading order: factory, server_engine, one_server, dialect, vllm, sglang, process, settings, http_connection,
generation_requests, trajectory, model_folder, transfer, gpu_memory, capabilities, weight_checks, measuring.
"""

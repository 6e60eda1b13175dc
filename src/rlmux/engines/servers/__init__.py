"""Rollout engines of others, each a server process in its own environment: tokens in, tokens out, over loopback."""

"""Rollouts for agents and environments: tokens in and tokens out, and the OpenAI API, over the samplers of a server.

Reading order: rollout_routes, rollout_bodies, replies.
"""

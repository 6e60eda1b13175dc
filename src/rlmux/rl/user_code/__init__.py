"""The user's code: checked, called for prompts, replies and rewards.

Reading order: pipeline_env, rewards, reward_pool, reward_preflight, engine_check.
"""

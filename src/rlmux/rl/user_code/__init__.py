"""The user's code: loaded, checked, called for prompts, replies and rewards.

Reading order: loading, pipeline_env, rewards, reward_preflight, engine_check.
"""

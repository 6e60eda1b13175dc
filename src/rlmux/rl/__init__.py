"""Trajectories, tasks, rewards, advantages and losses: what reinforcement learning is about here.

Inner rooms: tasks, prompts, user_code, memory, and sandboxes, in which programs of the user's run.

Reading order: types, config, vocabulary, literal_chat, token_bytes, conversations, episode, algorithms, datum_losses,
batch_metrics, demonstrations, client_requests, packed_turns, fast_pickle, determinism_class, origin, loading.
"""

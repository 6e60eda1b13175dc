"""Trajectories, tasks, rewards, advantages and losses: what reinforcement learning is about here."""

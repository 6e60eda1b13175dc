"""Prompts of a step, and the length of their rollouts: tail batching, interruptible rollouts.

Reading order: prompt_rounds, backlog, plan_clock, epoch_clock, learned_lengths.
"""

"""Which prompts a step samples, and how far: tail batching, interruptible rollouts.

Reading order: prompt_rounds, backlog, plan_clock, epoch_clock, learned_lengths.
"""

"""What the simulated world does and what it takes: hardware, costs, decoding, interference.

Reading order: costs, rates, lengths, decoder, roofline, step_costs, hardware, curves, substages, interference,
neighbour_slowdown, multi_turn, work.
"""

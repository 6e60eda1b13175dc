"""What the simulated world does and what it takes: hardware, costs, decoding, interference."""

"""The brain: events in, orders out. Standard library only; no clock, no I/O."""

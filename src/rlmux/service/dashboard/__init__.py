"""The pages that show runs, and the addresses under /api/v1 that they and other programs read."""

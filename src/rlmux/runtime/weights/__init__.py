"""Weights as files: checkpoints, their origin, copies over a thin link.

Reading order: checkpoints, origins, thin_link.
"""

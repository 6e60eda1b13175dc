"""Weights as files: checkpoints, their origin, models for other programs, copies over a thin link.

Reading order: checkpoints, origins, model_export, thin_link.
"""

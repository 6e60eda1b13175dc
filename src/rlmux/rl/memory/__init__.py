"""Bytes of models, optimizers and caches, part by part.

Reading order: model_shape, memory_parts, footprint, adapter_base, smallest_change.
"""

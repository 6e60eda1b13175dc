"""LoRA adapters: injection, files, a base that workers share.

Reading order: lora, adapter_weights, shared_base.
"""

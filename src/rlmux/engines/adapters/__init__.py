"""LoRA adapters: injection, tenants in one batch, a base that workers share.

Reading order: lora, adapter_table, adapter_rows, adapter_weights, shared_base.
"""

"""The models that both engines compute, and their weights as files.

Reading order: transformer, decoder_shape, packed_attention, experts, adapter_rows, row_product, decode_graphs,
model_io, weights, mapped_file, weight_layout, weight_checksum, transformers_import.
"""

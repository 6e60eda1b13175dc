"""What one update computes: micro-batches, forward, gradients summed over ranks, AdamW.

Reading order: micro_batches, training_forward, router_loss, train_tensors, figures, ranks, tree_sum, adamw, moments.
"""

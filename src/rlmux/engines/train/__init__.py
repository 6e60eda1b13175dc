"""Our train engine: micro-batches, losses, optimizer steps.

Reading order: train_engine, rl_step, micro_batches, train_tensors, training_forward, stage_work, sft_warmup, adamw,
router_loss, datum_train, datum_batches, joint_training, joint_forward, row_probe.
"""

"""Our train engine: stages, losses, optimizer steps; `update/` computes them, `state/` keeps what they change.

Reading order: train_engine, rl_step, stage_work, sft_warmup, datum_train, datum_batches, joint_training, joint_forward,
row_probe.
"""

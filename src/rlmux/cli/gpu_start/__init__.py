"""A file that trains a checkpoint on the GPUs of one machine: its text, or the line that says what would fit.

    --gpus 8x80, or this machine ── machine.py ─┐
    config.json, --pipelines, --lora, engine ───┴──▶ profiling/gpu_choice.py ──▶ file_text.py, or refusal.py

Reading order: machine, refusal, file_text.
"""

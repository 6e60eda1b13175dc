"""How far `rlmux plan` is off where a file has no estimates: public runs, by their settings alone.

    RLMUX_DATA=<folder> python benchmarks/planned.py [--json]

The folder holds `rl_runs/steps.csv` (verl and SGLang on four H100, mean of the steps after the first) and
`perf/rl_step_times.csv` (RollMux's phase means on 8 H800, or 8 H20 and 8 H800). `plan` gets model, prompts, answers,
token limit and GPUs: no length of an answer, no log. Engine and trainer are those of others, so an error says how far
a newcomer's plan is from what such a job takes. Nothing was fitted to the RollMux rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rlmux.config import Purpose
from rlmux.config.figures import StepFigure
from rlmux.config.load import parse_spec
from rlmux.profiling.roofline_estimates import RooflineEstimates

KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
MODELS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    # (KEYS), vocabulary, tied embeddings; heads of 128 numbers
    "qwen2.5-3b": ((2048, 36, 16, 2, 11008), 151936, True),
    "qwen2.5-7b": ((3584, 28, 28, 4, 18944), 152064, False),
    "qwen2.5-14b": ((5120, 48, 40, 8, 13824), 152064, False),
    "qwen2.5-32b": ((5120, 64, 40, 8, 27648), 152064, False),
    "qwen3-0.6b": ((1024, 28, 16, 8, 3072), 151936, True),
    "qwen3-4b": ((2560, 36, 32, 8, 9728), 151936, True),
    "qwen3-8b": ((4096, 36, 32, 8, 12288), 151936, False),
    "llama-3.1-8b": ((4096, 32, 32, 8, 14336), 128256, False),
}
RUN_MODELS = (("deepseek", "qwen2.5-14b"), ("llama3_1_8b", "llama-3.1-8b"), ("qwen3_0_6b", "qwen3-0.6b"),
              ("qwen3_4b", "qwen3-4b"), ("qwen3_8b", "qwen3-8b"))  # fmt: skip
ROLLMUX_ANSWERS = 256
VERL_ANSWERS = 1024


def data_folder() -> Path:
    folder = Path(os.environ.get("RLMUX_DATA", ""))
    if not (folder / "rl_runs" / "steps.csv").is_file():
        sys.exit(f"RLMUX_DATA={str(folder)!r} is not a folder with rl_runs/steps.csv. Nothing was computed.")
    return folder


def planned(
    model: str,
    limit: int,
    answers: int,
    *,
    tp: int,
    rollout: tuple[int, str],
    train: tuple[int, str],
    mean: float | None = None,
) -> dict[str, StepFigure]:
    """Figures of `plan`, by name. `rollout`, `train`: (GPUs, kind). Two forward passes beside the update's, as in verl.
    `mean`: tokens of an answer, where they are known."""
    (sizes, vocab_size, is_tied) = MODELS[model]
    config = dict(zip(KEYS, sizes, strict=True)) | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied, "max_position_embeddings": 65536,
    }  # fmt: skip
    num_devices = rollout[0] // tp
    device = f"devices: {num_devices}, gpus_per_device: {tp}" if tp > 1 else f"devices: {num_devices}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        text = f"""
cluster:
  pools:
    rollout: {{{device}, gpu: {rollout[1]}}}
    train: {{devices: {train[0]}, gpu: {train[1]}}}
pipelines:
  - name: a
    task: sort
    model: {{path: {folder}}}
    algorithm: {{prompts_per_step: {answers // 8}, group_size: 8, kl_coef: 0.01, epochs: 1, minibatches: 2}}
    rollout:
      {{engine: {{name: vllm, python: {sys.executable}}}, workers: {num_devices}, tensor_parallel: {tp},
       dtype: bfloat16, slots: 256, max_prompt_tokens: 256, max_new_tokens: {limit}}}
    train: {{workers: {train[0]}, sharding: shard, dtype: bfloat16, activation_checkpointing: true,
            tokens_per_micro_batch: 16384}}
"""
        spec = parse_spec(
            text,
            source="planned",
            folder=Path(folder),
            purpose=Purpose.PLAN,
            estimate_of=RooflineEstimates(answer_tokens=mean).of,
        )
    return {figure.name: figure for figure in spec.pipelines[0].figures}


def public_runs(folder: Path) -> list[dict[str, Any]]:
    steps = defaultdict(list)
    with (folder / "rl_runs" / "steps.csv").open() as file:
        for row in csv.DictReader(file):
            steps[row["run"]].append(row)
    rows = []
    for run, own in sorted(steps.items()):
        model = next((name for mark, name in RUN_MODELS if mark in run), None)
        warm = own[1:] or own
        if model is None or "search" in run:  # no retrieval service is planned
            continue
        measured = {
            "rollout_s": fmean(float(row["gen_s"]) for row in warm),
            "train_s": fmean(
                sum(float(row[key] or 0) for key in ("old_log_prob_s", "ref_s", "update_actor_s")) for row in warm
            ),
        }
        figures = planned(model, 8192, VERL_ANSWERS, tp=4, rollout=(4, "H100"), train=(4, "H100"))
        rows += compared("verl", run, figures, measured)
        mean = fmean(float(row["response_mean"]) for row in warm)
        known = planned(model, 8192, VERL_ANSWERS, tp=4, rollout=(4, "H100"), train=(4, "H100"), mean=mean)
        rows += compared("verl, mean known", run, known, measured)
    return rows


def rollmux_profiles(folder: Path) -> list[dict[str, Any]]:
    rows = []
    with (folder / "perf" / "rl_step_times.csv").open() as file:
        for row in csv.DictReader(file):
            model, limit = row["model"].lower(), int(float(row["max_response_len"] or 0))
            if row["source"] != "RollMux artifact" or model not in MODELS:
                continue
            rollout = (int(float(row["rollout_gpus"])), "H20" if "H20" in row["gpu_type"] else "H800")
            train = (int(float(row["train_gpus"])), "H800")
            figures = planned(model, limit, ROLLMUX_ANSWERS, tp=1, rollout=rollout, train=train)
            measured = {"rollout_s": float(row["gen_s"]), "train_s": float(row["update_s"])}
            rows += compared("RollMux", f"{model}, {limit} tokens, {rollout[1]}", figures, measured)
    return rows


def compared(source: str, run: str, figures: dict[str, StepFigure], measured: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "source": source, "run": run, "figure": name, "measured_s": seconds,
            "planned_s": figures[name].seconds, "low_s": figures[name].low, "high_s": figures[name].high,
            "error": figures[name].seconds / seconds - 1,
            "is_in_range": figures[name].low <= seconds <= figures[name].high,
        }
        for name, seconds in measured.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    folder = data_folder()
    rows = [*public_runs(folder), *rollmux_profiles(folder)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print("| source | run | figure | planned s | range | measured s | error % |\n|---|---|---|---|---|---|---|")
    for row in rows:
        between = f"{row['low_s']:.0f} to {row['high_s']:.0f}{'' if row['is_in_range'] else ', **outside**'}"
        print(f"| {row['source']} | {row['run']} | {row['figure']} | {row['planned_s']:.0f} | {between} | "
              f"{row['measured_s']:.0f} | {row['error'] * 100:+.0f} |")  # fmt: skip
    for source in ("verl", "verl, mean known", "RollMux"):
        for name in ("rollout_s", "train_s"):
            own = [row for row in rows if (row["source"], row["figure"]) == (source, name)]
            error, inside = median(abs(row["error"]) for row in own), sum(row["is_in_range"] for row in own)
            print(f"{source}, {name}: median absolute error {error:.0%}, in its range {inside} of {len(own)}")


if __name__ == "__main__":
    main()

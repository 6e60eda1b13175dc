"""Two TRL scripts on one machine: one after the other, side by side, and taking turns by permits.

    python benchmarks/permits.py --trl .venv-trl/bin/python                    about two minutes
    python benchmarks/permits.py --trl PYTHON --steps 8 --judge-s 1 --json

Each script trains its own Qwen3 by GRPO and has its answers judged by something else, which takes `--judge-s` seconds a
step and no core of this machine (a judge behind HTTP, a sandbox). Each has as many threads as the machine has cores, as
torch takes by itself. The makespan is from the moment at which both have built their trainers to the last one's end:
imports are not in it; of the scripts one after the other it is the sum. `--trl` is a Python with TRL (make test-trl).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SEEDS = {"a": 1, "b": 2}
AFTER, BESIDE, ALL_FIT, ONE_FITS = "one after the other", "side by side", "permits, room for both", "room for one"
MODES = (AFTER, BESIDE, ALL_FIT, ONE_FITS)
LIMIT_S = 900.0


# ------------------------------------------------------------------ a script, in TRL's Python


def train_one(out: Path, args: argparse.Namespace) -> None:
    """A TRL script: builds its trainer, waits for the word to go, trains."""
    import torch

    from rlmux import share

    torch.set_num_threads(args.threads)
    need_bytes = {"gpu0": args.need_bytes} if args.need_bytes else None
    job = share.join(out.name, need_bytes=need_bytes)
    with job.phase("train"):
        trainer = share.trl(make_trainer(out, args), job)
        with job.phase(None):
            (out / "built").touch()
            wait_for(out.parent / f"go-{out.name}")
        begin_s = time.monotonic()
        trainer.train()
        end_s = time.monotonic()
        sys.path.insert(0, str(ROOT / "examples"))
        from own_trl import sha256_of

        weights = sha256_of(trainer.model)
    told = {"begin_s": begin_s, "end_s": end_s, "waited_s": job.waited_s, "weights": weights}
    (out / "told.json").write_text(json.dumps(told))


def make_trainer(out: Path, args: argparse.Namespace) -> Any:
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT / "examples"))
    from own_trl import make_tokenizer, share_of_letters

    def judge(completions: list[str], **_: object) -> list[float]:
        time.sleep(args.judge_s)
        shares: list[float] = share_of_letters(completions)
        return shares

    tokenizer = make_tokenizer()
    torch.manual_seed(SEEDS[out.name])
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=256,
            tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    options = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, seed=SEEDS[out.name],
        max_steps=args.steps, save_strategy="no", logging_steps=100, per_device_train_batch_size=args.trajectories,
        num_generations=8, max_completion_length=args.tokens, learning_rate=1e-3, gradient_checkpointing=False,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": f"{one} and {one * 7}: "} for one in range(args.trajectories * args.steps)])
    return GRPOTrainer(
        model=model, reward_funcs=judge, args=options, train_dataset=prompts, processing_class=tokenizer
    )  # fmt: skip


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{path} does not come")
        time.sleep(0.01)


# ------------------------------------------------------------------ the modes


def measure(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both scripts in a mode: makespan, seconds of waiting for permits, switches, hashes of the weights."""
    if mode == AFTER:
        told = [told_one for name in SEEDS for told_one in run_scripts([name], folder, {}, args)]
        return summed(told, makespan_s=sum(one["end_s"] - one["begin_s"] for one in told))
    if mode == BESIDE:
        return summed(run_scripts(list(SEEDS), folder, {}, args))
    pool = {"phase": "both", "device_memory_gb": 1.0}
    if mode == ALL_FIT:
        args = argparse.Namespace(**{**vars(args), "need_bytes": 400_000_000})
    (folder / "broker.json").write_text(json.dumps({"cluster": {"pools": {"gpu0": pool}}}))
    words = ["broker", str(folder / "broker.json"), "--out", str(folder / "log"), "--listen", f"unix:{folder / 's'}"]
    broker = subprocess.Popen(
        [sys.executable, "-m", "rlmux", *words], env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        wait_for(folder / "s")
        told = run_scripts(list(SEEDS), folder, {"RLMUX_BROKER": f"unix:{folder / 's'}"}, args)
    finally:
        broker.terminate()
        broker.communicate()
    return summed(told)


def summed(told: Sequence[Mapping[str, Any]], makespan_s: float | None = None) -> dict[str, Any]:
    both_s = max(one["end_s"] for one in told) - min(one["begin_s"] for one in told)
    return {
        "makespan_s": both_s if makespan_s is None else makespan_s,
        "waited_s": sum(one["waited_s"] for one in told),
        "weights": [one["weights"] for one in told],
    }


def run_scripts(
    names: Sequence[str], folder: Path, variables: Mapping[str, str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Start the scripts, say go once all have built, and read what they told."""
    options = [f"--{key.replace('_', '-')}={value}" for key, value in vars(args).items() if key in SCRIPT_OPTIONS]
    running = []
    for name in names:
        (folder / name).mkdir()
        command = [args.trl, __file__, "--script", str(folder / name), *options]
        log = (folder / f"{name}.log").open("w")
        running.append(subprocess.Popen(command, env=environ(variables), stdout=log, stderr=subprocess.STDOUT))
    try:
        for name in names:
            wait_for(folder / name / "built")
        for name in names:
            (folder / f"go-{name}").touch()
        for name, script in zip(names, running, strict=True):
            if script.wait(LIMIT_S):
                raise SystemExit((folder / f"{name}.log").read_text())
    finally:
        for script in running:
            script.kill()
            script.wait()
    return [json.loads((folder / name / "told.json").read_text()) for name in names]


def environ(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without what would say how many threads torch takes."""
    own = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RLMUX_BROKER")}
    return {**own, "PYTHONPATH": str(ROOT / "src"), **(variables or {})}


SCRIPT_OPTIONS = ("steps", "judge_s", "hidden", "trajectories", "tokens", "threads", "need_bytes")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=sys.executable, help="a Python with TRL")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--judge-s", type=float, default=0.5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--need-bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.script is not None:
        train_one(args.script, args)
        return
    rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(args.repeats):
        for mode, measured in rounds.items():
            with tempfile.TemporaryDirectory() as folder:
                measured.append(measure(mode, Path(folder), args))
                print(f"  {mode}: {measured[-1]['makespan_s']:.1f} s", file=sys.stderr)
    seconds = {mode: statistics.median(one["makespan_s"] for one in measured) for mode, measured in rounds.items()}
    weights = {tuple(one["weights"]) for measured in rounds.values() for one in measured}
    if args.json:
        print(json.dumps({"makespan_s": seconds, "same_weights": len(weights) == 1}))
        return
    for mode, one in seconds.items():
        print(f"{mode:24} {one:6.1f} s   {seconds[AFTER] / one:5.2f} of one after the other")
    print("the weights of every run are the same" if len(weights) == 1 else "THE WEIGHTS DIFFER")


if __name__ == "__main__":
    main()

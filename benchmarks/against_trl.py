"""A pipeline alone under rlmux against the same training with TRL's `GRPOTrainer`.

    pip install -e '.[train,trl]'                  TRL 1.x, in this environment or in one of its own (--trl PYTHON)
    python benchmarks/against_trl.py [--cases short,long,tails] [--rounds N] [--steps N] [--trl PYTHON] [--json]

Both start from one checkpoint, sample with temperature 1, and make one update a step with GRPO's loss, AdamW and no
KL penalty, in float32, on one thread. TRL has one core. rlmux is a whole `rlmux run`: a rollout and a training device
of one core each, of which one computes at a time. TRL trains in micro-batches of 32 and in one of the whole step, and
the faster counts; it does not recompute activations (its default), which would slow it.

    case    model                     trajectories a step    lengths
    short   0.1M (h64, 2 layers)      256                    12 tokens, the answers of `sort`, after an SFT warm-up
    long    12.7M (h512, 4 layers)    32                     up to 128 tokens, a new model that ends by chance
    tails   0.8M (h128, 4 layers)     256                    long-tailed `sort`: mean 12, up to 128, after a warm-up

Runs take turns, round after round; the median of all steps but each run's first two counts. Both sample their own
answers, so their lengths differ by chance: seconds for a token are given as well.
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
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

SKIPPED_STEPS = 2
"""First steps of a run that do not count: engines probe their shapes, caches are cold."""
RLMUX, TRL, TRL_WHOLE = "rlmux", "trl", "trl, one micro-batch"
RUNNERS = (RLMUX, TRL, TRL_WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, as both sides are told it."""

    model: Mapping[str, int]
    """Keys of `model` in the file."""
    task: Mapping[str, int]
    """Options of `sort`."""
    prompts_per_step: int
    max_new_tokens: int
    max_prompt_tokens: int
    slots: int
    sft_updates: int
    """Updates of the SFT warm-up that makes the checkpoint; 0 for a new model."""
    sft_batch_size: int = 64
    group_size: int = 8
    learning_rate: float = 1e-5
    """Small, so that lengths stay what they are."""
    micro_batch_size: int = 32

    @property
    def num_trajectories(self) -> int:
        return self.prompts_per_step * self.group_size


CASES = {
    "short": Case(
        model={"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128},
        task={"digits": 11},
        prompts_per_step=32,
        max_new_tokens=16,
        max_prompt_tokens=16,
        slots=256,
        sft_updates=120,
    ),
    "long": Case(
        model={"hidden_size": 512, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate_size": 1536},
        task={"digits": 5},
        prompts_per_step=4,
        max_new_tokens=128,
        max_prompt_tokens=16,
        slots=32,
        sft_updates=0,
        learning_rate=1e-6,
    ),
    "tails": Case(
        model={"hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 256},
        task={"min_digits": 2, "mean_digits": 12, "max_digits": 120},
        prompts_per_step=32,
        max_new_tokens=128,
        max_prompt_tokens=128,
        slots=64,
        sft_updates=120,
        sft_batch_size=16,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's steps, the first ones left out."""

    step_s: Sequence[float]
    rollout_s: Sequence[float]
    """Seconds of sampling in each step."""
    tokens: float
    """Mean response tokens of a step."""
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of each stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--runners", default="", help=f"accepted: some of {'; '.join(RUNNERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trl", metavar="PYTHON", default=sys.executable, help="python of the environment with TRL")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="folder whose checkpoints are made once and kept")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--train-with-trl", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train_with_trl:
        case, folder, steps, micro_batch_size = args.train_with_trl
        print(json.dumps(asdict(train_with_trl(CASES[case], Path(folder), int(steps), int(micro_batch_size)))))
        return
    runners = args.runners.split(";") if args.runners else list(RUNNERS)
    if runners != [RLMUX]:
        require_trl(args.trl)
    results = {}
    for name in args.cases.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep or Path(temporary)
            results[name] = compare(name, folder, runners, args.rounds, args.steps, args.trl)
    print(json.dumps(results, indent=1)) if args.json else show(results)


def require_trl(python: str) -> None:
    """Say how to install it, and end, where TRL is not there."""
    try:
        found = subprocess.run([python, "-c", "import trl; print(trl.__version__)"], capture_output=True, text=True)
        version = found.stdout.strip() if found.returncode == 0 else None
    except OSError:
        version = None
    if version is None:
        sys.exit(
            f"--trl {python}: no TRL there. Install it: pip install -e '.[train,trl]', or in an environment of its "
            "own: python -m venv trl-env; trl-env/bin/pip install -e '.[train,trl]'; then --trl trl-env/bin/python"
        )
    print(f"TRL {version}", file=sys.stderr)


def compare(
    name: str, folder: Path, runners: Sequence[str], num_rounds: int, num_steps: int, trl_python: str
) -> dict[str, Any]:
    """Medians over all rounds, by runner."""
    case = CASES[name]
    checkpoint = folder / name
    if not checkpoint.exists():
        make_checkpoint(case, checkpoint)
    if case.micro_batch_size == case.num_trajectories:
        runners = [runner for runner in runners if runner != TRL_WHOLE]
    runs: dict[str, list[Run]] = {runner: [] for runner in runners}
    for number in range(num_rounds):
        for runner in runners:
            print(f"{name}, round {number + 1} of {num_rounds}: {runner}", file=sys.stderr, flush=True)
            if runner == RLMUX:
                runs[runner].append(train_with_rlmux(case, checkpoint, num_steps))
            else:
                size = case.micro_batch_size if runner == TRL else case.num_trajectories
                command = [trl_python, __file__, "--train-with-trl", name, str(checkpoint), str(num_steps), str(size)]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[runner].append(Run(**json.loads(answer.splitlines()[-1])))
    return {runner: summary(of_runner) for runner, of_runner in runs.items()}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    steps = [step for run in runs for step in run.step_s]
    tokens = statistics.mean(run.tokens for run in runs)
    return {
        "step_s": statistics.median(steps),
        "token_s": statistics.mean(steps) / tokens,
        "step_s_range": [min(steps), max(steps)],
        "rollout_s": statistics.median(one for run in runs for one in run.rollout_s),
        "tokens": tokens,
        "parts_s": {part: statistics.median(run.parts_s[part] for run in runs) for part in runs[0].parts_s},
    }


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    for name, by_runner in results.items():
        print(f"\n{name}: {CASES[name].num_trajectories} trajectories a step")
        for runner, one in by_runner.items():
            low, high = one["step_s_range"]
            parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in one["parts_s"].items())
            print(
                f"  {runner:22} {one['step_s']:7.3f} s a step ({low:.3f} to {high:.3f}), {one['tokens']:6.0f} tokens, "
                f"rollout {one['rollout_s']:.3f} s{f' ({parts})' if parts else ''}"
            )
        rivals = [one for runner, one in by_runner.items() if runner != RLMUX]
        if rivals and RLMUX in by_runner:
            a_step, a_token = (min(one[key] for one in rivals) / by_runner[RLMUX][key] for key in ("step_s", "token_s"))
            print(f"  TRL takes {a_step:.2f} times as long for a step, {a_token:.2f} times for a token")


# --- what both start from -----------------------------------------------------------------------------------


def make_checkpoint(case: Case, folder: Path) -> None:
    """A Hugging Face checkpoint: the case's model after its SFT warm-up."""
    import torch

    from rlmux.core.model import Stage
    from rlmux.engines.train.train_engine import TorchTrainEngine
    from rlmux.rl.config import ModelConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainingConfig

    torch.set_num_threads(1)
    counts: dict[str, Any] = {
        f"num_{key}" if key in ("layers", "heads", "kv_heads") else key: at for key, at in case.model.items()
    }
    config = TrainingConfig(
        name="start",
        model=ModelConfig(**counts),
        task=TaskConfig(name="sort", params=case.task),
        sft_warmup=SftWarmupConfig(num_updates=case.sft_updates, batch_size=case.sft_batch_size),
        rollout=RolloutConfig(max_new_tokens=case.max_new_tokens, max_prompt_tokens=case.max_prompt_tokens),
    )
    engine = TorchTrainEngine(config)
    while not engine.run_stage(Stage.SFT_WARMUP, max_seconds=1e9).is_done:
        pass
    engine.save(folder)


# --- rlmux --------------------------------------------------------------------------------------------------


def train_with_rlmux(case: Case, checkpoint: Path, num_steps: int) -> Run:
    """A whole `rlmux run` of one pipeline, and what its log says of each step."""
    import yaml

    pipeline = {
        "name": "alone",
        "steps": num_steps,
        "model": {"path": str(checkpoint)},
        "task": {"name": "sort", **case.task},
        "algorithm": {
            "prompts_per_step": case.prompts_per_step,
            "group_size": case.group_size,
            "learning_rate": case.learning_rate,
            "micro_batch_size": case.micro_batch_size,
        },
        "rollout": {
            "slots": case.slots,
            "max_new_tokens": case.max_new_tokens,
            "max_prompt_tokens": case.max_prompt_tokens,
        },
    }
    pools = {"rollout": {"devices": 1}, "train": {"devices": 1}}
    with tempfile.TemporaryDirectory() as temporary:
        file, out = Path(temporary) / "alone.yaml", Path(temporary) / "run"
        file.write_text(yaml.safe_dump({"cluster": {"pools": pools}, "policy": "solo", "pipelines": [pipeline]}))
        command = [sys.executable, "-m", "rlmux", "run", str(file), "--out", str(out), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read_run(out)


def read_run(out: Path) -> Run:
    from rlmux.core.model import PipelineId, Stage
    from rlmux.report.reports import read_timeline

    timeline = read_timeline(out)
    record = timeline.pipelines[PipelineId("alone")]
    published = [at_s for step, at_s in sorted(record.published.items()) if step > 0]
    seconds: dict[Stage, list[float]] = {}
    for order in timeline.orders:
        if order.step > SKIPPED_STEPS and order.counts:
            seconds.setdefault(order.stage, []).append(order.end_s - order.start_s)
    tokens = [metrics["tokens"] for step, metrics in record.metrics.items() if step > SKIPPED_STEPS]
    return Run(
        step_s=[after - before for before, after in pairwise(published)][SKIPPED_STEPS - 1 :],
        rollout_s=seconds[Stage.GENERATE],
        tokens=statistics.mean(tokens),
        parts_s={str(stage): statistics.median(each) for stage, each in seconds.items()},
    )


# --- TRL ----------------------------------------------------------------------------------------------------


def train_with_trl(case: Case, checkpoint: Path, num_steps: int, micro_batch_size: int) -> Run:
    """`GRPOTrainer` in this process, on one thread and one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlmux.rl.config import TaskConfig
    from rlmux.rl.tasks import make_task
    from rlmux.rl.tasks.base import share_of_right_positions
    from rlmux.rl.vocabulary import CharVocabulary

    task = make_task(TaskConfig(name="sort", params=case.task), seed=0, vocabulary=CharVocabulary())
    prompts = [task.prompt(index) for index in range(case.prompts_per_step * num_steps)]
    rows = Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in prompts])

    def score(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [share_of_right_positions(right, given) for right, given in zip(answer, completions, strict=True)]

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rollouts = timed_generation(model)
    with tempfile.TemporaryDirectory() as out:
        options = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            max_steps=num_steps,
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=case.num_trajectories // micro_batch_size,
            gradient_checkpointing=False,
            num_generations=case.group_size,
            max_completion_length=case.max_new_tokens,
            learning_rate=case.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.99,
            beta=0.0,
            loss_type="grpo",
            shuffle_dataset=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=options,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return Run(
        step_s=[after - before for before, after in pairwise(ends)][SKIPPED_STEPS - 1 :],
        rollout_s=rollouts[SKIPPED_STEPS:],
        tokens=case.num_trajectories * statistics.mean(lengths[SKIPPED_STEPS:]),
    )


def timed_generation(model: Any) -> list[float]:
    """Seconds of each later call of the model's `generate`, filled in as they are made."""
    seconds: list[float] = []
    generate = model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        answer = generate(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return answer

    model.generate = timed
    return seconds


if __name__ == "__main__":
    main()

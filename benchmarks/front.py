"""What the Tinker front adds to a step: a client's GRPO loop on `rlmux serve` against the same step of `rlmux run`.

    python benchmarks/front.py [--rounds N] [--steps N] [--prompts N] [--tokens N] [SOURCE...]

    SOURCE   a folder `src` of rlmux, such as one of another commit; by default this one. Sources take turns.

Both have one new model, a rollout and a train device, 8 answers to each prompt, and end answers as the model does. The
client samples, then sends a loss, an update and a save of weights for sampling without a wait in between.

Figures are of a step, of the last half of the steps, and medians of rounds: seconds (a median of steps), seconds that
the engines computed by the log, and CPU seconds of the client, of the server's first thread (the controller) and its
others (HTTP), and of its other processes, workers above all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from rlmux.core.events import StageFinished
from rlmux.log.run_log import LogReader

MODEL = {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}
CLUSTER = {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}}
MAX_PROMPT, GROUP_SIZE, SLOTS = 32, 8, 256
LEARNING_RATE = 1e-5
"""So low that answers keep their lengths."""
PARTS = ("client", "controller", "HTTP", "others")


class Mark(NamedTuple):
    """A moment at which a step was over; `rlmux run` prints some of them."""

    step: int
    at_s: float
    cpu_s: tuple[float, ...]
    """So far, of each of PARTS."""


def run_client(steps: int, num_prompts: int, max_tokens: int) -> None:
    """The loop of an SDK's user; prints a line after each step."""
    import tinker
    from tests.tinker.loop import datum
    from tinker import types

    training = tinker.ServiceClient().create_lora_training_client(base_model="rlmux/tiny", rank=8, seed=1)
    encode = training.get_tokenizer().encode
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0)
    sampler = training.save_weights_and_get_sampling_client()
    for step in range(1, steps + 1):
        prompts = [encode(f"s:{10_000 + num_prompts * step + one}=") for one in range(num_prompts)]
        futures = [sampler.sample(types.ModelInput.from_ints(each), GROUP_SIZE, params) for each in prompts]
        data = []
        for prompt, future in zip(prompts, futures, strict=True):
            group = future.result().sequences
            rewards = [sum(one.tokens) % 7 for one in group]
            mean = statistics.mean(rewards)
            data += [datum(prompt, one.tokens, one.logprobs, r - mean) for one, r in zip(group, rewards, strict=True)]
        loss = training.forward_backward(data, "importance_sampling")
        update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        sampler = training.save_weights_and_get_sampling_client()
        loss.result(), update.result()
        print(f"step {step}/{steps}", flush=True)


def cpu_s(server: psutil.Process, client: psutil.Process | None) -> tuple[float, ...]:
    own = server.threads()
    first = sum(each.user_time + each.system_time for each in own if each.id == server.pid)
    whole = sum(each.user_time + each.system_time for each in own)
    others = sum(map(_of_process, server.children(recursive=True)))
    return (_of_process(client) if client else 0.0), first, whole - first, others


def _of_process(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return sum(process.cpu_times()[:2])
    return 0.0


def marks(lines: IO[str], server: subprocess.Popen[str], client: subprocess.Popen[str] | None = None) -> list[Mark]:
    """A mark for each line about a step, until no line is left."""
    processes = psutil.Process(server.pid), psutil.Process(client.pid) if client else None
    steps = (re.search(r"step (\d+)/", line) for line in lines)
    return [Mark(int(step[1]), time.monotonic(), cpu_s(*processes)) for step in steps if step]


def figures(found: list[Mark], folder: Path, steps: int) -> list[float]:
    """Seconds, computed seconds and CPU seconds by part, of a step."""
    half = [each for each in found if steps // 2 <= each.step < steps]  # behind the last line, workers end
    computed_s: dict[int, float] = {}
    step_by_order: dict[Any, int] = {}
    with LogReader(folder) as log:
        for value in (entry.value for entry in log.entries()):
            if isinstance(value, StageFinished):
                computed_s[step_by_order[value.order]] = computed_s.get(step_by_order[value.order], 0.0) + value.seconds
            elif hasattr(value, "order") and hasattr(value, "step"):
                step_by_order[value.order] = value.step
    num_steps = half[-1].step - half[0].step
    cpu = [(after - before) / num_steps for before, after in zip(half[0].cpu_s, half[-1].cpu_s, strict=True)]
    seconds = statistics.median((b.at_s - a.at_s) / (b.step - a.step) for a, b in pairwise(half))
    return [seconds, statistics.median(computed_s[step] for step in sorted(computed_s)[steps // 2 : steps]), *cpu]


def measure(source: Path, is_served: bool, given: argparse.Namespace, folder: Path) -> list[float]:
    rollout = {"slots": SLOTS, "max_new_tokens": given.tokens, "max_prompt_tokens": MAX_PROMPT}
    if is_served:
        served = {"model": MODEL, **rollout}
        tree: Any = {"lanes": {"one": {"cluster": CLUSTER, "serve": {"models": {"rlmux/tiny": served}}}}}
    else:
        algorithm = {"prompts_per_step": given.prompts, "group_size": GROUP_SIZE, "learning_rate": LEARNING_RATE}
        pipeline = {"name": "alone", "steps": given.steps, "model": MODEL, "task": {"name": "sort", "digits": 5}}
        pipeline |= {"sft_warmup": {"updates": 0}, "algorithm": algorithm, "rollout": rollout}
        tree = {"cluster": CLUSTER, "pipelines": [pipeline]}
    file = folder / "file.yaml"
    file.write_text(json.dumps(tree))
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "rlmux", "serve" if is_served else "run", str(file), "--out", str(folder / "out")]
    words += ["--listen", "127.0.0.1:0"] if is_served else []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as main:
        assert main.stdout is not None
        if not is_served:
            return figures(marks(main.stdout, main), folder / "out", given.steps)
        url = next(line.strip().partition("=")[2] for line in main.stdout if "TINKER_BASE_URL=" in line)
        environment |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{source}:{Path(__file__).parents[1]}"}
        words = [sys.executable, "-W", "ignore", __file__, "--client"]
        words += [f"--{name}={getattr(given, name)}" for name in ("steps", "prompts", "tokens")]
        cwd = folder / "out" / "one" / "tokenizers"
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd) as client:
            assert client.stdout is not None
            found = marks(client.stdout, main, client)
        main.send_signal(signal.SIGINT)
        main.communicate()
        return figures(found, folder / "out" / "one", given.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="*", type=Path, default=[Path(__file__).parents[1] / "src"], metavar="SOURCE")
    for name, default in {"rounds": 3, "steps": 20, "prompts": 32, "tokens": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        run_client(given.steps, given.prompts, given.tokens)
        return
    measured: dict[tuple[str, Path], list[list[float]]] = {}
    for _ in range(given.rounds):
        for source in given.sources:
            for kind in ("run", "serve"):
                with tempfile.TemporaryDirectory() as folder:
                    row = measure(source.absolute(), kind == "serve", given, Path(folder))
                measured.setdefault((kind, source), []).append(row)
    table = Table("", "step s", "computed s", *(f"{part} CPU s" for part in PARTS), "source")
    for (kind, source), rounds in sorted(measured.items()):
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        table.add_row(kind, *(f"{each:.3f}" for each in medians), str(source))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

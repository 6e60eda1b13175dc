"""What the Tinker front adds to a step: a client's GRPO loop on `rlmux serve` against the same step of `rlmux run`.

    python benchmarks/front.py [--rounds N] [--steps N] [--prompts N] [--tokens N] [SOURCE...]

    SOURCE   a folder `src` of rlmux, such as one of another commit; by default this one. Sources take turns.

Both have one new model, a rollout and a train device, 8 answers to each prompt, and end answers as the model does. The
client samples, then sends a loss, an update and a save of weights for sampling without a wait in between.

Figures are seconds of a step, medians of rounds: `step`, a median of the last half of 30 or more; `computed` by the
engines, from the log; CPU in the last half: client, the server's first thread (controller), its others (HTTP), workers.
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
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rlmux.core.events import StageFinished
from rlmux.log.run_log import LogReader

ROOT = Path(__file__).parents[1]
MODEL = {"model": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 128}}
TASK = {"task": {"name": "sort", "digits": 5}, "sft_warmup": {"updates": 0}}
CLUSTER = {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}}
MAX_PROMPT, GROUP_SIZE, SLOTS, LEARNING_RATE = 32, 8, 256, 1e-5  # so low that answers keep their lengths
DEFAULTS = {"--rounds": 3, "--steps": 40, "--prompts": 32, "--tokens": 16}


class Mark(NamedTuple):
    """A moment at which a step was over; `rlmux run` prints some of them. `cpu_s`: so far, as in the table."""

    step: int
    at_s: float
    cpu_s: tuple[float, ...]


def run_client(steps: int, num_prompts: int, max_tokens: int) -> None:
    """The loop of an SDK's user; prints a line after each step."""
    from tests.tinker.loop import datum

    import tinker
    from tinker import types

    training = tinker.ServiceClient().create_lora_training_client(base_model="rlmux/tiny", rank=8, seed=1)
    encode = training.get_tokenizer().encode
    adam = types.AdamParams(learning_rate=LEARNING_RATE)
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0)
    sampler = training.save_weights_and_get_sampling_client()
    for step in range(1, steps + 1):
        prompts = [encode(f"s:{10_000 + num_prompts * step + one}=") for one in range(num_prompts)]
        futures = [sampler.sample(types.ModelInput.from_ints(each), GROUP_SIZE, params) for each in prompts]
        data = []
        for prompt, future in zip(prompts, futures, strict=True):
            group = future.result().sequences
            mean = statistics.mean(sum(one.tokens) % 7 for one in group)
            data += [datum(prompt, one.tokens, one.logprobs or [], sum(one.tokens) % 7 - mean) for one in group]
        loss, update = training.forward_backward(data, "importance_sampling"), training.optim_step(adam)
        sampler = training.save_weights_and_get_sampling_client()
        print(f"step {step}/{steps} {loss.result().metrics} {update.result().metrics}", flush=True)


def marks(lines: Iterable[str], server: int, client: int | None = None) -> list[Mark]:
    """A mark for each line about a step, until no line is left."""
    found = (re.search(r"step (\d+)/", line) for line in lines)
    processes = psutil.Process(server), psutil.Process(client) if client else None
    return [Mark(int(step[1]), time.monotonic(), cpu_s(*processes)) for step in found if step]


def cpu_s(server: psutil.Process, client: psutil.Process | None) -> tuple[float, ...]:
    threads = {each.id: each.user_time + each.system_time for each in server.threads()}
    first, workers_s = threads.pop(server.pid), 0.0
    for each in server.children(recursive=True):
        with suppress(psutil.Error):  # one that ended meanwhile
            workers_s += sum(each.cpu_times()[:2])
    return sum(client.cpu_times()[:2]) if client else 0.0, first, sum(threads.values()), workers_s


def figures(found: list[Mark], folder: Path, steps: int) -> list[float]:
    """Seconds, computed seconds and CPU seconds by part, of a step."""
    first, *_, last = half = [one for one in found if steps // 2 <= one.step < steps]  # then workers end
    with LogReader(folder) as log:
        computed_s = sum(one.value.seconds for one in log.entries() if isinstance(one.value, StageFinished))
    cpu = [(after - before) / (last.step - first.step) for before, after in zip(first.cpu_s, last.cpu_s, strict=True)]
    seconds = statistics.median((after.at_s - one.at_s) / (after.step - one.step) for one, after in pairwise(half))
    return [seconds, computed_s / steps, *cpu]


def measure(source: Path, is_served: bool, given: argparse.Namespace, folder: Path) -> list[float]:
    rollout = {"slots": SLOTS, "max_new_tokens": given.tokens, "max_prompt_tokens": MAX_PROMPT}
    algorithm = {"prompts_per_step": given.prompts, "group_size": GROUP_SIZE, "learning_rate": LEARNING_RATE}
    pipeline = {"name": "alone", "steps": given.steps, **MODEL, **TASK, "algorithm": algorithm, "rollout": rollout}
    lane = {"cluster": CLUSTER, "serve": {"models": {"rlmux/tiny": {**MODEL, **rollout}}}}
    tree = {"lanes": {"one": lane}} if is_served else {"cluster": CLUSTER, "pipelines": [pipeline]}
    (folder / "file.yaml").write_text(json.dumps(tree))
    command = ["serve", "--listen", "127.0.0.1:0"] if is_served else ["run"]
    words = [sys.executable, "-m", "rlmux", *command, str(folder / "file.yaml"), "--out", str(folder / "out")]
    own = {**os.environ, "PYTHONPATH": f"{source}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, env=own, **pipes) as main:
        if not is_served:
            return figures(marks(main.stdout or (), main.pid), folder / "out", given.steps)
        url = next(line.strip().partition("=")[2] for line in main.stdout or () if "TINKER_BASE_URL=" in line)
        own |= {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0"}
        words = [sys.executable, __file__, "--client", *(f"{key}={getattr(given, key[2:])}" for key in DEFAULTS)]
        pipes |= {"stderr": subprocess.DEVNULL, "cwd": folder / "out" / "one" / "tokenizers"}
        with subprocess.Popen(words, env=own, **pipes) as client:
            found = marks(client.stdout or (), main.pid, client.pid)
        main.send_signal(signal.SIGINT)
        main.communicate()
        return figures(found, folder / "out" / "one", given.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="*", type=Path, default=[ROOT / "src"], metavar="SOURCE")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    for name, default in DEFAULTS.items():
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    if given.client:
        run_client(given.steps, given.prompts, given.tokens)
        return
    rows: dict[tuple[str, Path], list[list[float]]] = {}
    for _ in range(given.rounds):
        for kind, source in ((kind, source.absolute()) for source in given.sources for kind in ("run", "serve")):
            with tempfile.TemporaryDirectory() as folder:
                rows.setdefault((kind, source), []).append(measure(source, kind == "serve", given, Path(folder)))
    print("          step computed client control    HTTP workers")
    for (kind, source), measured in sorted(rows.items()):
        print(f"{kind:5} ", *(f"{statistics.median(each):7.3f}" for each in zip(*measured, strict=True)), f" {source}")


if __name__ == "__main__":
    main()

"""The text of a file for the GPUs of one machine, with a comment beside each choice, and the check that it loads and
fits.

    Choice ── values of templates/checkpoint_gpus.yaml ──▶ text ── parse_spec, memory as `run` counts it ──▶ checked
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlmux.cli.gpu_start.machine import with_as_much_memory
from rlmux.cli.memory_rows import HUGE
from rlmux.config import Purpose
from rlmux.config.load import parse_spec
from rlmux.config.tree import PoolConfig
from rlmux.core.model import DeviceId
from rlmux.profiling.gpu_choice import SERVER, Choice, Wanted
from rlmux.rl.memory.memory_parts import usual_checkpoint_interval

MAX_PIPELINES = 8
_WIDTH = 27
"""Columns of a key and its value, before the comment."""
_GYM_TASKS = (
    *("countdown", "chain_sum", "gcd", "number_sequence"),
    *("prime_factorization", "basic_arithmetic", "syllogism", "letter_counting"),
)
"""Of the package reasoning-gym."""
_TASKS = (
    *("{name: chain, terms: 12}", "{name: add, digits: 6}", "{name: calculator, digits: 4}", "guess"),
    *("{name: sort}", "{name: reverse, letters: 12}", "{name: chain, terms: 24}", "{name: add, digits: 12}"),
)
"""Built-in ones."""


def values_of(wanted: Wanted, choice: Choice, engine_lines: Sequence[str]) -> dict[str, str]:
    """Values of the template's placeholders, but for `file` and `model`. `engine_lines`: as found on this machine."""
    number, estimate = wanted.num_pipelines, choice.estimated.estimate
    billions = f"{wanted.shape.num_parameters / 1e9:.1f}B parameters"
    trained = f"an adapter of {billions}" if wanted.has_adapter else f"all {billions}"
    share = f"share them, and train {trained}" if number > 1 else f"trains {trained}"
    alike = with_as_much_memory(wanted.machine)
    return {
        "model_name": wanted.model.name,
        "machine": str(wanted.machine),
        "count": f"{number} pipeline{'s' if number > 1 else ''}",
        "share": share,
        "rollout_s": f"{estimate.rollout_s:,.0f}",
        "train_s": f"{estimate.train_s:,.0f}",
        "remarks": "".join(f"# {line}\n" for line in _remarks(wanted, choice)),
        "kinds": f"{' or '.join(alike)} has as much memory" if alike else "no other kind has as much memory",
        "host": "this machine's part" if wanted.machine.is_host_known else "assumed here: write yours",
        "pools": _lines(2, [(f"{name}: {_pool(pool)}", "") for name, pool in choice.cluster.pools.items()]),
        "steps": str(choice.pipeline.num_steps),
        "adapter": _lines(1, [_adapter(wanted)]),
        "checkpoint_every": _lines(1, [_checkpoint_every(choice)]),
        "algorithm": _lines(2, _algorithm(choice)),
        "rollout": _lines(2, _rollout(choice, engine_lines)),
        "train": _lines(2, _train(choice)),
        "turns": "one at a time"
        if choice.num_hosted == 1 or choice.split.is_both
        else "while one trains, another samples",
        "pipelines": _pipelines(number),
    }


def check_text(text: str, source: str, folder: Path, wanted: Wanted, choice: Choice) -> None:
    """Load the text as `plan` does, and add its memory up as `run` does on such a machine.

    Raises UserError. Its estimates are the choice's: no task takes part in one.
    """
    from rlmux.runtime.backend import Submission
    from rlmux.runtime.memory import memory_budget

    there = json.dumps(str(wanted.model))  # the file's own folder may not be there yet
    spec = parse_spec(
        text, source=source, folder=folder, purpose=Purpose.PLAN, estimate_of=lambda *_: choice.estimated,
        overrides=(f"code_folder={there}", f"defaults.model.path={there}"),
    )  # fmt: skip
    devices: dict[DeviceId, str] = {}
    gpus = iter(range(wanted.machine.num_gpus))
    for name, pool in spec.cluster.pools.items():
        for node in range(pool.num_nodes or 0):
            devices[DeviceId(name, node, 0)] = ",".join(str(next(gpus)) for _ in range(pool.gpus_per_device))
    free = {str(gpu): wanted.machine.memory_gb * 1e9 for gpu in range(wanted.machine.num_gpus)}
    machine = memory_budget.MachineMemory(host_bytes=math.inf, gpu_by_device=devices, free_bytes_by_gpu=free)
    given = [Submission(pipeline=each.pipeline, config=each.config) for each in spec.pipelines]
    known = [
        memory_budget.with_footprint(
            each, spec.cluster, is_gpu=True, own_bases=memory_budget.own_bases(each, given, is_gpu=True)
        )
        for each in given
    ]
    cluster = memory_budget.with_machine_memory(spec.cluster, known, machine)
    memory_budget.check_each_fits(cluster, known, is_gpu=True, on_machine=True)


def _lines(depth: int, lines: Iterable[tuple[str, str]]) -> str:
    """(Key and value, comment) in columns."""
    shown = []
    for key, comment in lines:
        text = f"{'  ' * depth}{key}"
        shown.append(f"{text:<{_WIDTH}}   # {comment}" if comment else text)
    return "\n".join(shown)


def _pool(pool: PoolConfig) -> str:
    size = f", gpus_per_device: {pool.gpus_per_device}" if pool.gpus_per_device > 1 else ""
    keys = f"phase: {pool.phase}, devices: {pool.devices}{size}, gpu: {pool.gpu}"
    host = "" if pool.host_memory_gb is None else f", host_memory_gb: {pool.host_memory_gb:g}"
    return f"{{{keys}, device_memory_gb: {pool.device_memory_gb:g}{host}}}"


def _remarks(wanted: Wanted, choice: Choice) -> Iterator[str]:
    need_gb = wanted.host_bytes(choice.pipeline, choice.split) / 1e9
    if not choice.num_hosted:
        yield f"Host memory is not counted: for each GPU a pipeline needs {need_gb:,.0f} GB, of 90 % of what there is."
    elif choice.num_hosted < wanted.num_pipelines:
        at_a_time = "one pipeline" if choice.num_hosted == 1 else f"{choice.num_hosted} pipelines"
        yield f"Host memory holds the states of {at_a_time}: {need_gb:,.0f} GB for each GPU and pipeline; others wait."
    if wanted.shape.num_parameters >= HUGE:
        yield "For training rlmux has shards (FSDP2), not Megatron's TP, PP, EP and CP: docs/how-to/your-trainer.md."


def _adapter(wanted: Wanted) -> tuple[str, str]:
    adapter = wanted.adapter
    if adapter is None:
        return "# adapter: {rank: 16, alpha: 32}", "LoRA instead: less memory, learning_rate: 1e-5 (init --lora)"
    targets = "" if wanted.model_type != "qwen3_moe" else f", targets: [{', '.join(adapter.targets)}]"
    return f"adapter: {{rank: {adapter.rank}, alpha: {adapter.alpha:g}{targets}}}", "LoRA: a higher rank learns more"


def _checkpoint_every(choice: Choice) -> tuple[str, str]:
    every = usual_checkpoint_interval(choice.training)
    return f"checkpoint_every: {every}", "steps that a crash costs at most; each checkpoint halts training"


def _algorithm(choice: Choice) -> Iterator[tuple[str, str]]:
    algorithm = choice.pipeline.algorithm
    yield f"name: {algorithm.name}", ""
    yield f"prompts_per_step: {algorithm.prompts_per_step}", "more make gradients less noisy, and a step longer"
    yield f"group_size: {algorithm.group_size}", "answers to each prompt, compared with each other"
    rate = f"{algorithm.learning_rate:.0e}".replace("e-0", "e-")
    yield f"learning_rate: {rate}", "of AdamW; about ten times as much for an adapter"
    if algorithm.micro_batch_size is not None:
        yield f"micro_batch_size: {algorithm.micro_batch_size}", "sequences of a pass: more are faster, need memory"


def _rollout(choice: Choice, engine_lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    rollout = choice.pipeline.rollout
    for line in engine_lines:
        yield line, ""
    if rollout.engine == SERVER:
        yield f"engine: {{name: {SERVER.name}, python: {SERVER.python}}}", "fill in: docs/how-to/vllm.md"
    yield f"workers: {rollout.num_workers}", "all devices of the pool: more end a rollout sooner"
    if rollout.tensor_parallel > 1:
        yield f"tensor_parallel: {rollout.tensor_parallel}", "GPUs of each copy: more leave room for KV cache"
    yield f"slots: {rollout.num_slots}", "answers decoded at once: more are faster, and need KV cache"
    if rollout.kv_tokens is not None:
        yield f"kv_tokens: {rollout.kv_tokens}", "of the cache: what the weights leave; answers wait when it is full"
    yield f"max_prompt_tokens: {rollout.max_prompt_tokens}", "a longer prompt is refused"
    yield f"max_new_tokens: {rollout.max_new_tokens}", "of the longest answer: more room to reason, more memory"
    yield f"dtype: {rollout.dtype}", "float32 samples as training computes, at twice the memory"


def _train(choice: Choice) -> Iterator[tuple[str, str]]:
    train = choice.pipeline.train
    yield f"workers: {train.num_workers}", "all devices of the pool, a power of two"
    if train.num_workers > 1:
        shared = "shard: each has a part of the model; replicate: whole copies, less traffic, more memory"
        yield f"sharding: {train.sharding}", shared
    yield f"dtype: {train.dtype}", "of the computation; updated weights stay float32"
    moments = {
        "device": "exact moments on the GPU; 8bit or cpu: less of its memory",
        "8bit": "moments in 2 bytes a weight, not 8; needs pip install 'rlmux[8bit]'",
        "cpu": "moments in host memory: a slower update, no GPU memory",
    }
    yield f"optimizer_state: {train.optimizer_state}", moments[train.optimizer_state]
    recomputes = str(train.activation_checkpointing).lower()
    yield f"activation_checkpointing: {recomputes}", "true: less memory, a third more time"
    if train.tokens_per_micro_batch is not None:
        yield f"tokens_per_micro_batch: {train.tokens_per_micro_batch}", "of a pass: more are faster, need memory"


def _pipelines(number: int) -> str:
    tasks: Mapping[str, str] = dict(_tasks())
    names = list(tasks)[:number]
    return "\n".join(f"  - {{name: {name}, seed: {seed}, task: {tasks[name]}}}" for seed, name in enumerate(names, 1))


def _tasks() -> Iterator[tuple[str, str]]:
    """(Name of the pipeline, its task): of reasoning-gym where it is installed, else built-in ones."""
    if find_spec("reasoning_gym") is not None:
        yield from ((name, f'"reasoning-gym:{name}"') for name in _GYM_TASKS)
        return
    for index, task in enumerate(_TASKS, 1):
        yield f"{task.strip('{}').removeprefix('name: ').partition(',')[0]}-{index}", task

"""One sub-stage of the real engines, over and over: what a profile and a benchmark time.

    make_unit(sub_stage, sizes, device) ──▶ a call that does one unit and waits until the device has done it
    BenchmarkProcess    the same in a process of its own, pinned to a core: windows of time ──▶ units / s in each

    prefill         a batch of new prompts        old_logprobs   forward of a micro-batch
    dense, tail     decode steps, full or few     update          forward, backward, optimizer step

Processes begin and end counting at the same moments, and work on a little beyond both, so that counted work was
done beside the others from first to last. On a core, a second is one of the processor time that these processes got
together (or each, on cores of their own): other programs on the same core slow them, and change nothing in what they
do to each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import nn

from rlmux.core.errors import PipelineError, UserError
from rlmux.core.model import SubStage
from rlmux.engines.device_fraction import fraction_setter
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.packed_attention import pack_attention
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.train.state.flat_parameters import FlatParameters
from rlmux.engines.train.update.adamw import AdamW, AdamWNumbers
from rlmux.engines.train.update.micro_batches import TrainingSequence, cut
from rlmux.engines.train.update.training_forward import score_tokens
from rlmux.hidden_main import hidden_main
from rlmux.rl.config import ModelConfig, RolloutConfig
from rlmux.rl.types import TrajectoryId, TrajectoryRequest

BENCHMARK_SUB_STAGES = (
    SubStage.PREFILL,
    SubStage.DENSE_DECODE,
    SubStage.TAIL_DECODE,
    SubStage.OLD_LOGPROBS,
    SubStage.UPDATE,
)
_SEED = 1
_PAD_S = 0.05
"""Seconds worked on beyond the counted window, so that the others are counted beside this work."""
_SHORT_PAD_S = 0.01
"""The same between windows that follow each other."""
Window = tuple[float, float]
"""(begin, end), in seconds of the monotonic clock."""
_ANSWER_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSizes:
    """How much work one unit of each sub-stage is."""

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=256
        )
    )
    vocab_size: int = 64
    num_slots: int = 32
    num_tail: int = 2
    """Sequences that tail decoding still decodes."""
    prompt_tokens: int = 64
    new_tokens: int = 96
    num_prompts: int = 8
    """Prompts of one unit of prefill."""
    decode_steps: int = 4
    """Decode steps of one unit of decoding."""
    micro_batch_size: int = 8
    train_tokens: int = 64
    """Tokens of each sequence of a micro-batch."""


CPU_SIZES = BenchmarkSizes()
CUDA_SIZES = BenchmarkSizes(
    model=ModelConfig(hidden_size=1024, num_layers=16, num_heads=16, num_kv_heads=8, intermediate_size=3072),
    vocab_size=32_000,
    num_slots=128,
    num_tail=8,
    prompt_tokens=128,
    new_tokens=256,
    num_prompts=16,
    decode_steps=8,
    micro_batch_size=8,
    train_tokens=512,
)
"""Two processes of each sub-stage are on one GPU at once, each with its weights and KV: some 60 GB together."""


def usual_sizes(device: str) -> BenchmarkSizes:
    """Sizes that fill a device of this kind: `cpu` or `cuda`."""
    return CUDA_SIZES if device.startswith("cuda") else CPU_SIZES


def make_unit(sub_stage: str, sizes: BenchmarkSizes, device: str) -> Callable[[], None]:
    """A call that does one unit of the sub-stage and waits until the device has done it, warmed up."""
    if sub_stage not in BENCHMARK_SUB_STAGES:
        raise UserError(f"sub-stage {sub_stage!r}; accepted: {', '.join(BENCHMARK_SUB_STAGES)}")
    if sub_stage in (SubStage.OLD_LOGPROBS, SubStage.UPDATE):
        unit = _training(sizes, device, is_update=sub_stage == SubStage.UPDATE)
    else:
        unit = _sampling(sub_stage, sizes, device)

    def do_unit() -> None:
        unit()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    for _ in range(2):
        do_unit()
    return do_unit


def _sampling(sub_stage: str, sizes: BenchmarkSizes, device: str) -> Callable[[], None]:
    limits = RolloutConfig(
        max_new_tokens=sizes.new_tokens, max_prompt_tokens=sizes.prompt_tokens, num_slots=sizes.num_slots
    )
    engine = SlotRolloutEngine(
        sizes.model,
        limits,
        vocab_size=sizes.vocab_size,
        seed=_SEED,
        device=device,
    )
    num_active = {
        SubStage.PREFILL: sizes.num_prompts,
        SubStage.DENSE_DECODE: sizes.num_slots,
        SubStage.TAIL_DECODE: sizes.num_tail,
    }[SubStage(sub_stage)]
    new_tokens = 1 if sub_stage == SubStage.PREFILL else sizes.new_tokens
    prompt_tokens = sizes.prompt_tokens if sub_stage == SubStage.PREFILL else min(8, sizes.prompt_tokens)
    steps = count()

    def unit() -> None:
        left = engine.run_chunk(max_decode_steps=sizes.decode_steps, max_seconds=60.0)
        if left.num_active + left.num_waiting == 0:
            step = next(steps)
            engine.submit(
                [_request(step, number, prompt_tokens, new_tokens, sizes.vocab_size) for number in range(num_active)]
            )

    unit()
    return unit


def _request(step: int, number: int, prompt_tokens: int, new_tokens: int, vocab_size: int) -> TrajectoryRequest:
    """No two prompts are alike, and nothing stops but by length."""
    first = (step * 7919 + number * 104_729) % vocab_size
    return TrajectoryRequest(
        id=TrajectoryId(step, number, 0),
        prompt_tokens=tuple((first + place * (number + 1)) % vocab_size for place in range(prompt_tokens)),
        max_new_tokens=new_tokens,
        stop_tokens=(),
        seed=_SEED,
    )


def _training(sizes: BenchmarkSizes, device: str, *, is_update: bool) -> Callable[[], None]:
    """What `TorchTrainEngine` does with a micro-batch, one micro-batch to the step."""
    model = build_model(sizes.model, sizes.vocab_size, _SEED)
    pack_attention(model)
    nn.Module.to(model, device)
    flat = FlatParameters(model)
    optimizer, numbers = AdamW(flat.weights), AdamWNumbers(betas=(0.9, 0.99))
    half = sizes.train_tokens // 2
    sequences = [
        TrainingSequence(
            prompt_tokens=[(row + place) % sizes.vocab_size for place in range(half)],
            tokens=[(3 * row + place) % sizes.vocab_size for place in range(half)],
            is_sampled=[True] * half,
            weight=1.0 / (half * sizes.micro_batch_size),
        )
        for row in range(sizes.micro_batch_size)
    ]
    batch = cut(sequences, sizes.micro_batch_size)[0].to(torch.device(device))

    def forward() -> None:
        with torch.no_grad():
            score_tokens(model, batch, 1.0).logprobs.cpu()

    def update() -> None:
        logprobs = score_tokens(model, batch, 1.0).logprobs
        loss = -(logprobs * batch.weights).sum()
        flat.gradients.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.update(flat.weights, flat.gradients, 1e-4, numbers)

    return update if is_update else forward


# --- in processes of their own ------------------------------------------------------------------------------


class BenchmarkProcess:
    """A process that does units of one sub-stage, on command and at a given device fraction."""

    def __init__(self, sub_stage: str, sizes: BenchmarkSizes, device: str, core: int | None) -> None:
        self._sub_stage = sub_stage
        context = get_context("forkserver")  # it imports torch once for all of them, and touches no device
        context.set_forkserver_preload(["rlmux.runtime.workers.fork_server_imports", __name__])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, sub_stage, sizes, device, core), daemon=True)
        with hidden_main():
            self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        self._answer()

    def begin(self, windows: Sequence[Window], device_fraction: float, *, pad_s: float) -> None:
        """Work in each of these windows, and `pad_s` longer before and after."""
        self._connection.send((windows, device_fraction, pad_s))

    def rates(self) -> Sequence[tuple[float, float]]:
        """Units per second in each window, and the part of a core that the process had."""
        return self._answer()

    def end(self) -> None:
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _answer(self) -> Sequence[tuple[float, float]]:
        if not self._connection.poll(_ANSWER_LIMIT_S):
            raise TimeoutError("a micro-benchmark gave no answer")
        try:
            answer = self._connection.recv()
        except EOFError as error:
            raise PipelineError(
                f"the micro-benchmark of {self._sub_stage} ended, its reason is above; where memory ran out: "
                "accepted: a device that nothing else uses"
            ) from error
        return [(float(units_per_s), float(cpu_s)) for units_per_s, cpu_s in answer]


@contextmanager
def benchmark_processes(
    sub_stages: Sequence[str], sizes: BenchmarkSizes, device: str, core: int | None, *, num_each: int = 2
) -> Iterator[dict[str, list[BenchmarkProcess]]]:
    """`num_each` processes of each sub-stage, idle until started; all on one core or GPU (`cuda`, `cuda:1`)."""
    made = {
        sub_stage: [BenchmarkProcess(sub_stage, sizes, device, core) for _ in range(num_each)]
        for sub_stage in sub_stages
    }
    try:
        for pair in made.values():
            for process in pair:
                process.wait_until_ready()
        yield made
    finally:
        for pair in made.values():
            for process in pair:
                process.end()


def rates(working: Sequence[tuple[BenchmarkProcess, float]], seconds: float, *, is_core: bool) -> list[float]:
    """Units per second of processes that work at once, each at its device fraction.

    On a core, seconds are counted as described in the module.
    """
    from_s = time.monotonic() + _PAD_S
    for process, device_fraction in working:
        process.begin([(from_s, from_s + seconds)], device_fraction, pad_s=_PAD_S)
    answers = [process.rates()[0] for process, _ in working]
    core_s = sum(cpu_s for _, cpu_s in answers) if is_core else 1.0
    return [units / max(core_s, 1e-9) for units, _ in answers]


def alternating_rates(
    first: BenchmarkProcess, second: BenchmarkProcess, seconds: float, num_windows: int, *, is_core: bool
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Two processes with a device each: the first alone, both at once, the second alone, over and over.

    Returns (alone, beside the other) in units per second, for each process a list of `num_windows` pairs. On a core a
    second is one of the processor time that the process had itself.
    """
    period_s = seconds + 2 * _SHORT_PAD_S
    begin_s = time.monotonic() + _PAD_S
    windows = [(begin_s + at * period_s, begin_s + at * period_s + seconds) for at in range(3 * num_windows)]
    first.begin([window for at, window in enumerate(windows) if at % 3 != 2], 1.0, pad_s=_SHORT_PAD_S)
    second.begin([window for at, window in enumerate(windows) if at % 3 != 0], 1.0, pad_s=_SHORT_PAD_S)
    alone_beside, beside_alone = (
        [units / max(cpu_s if is_core else 1.0, 1e-9) for units, cpu_s in process.rates()]
        for process in (first, second)
    )
    return (
        list(zip(alone_beside[0::2], alone_beside[1::2], strict=True)),
        list(zip(beside_alone[1::2], beside_alone[0::2], strict=True)),
    )


def _serve(connection: Connection, sub_stage: str, sizes: BenchmarkSizes, device: str, core: int | None) -> None:
    torch.set_num_threads(1)
    if os.getsid(0) != os.getpid():
        os.setsid()  # as workers are: niceness may be a matter of sessions
    if core is not None:
        os.sched_setaffinity(0, {core})
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    unit = make_unit(sub_stage, sizes, device)
    setter = fraction_setter(device)
    connection.send([])
    try:
        while True:
            windows, device_fraction, pad_s = connection.recv()
            setter.set(device_fraction)
            connection.send([_timed(unit, from_s, to_s, pad_s) for from_s, to_s in windows])
    except (EOFError, OSError):
        return


def _timed(unit: Callable[[], None], from_s: float, to_s: float, pad_s: float) -> tuple[float, float]:
    """(units per second, processor seconds per second), by the units that ended within the window."""
    time.sleep(max(0.0, from_s - pad_s - time.monotonic()))
    ended: list[tuple[float, float]] = []
    while (now_s := time.monotonic()) < to_s + pad_s:
        if now_s >= from_s:
            ended.append((now_s, time.process_time()))
        unit()
    ended.append((time.monotonic(), time.process_time()))
    within = [moment for moment in ended if moment[0] <= to_s]
    if len(within) < 3:  # units as long as the window: by all that began in it
        within = ended
    if len(within) < 2:
        return 1.0 / max(ended[-1][0] - from_s, 1e-9), 1.0
    (first_s, first_cpu_s), (last_s, last_cpu_s) = within[0], within[-1]
    return (len(within) - 1) / (last_s - first_s), (last_cpu_s - first_cpu_s) / (last_s - first_s)

"""On-policy rivals, whose rollout and training take turns: verl, and RollPacker's tail batching.

    verl         all devices generate ─▶ all devices train ─▶ weights are published ─▶ next step
    rollpacker   the same with short rounds: more prompts and answers than needed, and the first that are done are
                 the batch; prompts that lose wait for a long round             (NSDI'26, section 4.1; 1.25 x 1.25)

Both are on-policy: every trajectory is trained on by the version that made it.

Left out: RollPacker's planner of tensor parallelism, its reward limits and its stream trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlmux.papers.rivals.trainer import RivalResult, VirtualTrainer, bubble_share
from rlmux.papers.rivals.virtual_device import Answer, Ended, VirtualEngine, answers_of, by_index
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.models.substages import SubStageWorld


def verl(
    world: SubStageWorld,
    *,
    num_devices: int,
    num_steps: int,
    split: tuple[int, int] | None = None,
    has_one_queue: bool = False,
) -> RivalResult:
    """Synchronous steps on all devices, or on a rollout and a training pool (`split`). `has_one_queue`: devices take
    answers as slots become free, instead of a fixed shard each."""

    def rollout(engine: VirtualEngine, step: int, now_s: float) -> list[Ended]:
        answers = answers_of(world, step)
        if has_one_queue:
            engine.submit(answers, now_s)
        else:
            engine.deal(by_index(answers, len(engine.devices)), now_s)
        return engine.run()

    return _turns(world, "verl", num_devices, num_steps, rollout, split, has_one_queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Prompts of one step of RollPacker, in dataset order."""

    prompts: tuple[int, ...]
    group_size: int
    is_long: bool
    """Whether its prompts come from the queue, and none is cut."""


class Rounds:
    """Short and long rounds over a dataset. Long: the queue has a step's prompts, or too few are left."""

    def __init__(self, num_steps: int, num_groups: int, group_size: int, prompts: float, samples: float) -> None:
        self._num_groups = num_groups
        self._group_size = group_size
        self._launched = math.ceil(num_groups * prompts - 1e-9)
        self._launched_size = math.ceil(group_size * samples - 1e-9)
        self._fresh = list(range(num_steps * num_groups))
        self._queued: list[int] = []

    def next(self) -> Round:
        """The next step's round."""
        if len(self._queued) < self._num_groups and len(self._fresh) >= self._launched:
            prompts, self._fresh = self._fresh[: self._launched], self._fresh[self._launched :]
            return Round(prompts=tuple(prompts), group_size=self._launched_size, is_long=False)
        waiting = [*self._queued, *self._fresh]
        self._fresh = waiting[max(self._num_groups, len(self._queued)) :]
        self._queued = waiting[self._num_groups : len(waiting) - len(self._fresh)]
        return Round(prompts=tuple(waiting[: self._num_groups]), group_size=self._group_size, is_long=True)

    def lose(self, prompts: Sequence[int]) -> None:
        """Queue the prompts that a short round has not trained on."""
        self._queued += prompts


def rollpacker(
    world: SubStageWorld, *, num_devices: int, num_steps: int, prompts: float = 1.25, samples: float = 1.25
) -> RivalResult:
    """Tail batching. A prompt keeps its tendency to long answers when it is sampled again; factors of 1 are verl."""
    distribution = length_distribution(world.lengths_of)
    size = distribution.group_size
    num_groups = world.num_sequences // size
    rounds = Rounds(num_steps, num_groups, size, prompts, samples)
    scores = np.random.default_rng([world.seed, 2]).standard_normal(num_steps * num_groups)

    def rollout(engine: VirtualEngine, step: int, now_s: float) -> list[Ended]:
        drawn = rounds.next()
        generator = np.random.default_rng([world.seed, step, 2])
        lengths = distribution.answers(generator, scores[list(drawn.prompts)], drawn.group_size)
        answers = [
            Answer(number=place, group=place // drawn.group_size, length=int(n)) for place, n in enumerate(lengths)
        ]
        engine.deal(by_index(answers, len(engine.devices)), now_s)
        if drawn.is_long:
            return engine.run()
        kept = _race(engine, num_groups, size)
        done = {ended.answer.group for ended in kept}
        rounds.lose([prompt for place, prompt in enumerate(drawn.prompts) if place not in done])
        return kept

    return _turns(world, "rollpacker", num_devices, num_steps, rollout)


def _race(engine: VirtualEngine, num_groups: int, group_size: int) -> list[Ended]:
    """The answers of the first groups that are done; a done group's other answers stop, and all of them at the end."""
    ended_by_group: dict[int, list[Ended]] = {}
    done: dict[int, None] = {}
    now_s = 0.0
    while len(done) < num_groups:
        newly: dict[int, None] = {}
        for ended in engine.finish():
            now_s, group = ended.end_s, ended_by_group.setdefault(ended.answer.group, [])
            if len(group) < group_size and len(done) < num_groups:
                group.append(ended)
                if len(group) == group_size:
                    newly[ended.answer.group] = done[ended.answer.group] = None
        if newly:
            is_over = len(done) == num_groups
            for device in engine.devices:
                device.cut(None if is_over else newly, now_s)
    return [ended for group in done for ended in ended_by_group[group]]


def _turns(
    world: SubStageWorld,
    system: str,
    num_devices: int,
    num_steps: int,
    rollout: Callable[[VirtualEngine, int, float], list[Ended]],
    split: tuple[int, int] | None = None,
    has_one_queue: bool = False,
) -> RivalResult:
    """Rollout, training and publishing, one after the other. `rollout`: (engine, step, now) to the trained answers."""
    num_rollout, num_train = split or (num_devices, num_devices)
    engine = VirtualEngine(world, num_rollout, has_one_queue=has_one_queue)
    trainer = VirtualTrainer(world, num_train)
    prompt_tokens = length_distribution(world.lengths_of).prompt_tokens
    now_s, trained_tokens, ends = 0.0, 0, []
    for step in range(1, num_steps + 1):
        ended = rollout(engine, step, now_s)
        tokens = int(sum(finished.answer.length for finished in ended) + prompt_tokens * len(ended))
        trained_tokens += tokens
        now_s = max(finished.end_s for finished in ended) + trainer.train_s(tokens)
        now_s += trainer.publish_s
        ends.append(now_s)
    return RivalResult(
        system=system,
        num_rollout_devices=num_rollout,
        num_train_devices=num_train,
        step_ends_s=tuple(ends),
        trained_tokens=trained_tokens,
        decoded_tokens=engine.decoded_tokens,
        staleness_mean=0.0,
        staleness_max=0,
        bubble_share=bubble_share(engine.busy_s + trainer.busy_s * num_train, num_devices, now_s),
    )

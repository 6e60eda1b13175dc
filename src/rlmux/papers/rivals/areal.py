"""AReaL: rollouts that never wait, interrupted by new weights.

    admission ──▶ rollout pool ── complete groups ──▶ buffer ── the B oldest ──▶ training pool
        ▲              ▲                                                             │
        └── version ───┴───────── new weights: seated answers are computed again ◀───┘

Admission of the n-th trajectory (section 4.2):   floor((n - 1) / B) <= version + eta
B is the batch in trajectories; eta 0 is synchronous, 1 overlaps one step. Training starts when B are complete, the
oldest first, each once. Answers that are seated when weights arrive have tokens of several versions.

`on_weights="drain"` is Laminar's: a device ends its seated answers under one version, then loads the newest.

Left out: micro-batches packed by tokens; Laminar's move of tails between drained devices.
"""

from __future__ import annotations

import math
from collections import deque

from rlmux.core.errors import UserError
from rlmux.papers.rivals.trainer import RivalResult, VirtualTrainer, bubble_share
from rlmux.papers.rivals.virtual_device import Ended, VirtualEngine, answers_of, num_groups_of
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.models.substages import SubStageWorld

ON_WEIGHTS = ("recompute", "drain")


def areal(
    world: SubStageWorld,
    *,
    num_devices: int,
    num_steps: int,
    eta: int = 1,
    split: tuple[int, int] | None = None,
    on_weights: str = "recompute",
) -> RivalResult:
    """`eta`: the most versions that admission runs ahead. `split`: by default three rollout devices to one that trains.
    Raises UserError."""
    if eta < 0 or on_weights not in ON_WEIGHTS:
        raise UserError(f"eta is {eta}, on_weights {on_weights!r}; accepted: 0 or more, and {' or '.join(ON_WEIGHTS)}")
    return _Run(world, num_devices, num_steps, eta, split or three_to_one(num_devices), on_weights == "drain").result()


def three_to_one(num_devices: int) -> tuple[int, int]:
    """AReaL's usual (rollout, training) devices, at least one each."""
    num_train = max(1, round(num_devices / 4))
    return max(1, num_devices - num_train), num_train


class _Run:
    """One run, from event to event: an ending, or the arrival of weights."""

    def __init__(
        self, world: SubStageWorld, num_devices: int, num_steps: int, eta: int, split: tuple[int, int], drains: bool
    ) -> None:
        self._world, self._num_devices, self._eta, self._split, self._drains = world, num_devices, eta, split, drains
        self._engine = VirtualEngine(world, split[0], has_one_queue=True)
        self._trainer = VirtualTrainer(world, split[1])
        self._prompt_tokens = length_distribution(world.lengths_of).prompt_tokens
        self._batch_groups = num_groups_of(world)
        answers = [answer for step in range(1, num_steps + 1) for answer in answers_of(world, step)]
        self._size_by_group: dict[int, int] = {}
        for answer in answers:
            self._size_by_group[answer.group] = self._size_by_group.get(answer.group, 0) + 1
        self._waiting = deque(answers)
        """Answers that admission holds back, in order."""
        self._partial: dict[int, list[Ended]] = {}
        self._complete: dict[int, list[Ended]] = {}
        """Ended answers by group, of groups that have not all of theirs, and of complete ones."""
        self._num_steps = num_steps
        self._now_s = 0.0
        self._version = 0
        self._trainer_free_s = 0.0
        self._arrivals: deque[float] = deque()
        """Seconds at which weights under way arrive."""
        self._step_ends_s: list[float] = []
        self._staleness: list[int] = []
        self._num_mixed = 0
        self._trained_tokens = 0

    def result(self) -> RivalResult:
        self._admit(0.0)
        while len(self._step_ends_s) < self._num_steps:
            end_s = self._engine.next_end_s
            is_batch = len(self._complete) >= self._batch_groups
            starts_at_s = max(self._now_s, self._trainer_free_s) if is_batch else math.inf
            arrival_s = self._arrivals[0] if self._arrivals else math.inf
            self._now_s = min(starts_at_s, arrival_s, end_s)
            if self._now_s == starts_at_s:
                self._train(starts_at_s)
            elif self._now_s == arrival_s:
                self._load(self._arrivals.popleft())
            else:
                self._end(self._engine.finish())
        seconds = self._step_ends_s[-1]
        busy_s = self._engine.busy_s + self._trainer.busy_s * self._split[1]
        return RivalResult(
            system="laminar" if self._drains else "areal",
            num_rollout_devices=self._split[0],
            num_train_devices=self._split[1],
            step_ends_s=tuple(self._step_ends_s),
            trained_tokens=self._trained_tokens,
            decoded_tokens=self._engine.decoded_tokens,
            staleness_mean=sum(self._staleness) / len(self._staleness),
            staleness_max=max(self._staleness),
            num_mixed=self._num_mixed,
            bubble_share=bubble_share(busy_s, self._num_devices, seconds),
        )

    def _admit(self, now_s: float) -> None:
        """Submit whole groups while the count allows."""
        admitted = []
        while self._waiting and self._waiting[0].group // self._batch_groups <= self._version + self._eta:
            admitted.append(self._waiting.popleft())
        self._engine.submit(admitted, now_s)

    def _end(self, ended: list[Ended]) -> None:
        for finished in ended:
            group = finished.answer.group
            members = self._partial.setdefault(group, [])
            members.append(finished)
            if len(members) == self._size_by_group[group]:
                self._complete[group] = self._partial.pop(group)

    def _train(self, now_s: float) -> None:
        """Train on the oldest groups; their weights arrive after training and publishing."""
        step = len(self._step_ends_s) + 1
        batch = [self._complete.pop(group) for group in sorted(self._complete)[: self._batch_groups]]
        answers = [finished for members in batch for finished in members]
        self._staleness += [step - 1 - finished.first_version for finished in answers]
        self._num_mixed += sum(finished.first_version != finished.last_version for finished in answers)
        tokens = int(sum(finished.answer.length for finished in answers) + self._prompt_tokens * len(answers))
        self._trained_tokens += tokens
        self._trainer_free_s = now_s + self._trainer.train_s(tokens)
        self._arrivals.append(self._trainer_free_s + self._trainer.publish_s)
        self._step_ends_s.append(self._arrivals[-1])

    def _load(self, now_s: float) -> None:
        self._version += 1
        for device in self._engine.devices:
            device.load(self._version, now_s, drains=self._drains)
        self._admit(now_s)

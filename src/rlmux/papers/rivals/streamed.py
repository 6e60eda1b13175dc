"""Rivals that stream prompt groups from a rollout pool to a training pool: StreamRL and AsyncFlow.

    rollout pool ── complete groups ──▶ training pool ── weights ──▶ rollout pool
       step i by version i-1 (sync), or by version i-2 while step i-1 trains (one step off)

    streamrl    split   argmin over x + y = n of max(T_gen(x), T_train(y)), from another seed's profile     (section 5)
                order   the longest 20 % by a ranker of recall 0.87 to devices of their own, longest first  (section 6)
                        their number: least max over both sides of  PTL(BS) * L * ceil(M / BS), with one pool of mean
                        lengths as the number 0
    asyncflow   delayed parameter update: new weights wait in host memory, and only the copy to the device is exposed;
                fraction f: prompts below ceil(f * P) of a step are sampled one version earlier

A rollout begins when the previous one has ended everywhere, so no trajectory is more than one version old.

Left out: StreamRL's two sites, devices that it gives back (x + y < n) and its growth of the pools during a run;
AsyncFlow's storage units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rlmux.papers.rivals.trainer import RivalResult, VirtualTrainer, bubble_share
from rlmux.papers.rivals.virtual_device import Answer, Ended, VirtualEngine, answers_of, by_index, num_groups_of
from rlmux.sim.models.costs import RolloutCosts, rollout_costs
from rlmux.sim.models.lengths import length_distribution
from rlmux.sim.models.substages import SubStageWorld
from rlmux.sim.split_search import split_of

RECALL = 0.87
"""Part of the longest answers that StreamRL's ranker finds."""
_LONG_PART = 0.2
_BISECTIONS = 24
_PROFILE_SEED = 7919
_HOST_COPY_BYTES_PER_S = 50e9
"""Host to device, by each GPU."""

Deal = Callable[[int, Sequence[Answer], int], list[list[Answer]]]
"""(step, answers, number of devices) to the answers of each device, in order."""


def streamrl(
    world: SubStageWorld,
    *,
    num_devices: int,
    num_steps: int,
    is_async: bool = True,
    split: tuple[int, int] | None = None,
    recall: float = RECALL,
    dispatches: bool = True,
) -> RivalResult:
    """`split`: by default the searched one. `dispatches`: by rank; otherwise whole groups are dealt in turn."""
    deal = _by_rank(world, recall) if dispatches else _in_turn
    return _play(
        world, "streamrl", num_devices, num_steps, split or searched_split(world, num_devices), float(is_async), deal
    )


def asyncflow(
    world: SubStageWorld,
    *,
    num_devices: int,
    num_steps: int,
    fraction: float = 1.0,
    split: tuple[int, int] | None = None,
) -> RivalResult:
    """`fraction`: the part of each step that is sampled one version earlier; 0 is synchronous, 1 one step off."""
    copy_s = 2.0 * rollout_costs(world.model, world.gpu, world.tp).shape.params / world.tp / _HOST_COPY_BYTES_PER_S
    split = split or searched_split(world, num_devices)
    return _play(world, "asyncflow", num_devices, num_steps, split, fraction, _in_turn, copy_s)


def searched_split(world: SubStageWorld, num_devices: int) -> tuple[int, int]:
    """(rollout, training) devices with the shortest longer phase, by a profiled step of another seed."""
    profile = SubStageWorld(
        model=world.model, lengths_of=world.lengths_of, num_sequences=world.num_sequences,
        num_rollout_devices=world.num_rollout_devices, num_train_devices=world.num_train_devices,
        seed=world.seed + _PROFILE_SEED, gpu=world.gpu, tp=world.tp, slots=world.slots, fixed_part=world.fixed_part,
    )  # fmt: skip

    def rollout_s(count: int) -> float:
        engine = VirtualEngine(profile, count, has_one_queue=False)
        engine.deal(by_index(answers_of(profile, 1), count), 0.0)
        return max(finished.end_s for finished in engine.run())

    def train_s(count: int) -> float:
        return VirtualTrainer(profile, count).train_s(profile.tokens(1))

    splits = [split_of(rollout_s, train_s, count, num_devices - count, True) for count in range(1, num_devices)]
    best = min(splits, key=lambda split: (split.step_s, split.num_rollout_nodes))
    return best.num_rollout_nodes, best.num_train_nodes


# ------------------------------------------------------------------ dispatch


def _in_turn(step: int, answers: Sequence[Answer], num_devices: int) -> list[list[Answer]]:
    return by_index(answers, num_devices)


def _by_rank(world: SubStageWorld, recall: float) -> Deal:
    costs, prompt_tokens = (
        rollout_costs(world.model, world.gpu, world.tp),
        length_distribution(world.lengths_of).prompt_tokens,
    )

    def deal(step: int, answers: Sequence[Answer], num_devices: int) -> list[list[Answer]]:
        recent = world.lengths(step - 1)
        return dispatch(
            ranked(answers, recall, np.random.default_rng([world.seed, step, 3])), num_devices,
            recent=recent, costs=costs, slots=world.slots, prompt_tokens=prompt_tokens,
        )  # fmt: skip

    return deal


def ranked(answers: Sequence[Answer], recall: float, generator: np.random.Generator) -> list[Answer]:
    """Longest first by a ranker that finds this part of the longest 20 %: places in the true order plus noise, with the
    most noise that keeps the recall."""
    order = sorted(answers, key=lambda answer: (-answer.length, answer.number))
    num_long = round(_LONG_PART * len(order))
    noise, places = generator.standard_normal(len(order)), np.arange(len(order))
    low, high = 0.0, float(len(order))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        by_rank = np.argsort(places + middle * noise, kind="stable")
        found = int((by_rank[:num_long] < num_long).sum())
        low, high = (middle, high) if found >= recall * num_long else (low, middle)
    return [order[place] for place in np.argsort(places + low * noise, kind="stable")]


def dispatch(
    order: Sequence[Answer],
    num_devices: int,
    *,
    recent: Sequence[int],
    costs: RolloutCosts,
    slots: int,
    prompt_tokens: float,
) -> list[list[Answer]]:
    """StreamRL's skewness-aware dispatch of answers in rank order. `recent`: lengths of the previous step."""
    num_long = round(_LONG_PART * len(order))
    long_tokens, short_tokens = (float(np.quantile(recent, at)) for at in (0.9, 0.5))

    def latency_s(num_answers: int, tokens: float, count: int) -> float:
        each = num_answers / count
        batch = min(each, slots)
        return costs.decode_step_s(batch, prompt_tokens + tokens / 2) * tokens * math.ceil(each / slots)

    def longer_side_s(count: int) -> float:
        num_short = len(order) - num_long
        if not count:
            tokens = (num_long * long_tokens + num_short * short_tokens) / len(order)
            return latency_s(len(order), tokens, num_devices)
        return max(latency_s(num_long, long_tokens, count), latency_s(num_short, short_tokens, num_devices - count))

    num_for_long = min(range(num_devices), key=longer_side_s)
    if not num_for_long:
        return [list(order[index::num_devices]) for index in range(num_devices)]
    sides = ((order[:num_long], num_for_long), (order[num_long:], num_devices - num_for_long))
    return [list(side[index::count]) for side, count in sides for index in range(count)]


# ------------------------------------------------------------------ steps


def _play(
    world: SubStageWorld,
    system: str,
    num_devices: int,
    num_steps: int,
    split: tuple[int, int],
    fraction: float,
    deal: Deal,
    copy_s: float = 0.0,
) -> RivalResult:
    """`copy_s`: exposed seconds of new weights on a rollout device."""
    num_rollout, num_train = split
    engine, trainer = VirtualEngine(world, num_rollout, has_one_queue=False), VirtualTrainer(world, num_train)
    prompt_tokens = length_distribution(world.lengths_of).prompt_tokens
    num_early = math.ceil(fraction * num_groups_of(world) - 1e-9)
    arrivals, train_end_s, rollout_end_s, num_stale = [0.0, 0.0], 0.0, 0.0, 0
    for step in range(1, num_steps + 1):
        answers = answers_of(world, step)
        early = [answer for answer in answers if answer.group - answers[0].group < num_early]
        late = answers[len(early) :]
        newer_s = arrivals[-1] + (copy_s if step > 1 else 0.0)
        older_s = arrivals[-2] + (copy_s if step > 2 else 0.0)
        ended, begin_s = [], rollout_end_s
        if early:
            begin_s = max(begin_s, older_s)
            # Weights that have arrived by then are the newest: nothing is sampled by older ones than it must be.
            num_stale += len(early) if newer_s > begin_s else 0
            engine.deal(deal(step, early, num_rollout), begin_s)
            ended += engine.run()
        if late:
            free_s = _free_s(engine, begin_s)
            for device, own, start_s in zip(engine.devices, deal(step, late, num_rollout), free_s, strict=True):
                device.waiting.extend(own)
                device.take_from_queue(max(start_s, newer_s))
            ended += engine.run()
        rollout_end_s = max(finished.end_s for finished in ended)
        train_end_s = trainer.stream(train_end_s, _complete(ended, prompt_tokens))
        arrivals.append(train_end_s + trainer.publish_s)
    seconds = arrivals[-1]
    return RivalResult(
        system=system,
        num_rollout_devices=num_rollout,
        num_train_devices=num_train,
        step_ends_s=tuple(arrivals[2:]),
        trained_tokens=sum(world.tokens(step) for step in range(1, num_steps + 1)),
        decoded_tokens=engine.decoded_tokens,
        staleness_mean=num_stale / (num_steps * world.num_sequences),
        staleness_max=int(num_stale > 0),
        bubble_share=bubble_share(engine.busy_s + trainer.busy_s * num_train, num_devices, seconds),
    )


def _free_s(engine: VirtualEngine, begin_s: float) -> list[float]:
    """Time at which each device finishes its work, in seconds."""
    return [max(begin_s, device.now_s) for device in engine.devices]


def _complete(ended: Sequence[Ended], prompt_tokens: float) -> list[tuple[float, float]]:
    """(seconds at which it is complete, tokens) of each prompt group, in that order; ties by group."""
    end_by_group: dict[int, float] = {}
    tokens_by_group: dict[int, float] = {}
    for finished in ended:
        group = finished.answer.group
        end_by_group[group] = max(end_by_group.get(group, 0.0), finished.end_s)
        tokens_by_group[group] = tokens_by_group.get(group, 0.0) + finished.answer.length + prompt_tokens
    return [
        (end_by_group[group], tokens_by_group[group])
        for group in sorted(end_by_group, key=lambda g: (end_by_group[g], g))
    ]

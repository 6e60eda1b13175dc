"""What the clock of interruptible rollouts decides depends on lengths alone, and keeps the staleness bound."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.rl.prompts.epoch_clock import ClockState, EpochClock, EpochSizes
from rlmux.rl.types import TrajectoryId


def sizes_of(**changes: int) -> EpochSizes:
    sizes = EpochSizes(num_steps=5, groups_per_step=2, group_size=2, staleness=1, num_slots=3, overlap_ticks=0)
    return replace(sizes, **changes)


def all_ids(sizes: EpochSizes) -> list[TrajectoryId]:
    return list(sizes.ids_until(sizes.num_steps * sizes.groups_per_step))


@dataclass
class Played:
    """Batches of all steps, and the version of each token of each trajectory."""

    batches: list[list[TrajectoryId]]
    versions: dict[TrajectoryId, list[int]]


def oracle(lengths: dict[TrajectoryId, int], sizes: EpochSizes) -> Played:
    """The same, one tick after another, from complete lengths: a trainer that takes `overlap_ticks` for an update."""
    ids = sorted(lengths)
    versions: dict[TrajectoryId, list[int]] = {id: [] for id in ids}
    waiting, seated, ended, trained = list(ids), [], [], set()
    batches, version, arrives_in = [], 0, None
    while len(batches) < sizes.num_steps:
        if arrives_in == 0:
            version, arrives_in = version + 1, None
        step = len(batches) + 1
        if arrives_in is None:  # the trainer is free
            groups = {id[:2]: [one for one in ids if one[:2] == id[:2]] for id in ended}
            done = [key for key in groups if key not in trained and all(one in ended for one in groups[key])]
            done.sort(key=lambda key: max(ended.index(one) for one in groups[key]))
            begun = {id[:2] for id in ids if versions[id]} - trained
            oldest = {key: min(versions[id][0] for id in ids if id[:2] == key and versions[id]) for key in begun}
            due = {key: version + sizes.staleness + 1 for key, version in oldest.items()}
            for chosen in combinations(done, sizes.groups_per_step):
                left = sorted(due[key] for key in begun if key not in chosen)
                if all(step + 1 + place // sizes.groups_per_step <= by for place, by in enumerate(left)):
                    break
            else:
                chosen = ()
            if chosen:
                trained.update(chosen)
                batches.append(sorted(id for id in ids if id[:2] in chosen))
                arrives_in = sizes.overlap_ticks
                continue
        while waiting and len(seated) < sizes.num_slots:
            group = (waiting[0].step - 1) * sizes.groups_per_step + waiting[0].prompt
            if group // sizes.groups_per_step > version + sizes.staleness:
                break
            seated.append(waiting.pop(0))
        for id in seated:
            versions[id].append(version)
        ended += sorted(id for id in seated if len(versions[id]) == lengths[id])
        seated = [id for id in seated if len(versions[id]) < lengths[id]]
        arrives_in = None if arrives_in is None else arrives_in - 1
    return Played(batches, versions)


class Devices:
    """Rollout devices that sample in their own time, run ahead, and lose what they have when a worker dies."""

    def __init__(self, lengths: dict[TrajectoryId, int], sizes: EpochSizes, draw: random.Random) -> None:
        self.lengths, self.sizes, self.draw = lengths, sizes, draw
        self.num_devices, self.num_slots = draw.randint(1, 3), draw.randint(1, 5)

    def play(self) -> Played:
        clock = EpochClock(self.sizes)
        versions: dict[TrajectoryId, list[int]] = {id: [] for id in self.lengths}
        batches = []
        for step in range(1, self.sizes.num_steps + 1):
            clock.begin_step(step)
            told = [id for group in clock.advance() for id in group]
            while True:
                told += self.leg(clock, versions)
                if clock.is_step_over:
                    break
                clock.begin_last_leg()
                told += [id for group in clock.advance() for id in group]
            batch = clock.end_step()
            assert sorted(told) == batch
            batches.append(batch)
            clock = EpochClock(self.sizes, ClockState.of_fields(json.loads(json.dumps(clock.state().fields()))))
        return Played(batches, versions)

    def leg(self, clock: EpochClock, versions: dict[TrajectoryId, list[int]]) -> list[TrajectoryId]:
        queues = [[id for id in clock.wanted() if id.prompt % self.num_devices == d] for d in range(self.num_devices)]
        begun = {id: len(versions[id]) for queue in queues for id in queue}
        made, told = dict(begun), []
        while not clock.is_leg_over:
            device = self.draw.choice([d for d, queue in enumerate(queues) if queue])
            for _ in range(self.draw.randint(1, 9)):
                for id in queues[device][: self.num_slots]:
                    made[id] += 1
                    if made[id] == self.lengths[id]:
                        queues[device].remove(id)
                        clock.note_end(id, self.lengths[id])
            for id in queues[device]:
                clock.note_progress(id, made[id])
            told += [id for group in clock.advance() for id in group]
            if self.draw.random() < 0.05:
                made.update({id: begun[id] for id in queues[device]})
        for id in begun:  # what is beyond the end of the leg is thrown away
            end = clock.standing().get(id, self.lengths[id] if id in clock.ended() else 0)
            versions[id] += [clock.version] * (end - len(versions[id]))
        clock.end_leg()
        return told


@settings(max_examples=examples(150), deadline=None)
@given(st.randoms(use_true_random=False))
def test_batches_and_the_version_of_every_token_are_the_oracles_on_any_devices(draw):
    staleness = draw.randint(0, 3)
    sizes = EpochSizes(
        num_steps=draw.randint(1, 6),
        groups_per_step=draw.randint(1, 3),
        group_size=draw.randint(1, 3),
        staleness=staleness,
        num_slots=draw.randint(1, 12),
        overlap_ticks=draw.randint(0, 12) if staleness else 0,
    )
    lengths = {id: 1 + int(min(40.0, draw.expovariate(0.12))) for id in all_ids(sizes)}
    expected = oracle(lengths, sizes)
    for _ in range(2):
        played = Devices(lengths, sizes, draw).play()
        assert played.batches == expected.batches
        for batch in played.batches:
            for id in batch:
                assert played.versions[id] == expected.versions[id]
    trained = [id for batch in expected.batches for id in batch]
    assert sorted(trained) == all_ids(sizes), "each once"
    for step, batch in enumerate(expected.batches, start=1):
        assert all(0 <= step - 1 - min(expected.versions[id]) <= staleness for id in batch)


def test_without_staleness_it_is_the_synchronous_pipeline():
    sizes = sizes_of(staleness=0, num_slots=2)
    lengths = {id: 1 + 7 * id.prompt + id.sample for id in all_ids(sizes)}
    played = oracle(lengths, sizes)
    assert played.batches == [[id for id in all_ids(sizes) if id.step == step] for step in range(1, 6)]
    assert all(set(versions) == {id.step - 1} for id, versions in played.versions.items())


@pytest.mark.parametrize(("version", "groups"), [(0, 6), (1, 8), (3, 10)])
def test_admission_is_areals_formula_and_ends_with_the_run(version, groups):
    """floor((N - 1) / B) <= version + staleness, for the N-th group and batches of B."""
    sizes = sizes_of(staleness=2)
    admitted = sizes.num_admitted(version)
    assert admitted == groups
    assert (admitted - 1) // 2 <= version + 2
    assert (admitted + 1 - 1) // 2 > version + 2 or admitted == 10


def test_a_long_one_is_overtaken_and_waited_for_before_it_is_too_old():
    sizes = sizes_of(group_size=1, staleness=1, num_slots=9, num_steps=4)
    lengths = dict.fromkeys(all_ids(sizes), 2)
    lengths[TrajectoryId(1, 0, 0)] = 30
    batches = oracle(lengths, sizes).batches
    assert TrajectoryId(1, 0, 0) not in batches[0]
    assert TrajectoryId(1, 0, 0) in batches[1]


def test_a_leg_ends_once_all_that_are_seated_are_past_its_last_tick():
    clock = EpochClock(
        sizes_of(group_size=1, overlap_ticks=4, num_slots=2),
        ClockState(
            num_begun=4,
            tokens_by_seated={TrajectoryId(2, 0, 0): 5, TrajectoryId(2, 1, 0): 0},
            oldest_versions={(2, 0): 0, (2, 1): 0},
        ),
    )
    clock.begin_step(2)
    ahead, behind = TrajectoryId(2, 0, 0), TrajectoryId(2, 1, 0)
    clock.note_progress(ahead, 50)
    clock.note_progress(behind, 3)
    assert (clock.advance(), clock.is_leg_over, clock.ticks_left()) == ([], False, 1)
    clock.note_progress(behind, 4)
    assert (clock.advance(), clock.is_leg_over) == ([], True)
    assert clock.standing() == {ahead: 9, behind: 4}
    assert clock.has_enough({ahead: 9})
    assert not clock.has_enough({ahead: 8, behind: 4})

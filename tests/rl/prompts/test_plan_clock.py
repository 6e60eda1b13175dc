"""What the plan clock decides is a function of the lengths alone, and it decides as soon as that can be known."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.rl.prompts.plan_clock import PlanClock
from rlmux.rl.types import TrajectoryId


def oracle(lengths: dict[TrajectoryId, int], num_groups: int, group_size: int, num_slots: int):
    """The race, one tick after another, from complete lengths: the groups in the order in which they are done."""
    waiting, seated, ended, done = sorted(lengths), {}, Counter(), []
    kept: dict[int, list[TrajectoryId]] = {}
    while len(done) < num_groups:
        while waiting and len(seated) < num_slots:
            seated[waiting.pop(0)] = 0
        for id in seated:
            seated[id] += 1
        for id in sorted(id for id, made in seated.items() if made == lengths[id]):
            if id not in seated or len(done) == num_groups:
                continue
            del seated[id]
            ended[id.prompt] += 1
            kept.setdefault(id.prompt, []).append(id)
            if ended[id.prompt] == group_size:
                done.append(id.prompt)
                waiting = [one for one in waiting if one.prompt != id.prompt]
                seated = {one: made for one, made in seated.items() if one.prompt != id.prompt}
    return [sorted(kept[prompt]) for prompt in done]


class Devices:
    """Rollout devices that sample in their own time; what is lost is cut after a while."""

    def __init__(self, lengths: dict[TrajectoryId, int], num_devices: int, num_slots: int, draw: random.Random) -> None:
        self.lengths, self.draw, self.num_slots = lengths, draw, num_slots
        self.queues = [[id for id in lengths if id.prompt % num_devices == device] for device in range(num_devices)]
        self.made = dict.fromkeys(lengths, 0)

    def race(self, clock: PlanClock) -> list[list[TrajectoryId]]:
        done = []
        while any(self.queues):
            device = self.draw.choice([device for device, queue in enumerate(self.queues) if queue])
            self.decode(device, self.draw.randint(1, 12), clock)
            done += clock.advance()
            if self.draw.random() < 0.7:
                self.queues = [[id for id in queue if not clock.is_lost(id)] for queue in self.queues]
            if self.draw.random() < 0.1:
                self.migrate()
            if self.draw.random() < 0.05:  # a worker is lost: what it had not finished begins anew
                self.made.update(dict.fromkeys(self.queues[device], 0))
        return done

    def decode(self, device: int, steps: int, clock: PlanClock) -> None:
        news = []
        for _ in range(steps):
            for id in self.queues[device][: self.num_slots]:
                self.made[id] += 1
                if self.made[id] == self.lengths[id]:
                    self.queues[device].remove(id)
                    news.append(id)
        self.draw.shuffle(news)
        for id in self.queues[device]:
            clock.note_progress(id, self.made[id])
        for id in news:
            clock.note_end(id, self.lengths[id])

    def migrate(self) -> None:
        source, target = self.draw.randrange(len(self.queues)), self.draw.randrange(len(self.queues))
        if source != target:
            self.queues[target] += self.queues[source]
            self.queues[source] = []


@settings(max_examples=examples(150), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 12))
def test_the_same_is_kept_on_any_devices_in_any_order_of_news(draw, num_devices, num_slots):
    num_groups, group_size = draw.randint(1, 4), draw.randint(1, 3)
    launched, each = num_groups + draw.randint(0, 2), group_size + draw.randint(0, 2)
    ids = [TrajectoryId(1, prompt, sample) for prompt in range(launched) for sample in range(each)]
    lengths = {id: 1 + int(min(29.0, draw.expovariate(0.15))) for id in ids}
    expected = oracle(lengths, num_groups, group_size, num_slots)
    for _ in range(3):
        clock = PlanClock(ids, num_groups=num_groups, group_size=group_size, num_slots=num_slots)
        done = Devices(lengths, num_devices, draw.randint(1, 8), draw).race(clock)
        assert done == expected
        assert clock.is_decided
        kept = [id for group in expected for id in group]
        assert [id for id in ids if not clock.is_lost(id)] == sorted(kept)


def clock_of(num_prompts: int, samples: int, **sizes: int) -> PlanClock:
    ids = [TrajectoryId(1, prompt, sample) for prompt in range(num_prompts) for sample in range(samples)]
    return PlanClock(ids, **sizes)


def test_a_group_is_decided_once_all_others_are_past_its_tick():
    clock = clock_of(2, 1, num_groups=1, group_size=1, num_slots=2)
    slow, quick = TrajectoryId(1, 0, 0), TrajectoryId(1, 1, 0)
    clock.note_end(quick, 10)
    assert clock.advance() == []
    clock.note_progress(slow, 9)
    assert clock.advance() == []
    assert not clock.is_lost(slow)
    clock.note_progress(slow, 10)  # it ends at 11 at the earliest
    assert clock.advance() == [[quick]]
    assert clock.is_lost(slow)


def test_one_that_is_far_ahead_stops_before_the_others_have_caught_up():
    clock = clock_of(3, 1, num_groups=1, group_size=1, num_slots=3)
    ahead, ended, behind = (TrajectoryId(1, prompt, 0) for prompt in range(3))
    clock.note_progress(ahead, 50)
    clock.note_end(ended, 20)
    assert clock.advance() == []
    assert clock.is_lost(ahead)
    assert not clock.is_lost(behind)


def test_ties_go_to_the_lower_id():
    clock = clock_of(2, 2, num_groups=1, group_size=1, num_slots=4)
    for prompt in (1, 0):
        for sample in (1, 0):
            clock.note_end(TrajectoryId(1, prompt, sample), 5)
    assert clock.advance() == [[TrajectoryId(1, 0, 0)]]


@pytest.mark.parametrize(("num_slots", "first"), [(2, 1), (1, 0)])
def test_what_waits_for_a_slot_begins_later(num_slots, first):
    """With one slot the long one is over before the short one begins."""
    clock = clock_of(2, 1, num_groups=1, group_size=1, num_slots=num_slots)
    clock.note_end(TrajectoryId(1, 0, 0), 9)
    clock.note_end(TrajectoryId(1, 1, 0), 3)
    assert clock.advance() == [[TrajectoryId(1, first, 0)]]

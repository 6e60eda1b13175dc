"""A trial of the placement ledger answers like a copy of it, and nothing is left of it afterwards."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import IllegalTransitionError
from rlmux.core.model import Cluster, GroupId, NodeId, Phase, PhaseSeconds, Pipeline, PipelineId, Pool
from rlmux.core.placement.choice import PlacementChoice
from rlmux.core.placement.placement_ledger import PlacementLedger
from rlmux.core.placement.rollback import Undo
from rlmux.core.placement.view import PlacementView
from rlmux.policies import make_policy


def cluster(*, has_machines: bool = False) -> Cluster:
    """`has_machines`: whether the nodes are those of two machines."""
    rollout, train = ("aabbab", "abab") if has_machines else ("", "")
    pools = (
        Pool(name="r", phase=Phase.ROLLOUT, num_nodes=6, usd_per_gpu_hour=1.0, machines=tuple(rollout)),
        Pool(name="t", phase=Phase.TRAIN, num_nodes=4, usd_per_gpu_hour=3.0, machines=tuple(train)),
    )
    return Cluster(pools={pool.name: pool for pool in pools})


def pipeline(name: str, draw: random.Random) -> Pipeline:
    return Pipeline(
        id=PipelineId(name),
        num_steps=3,
        num_rollout_nodes=draw.choice((1, 1, 2)),
        num_train_nodes=draw.choice((1, 1, 2)),
        estimate=PhaseSeconds(rollout_s=draw.uniform(1.0, 4.0), train_s=draw.uniform(0.5, 2.0)),
        slo_slowdown=draw.choice((1.2, 2.0, 4.0)),
    )


class Changes:
    """Draws changes and makes them, one and the same on every ledger."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.num_drawn = 0

    def make(self, count: int, *ledgers: PlacementLedger) -> None:
        for _ in range(count):
            self._one(ledgers)

    def _one(self, ledgers: tuple[PlacementLedger, ...]) -> None:
        first = ledgers[0]
        placed = sorted(member.pipeline.id for group in first.groups() for member in group.members)
        kind = self.draw.choice(("admit", "admit", "depart", "relocate", "finish"))
        if kind == "admit" or not placed:
            self.num_drawn += 1
            newcomer = pipeline(f"p{self.num_drawn}", self.draw)
            choice = make_policy("rollmux").place(newcomer, PlacementView(first))
            if isinstance(choice, PlacementChoice):
                choice = replace(choice, train_nodes=choice.train_nodes[-newcomer.num_train_nodes :])
                for ledger in ledgers:
                    ledger.admit(newcomer, choice)
            return
        name = self.draw.choice(placed)
        if kind == "depart":
            results = [ledger.depart(name) for ledger in ledgers]
        elif kind == "finish":
            results = [ledger.finish_relocation(name) for ledger in ledgers]
        else:
            choice = make_policy("rlmux").place(first.pipeline(name), PlacementView(first))
            results = [_relocated(ledger, name, choice) for ledger in ledgers]
        assert all(result == results[0] for result in results)


def _relocated(ledger: PlacementLedger, name: PipelineId, choice: object) -> object:
    if not isinstance(choice, PlacementChoice):
        return None
    try:
        return ledger.relocate(name, choice)
    except IllegalTransitionError as error:
        return str(error)


def contents(ledger: PlacementLedger) -> object:
    """All that is ever read of a ledger, and the nodes that it hands out next."""
    asked = pipeline("asked", random.Random(0))
    later = deepcopy(ledger)
    nodes = [later._nodes.take(phase, int(ledger.num_free_nodes(phase))) for phase in (Phase.ROLLOUT, Phase.TRAIN)]
    return (
        list(ledger.groups()),
        ledger.youngest_group(),
        ledger.uneven_groups(),
        ledger.groups_with_room(asked),
        ledger.usd_per_hour,
        ledger.peak_nodes_by_pool,
        sorted(ledger._vacating.items()),
        nodes,
        later._next_group,
    )


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), before=st.integers(0, 12), counts=st.lists(st.integers(0, 6), max_size=4))
@pytest.mark.parametrize("has_machines", [False, True])
def test_a_trial_answers_like_a_copy_and_leaves_nothing_behind(seed, before, counts, has_machines):
    """Trials in trials: each is compared with a copy inside, and with what was there before it once it is over."""
    ledger, changes = PlacementLedger(cluster(has_machines=has_machines)), Changes(seed)
    changes.make(before, ledger)
    start = contents(ledger)
    twin = deepcopy(ledger)

    def tried(left: list[int], ledger: PlacementLedger, twin: PlacementLedger) -> PlacementLedger:
        """Returns a copy that is like the ledger then."""
        if not left:
            return twin
        is_kept = changes.draw.random() < 0.4
        around, spare = contents(ledger), deepcopy(twin)
        with ledger.trial() as trial:
            changes.make(left[0], ledger, twin)
            ledger.check()
            assert contents(ledger) == contents(twin)
            twin = tried(left[1:], ledger, twin)
            trial.is_kept = is_kept
        ledger.check()
        assert contents(ledger) == (contents(twin) if is_kept else around)
        if not is_kept:
            twin = spare
        changes.make(1, ledger, twin)
        assert contents(ledger) == contents(twin)
        return twin

    with ledger.trial():
        tried(counts, ledger, twin)
    ledger.check()
    assert contents(ledger) == start


def test_an_exception_takes_a_trial_back():
    ledger, changes = PlacementLedger(cluster()), Changes(1)
    changes.make(5, ledger)
    before = contents(ledger)

    def fail_in_a_trial() -> None:
        with ledger.trial():
            changes.make(5, ledger)
            ledger.depart(PipelineId("unknown"))

    with pytest.raises(IllegalTransitionError, match="is not placed"):
        fail_in_a_trial()
    assert contents(ledger) == before


def test_outside_a_trial_nothing_is_noted():
    undo, mapping = Undo(), {"a": 1}
    undo.put(mapping, "b", 2)
    undo.remove(mapping, "a")
    mark = undo.begin()
    undo.put(mapping, "b", 3)
    undo.take_back(mark)
    assert mapping == {"b": 2}


def test_what_left_in_a_trial_is_remembered_no_longer_than_its_group_is_as_it_was():
    """The group changes between two trials: the second one must not get what the first one found."""
    ledger = PlacementLedger(cluster())
    seconds = PhaseSeconds(rollout_s=1.0, train_s=1.0)
    a, b, c = (Pipeline(id=PipelineId(name), num_steps=1, estimate=seconds) for name in "abc")
    founding = PlacementChoice(kind="new", group=None, num_new_rollout_nodes=1, num_new_train_nodes=1)
    ledger.admit(a, founding)
    joining = PlacementChoice(
        kind="direct", group=GroupId(0), rollout_nodes=(NodeId("r", 0),), train_nodes=(NodeId("t", 0),)
    )
    ledger.admit(b, joining)
    for members in (["a"], ["a", "c"]):
        with ledger.trial():
            ledger.depart(b.id)
            assert [member.pipeline.id for member in ledger.group(GroupId(0)).members] == members
            ledger.check()
        if "c" not in ledger:
            ledger.admit(c, joining)

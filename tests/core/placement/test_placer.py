"""What relocations are expected to save in dollars, and what they saved. A node costs 1 dollar a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rlmux.core.actions import Release, Relocate
from rlmux.core.events import HoldReleased, ParkRequested, PipelineCancelled
from rlmux.core.model import AdmissionKind, Cluster, Pipeline, PipelineId
from rlmux.core.placement.choice import PlacementChoice, Relocation
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.core.views import GroupView, RunWork
from rlmux.log import value_codec
from rlmux.policies.lookahead.dispatching import start_oldest_first

A, B = PipelineId("a"), PipelineId("b")
ON_NEW_NODES = PlacementChoice(kind=AdmissionKind.NEW, group=None, num_new_rollout_nodes=1, num_new_train_nodes=1)
Moves = Callable[[PlacementView], tuple[Relocation, ...]]


class Scripted:
    """Nodes of its own for each pipeline; each time that a pipeline leaves, the next move is chosen."""

    name = "scripted"
    reacts_to_progress = False
    sharing = None

    def __init__(self, *moves: Moves) -> None:
        self.moves = list(moves)
        self.num_pipelines = 0

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice:
        return ON_NEW_NODES

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        has_left, self.num_pipelines = view.num_pipelines < self.num_pipelines, view.num_pipelines
        return self.moves.pop(0)(view) if has_left and self.moves else ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return start_oldest_first(view)


def to_new_nodes(name: PipelineId) -> Moves:
    return lambda view: (Relocation(pipeline=name, choice=ON_NEW_NODES),)


def beside(view: PlacementView, name: PipelineId) -> PlacementChoice:
    placement = view.placement(name)
    return PlacementChoice(
        kind=AdmissionKind.DIRECT,
        group=placement.group,
        rollout_nodes=placement.rollout_nodes,
        train_nodes=placement.train_nodes,
    )


def b_to_a(view: PlacementView) -> tuple[Relocation, ...]:
    return (Relocation(pipeline=B, choice=beside(view, A)),)


def both_to_new_nodes(view: PlacementView) -> tuple[Relocation, ...]:
    with view.trial() as ledger:
        ledger.relocate(A, ON_NEW_NODES)
        beside_a = beside(PlacementView(ledger), A)
    return (Relocation(pipeline=A, choice=ON_NEW_NODES), Relocation(pipeline=B, choice=beside_a))


def priced(cluster: Cluster, usd_per_second: float = 1.0) -> Cluster:
    usd = usd_per_second * 3600.0
    return Cluster(pools={name: replace(pool, usd_per_gpu_hour=usd) for name, pool in cluster.pools.items()})


@pytest.fixture
def start(builders):
    """Start `a` and `b`, of 10 steps of 3 s each, and as many others as there are moves."""

    def start(*moves: Moves, usd_per_second: float = 1.0, **fields):
        on = priced(builders.cluster(rollout=8, train=8), usd_per_second)
        driver = builders.Driver(Scheduler(on, Scripted(*moves)))
        names = ["a", "b", *(f"leaves-{number}" for number in range(len(moves)))]
        driver.submit(*(builders.pipeline(name, num_steps=10, **fields) for name in names))
        return driver

    return start


def leave(driver, number: int, *, at_s: float) -> None:
    """End one of the others, which has the policy choose its next move."""
    while driver.next_end_s() <= at_s:
        driver.step()
    driver.send(PipelineCancelled(time_s=at_s, pipeline=PipelineId(f"leaves-{number}")))
    assert driver.step(), "its last order ends"


def of(driver, kind: type, name: PipelineId) -> list:
    return [(time_s, one) for time_s, one in driver.log if isinstance(one, kind) and one.pipeline == name]


def test_a_move_that_frees_nodes_says_what_it_saves_an_hour_and_until_the_first_pipeline_ends(start):
    driver = start(b_to_a)
    leave(driver, 0, at_s=7.0)
    driver.run()
    ((_, move),) = of(driver, Relocate, B)
    assert move.saves_usd_per_hour == pytest.approx(2 * 3600.0)
    assert move.expected_saving_usd == pytest.approx(2 * 8 * 3.0), "2 dollars a second, 8 steps left"
    assert move.saved_usd is None


def test_the_saved_dollars_are_the_hours_that_the_move_lasted(start):
    driver = start(b_to_a)
    leave(driver, 0, at_s=7.0)
    driver.run()
    ((moved_s, _),), ((end_s, release),) = of(driver, Relocate, B), of(driver, Release, B)
    assert moved_s == 9.0
    assert release.saved_usd == pytest.approx(2 * (end_s - moved_s))
    assert of(driver, Release, A)[0][1].saved_usd is None


def test_nodes_held_twice_until_the_step_boundary_are_taken_off(start):
    driver = start(to_new_nodes(B))
    leave(driver, 0, at_s=7.0)
    driver.run()
    ((moved_s, move),), ((_, release),) = of(driver, Relocate, B), of(driver, Release, B)
    assert (moved_s, move.saves_usd_per_hour) == (9.0, 0.0)
    assert release.saved_usd == pytest.approx(-2 * (9.0 - 7.0)), "two nodes, from the decision on"


def test_the_moves_of_one_choice_share_equally_what_it_saves_and_what_it_holds_twice(start):
    driver = start(both_to_new_nodes)
    leave(driver, 0, at_s=7.0)
    driver.run()
    for name in (A, B):
        ((moved_s, move),), ((end_s, release),) = of(driver, Relocate, name), of(driver, Release, name)
        assert move.saves_usd_per_hour == pytest.approx(3600.0)
        assert release.saved_usd == pytest.approx((end_s - moved_s) - (moved_s - 7.0))


def test_the_next_move_carries_what_the_one_before_saved(start):
    driver = start(b_to_a, to_new_nodes(B))
    leave(driver, 0, at_s=7.0)
    leave(driver, 1, at_s=16.0)
    driver.run()
    (first_s, _), (second_s, second) = of(driver, Relocate, B)
    assert second.saves_usd_per_hour == pytest.approx(-2 * 3600.0)
    assert second.saved_usd == pytest.approx(2 * (second_s - first_s))


def test_a_move_chosen_again_before_its_step_boundary_is_one_move(start):
    driver = start(to_new_nodes(B), b_to_a, rollout_s=20.0)
    leave(driver, 0, at_s=4.0)
    leave(driver, 1, at_s=6.0)
    driver.run()
    ((moved_s, move),), ((end_s, release),) = of(driver, Relocate, B), of(driver, Release, B)
    assert move.saves_usd_per_hour == pytest.approx(2 * 3600.0)
    assert release.saved_usd == pytest.approx(2 * (end_s - moved_s) - 2 * (6.0 - 4.0))


def test_a_parked_pipeline_saves_nothing_by_its_last_move(start):
    driver = start(b_to_a)
    leave(driver, 0, at_s=7.0)
    while not (moved := of(driver, Relocate, B)):
        driver.step()
    driver.send(ParkRequested(time_s=driver.now_s, pipeline=B))
    while driver.scheduler.query.status(B) != "waiting":
        driver.step()
    left_s = driver.now_s
    driver.run()
    driver.send(HoldReleased(time_s=driver.now_s + 1000.0, pipeline=B))
    driver.run()
    assert of(driver, Release, B)[0][1].saved_usd == pytest.approx(2 * (left_s - moved[0][0]))


def test_without_prices_nothing_is_said_of_dollars(start):
    driver = start(b_to_a, usd_per_second=0.0)
    leave(driver, 0, at_s=7.0)
    driver.run()
    ((_, move),), ((_, release),) = of(driver, Relocate, B), of(driver, Release, B)
    assert (move.saves_usd_per_hour, move.expected_saving_usd, release.saved_usd) == (None, None, None)


def test_replaying_a_log_gives_the_same_dollars(start):
    driver = start(both_to_new_nodes)
    leave(driver, 0, at_s=7.0)
    driver.run()
    again = Scheduler(driver.scheduler.cluster, Scripted(both_to_new_nodes))
    events = [value_codec.decode(value_codec.encode(event)) for event in driver.events]
    replayed = [action for event in events for action in again.handle(event)]
    assert [value_codec.encode(one) for one in replayed] == [value_codec.encode(one) for one in driver.actions()]

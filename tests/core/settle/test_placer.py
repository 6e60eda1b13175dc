"""Relocations that a policy chooses are carried out at step boundaries, each once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlmux.core.actions import Admit, Relocate
from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Policy
from rlmux.core.events import PipelineCancelled, PipelineSubmitted
from rlmux.core.model import AdmissionKind, Pipeline, PipelineId
from rlmux.core.placement.choice import PlacementChoice, Relocation
from rlmux.core.placement.view import PlacementView
from rlmux.core.scheduler import Scheduler
from rlmux.log import value_codec
from rlmux.policies import make_policy
from rlmux.policies.lookahead.dispatching import start_oldest_first
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog

A, B = PipelineId("a"), PipelineId("b")
ON_NEW_NODES = PlacementChoice(kind=AdmissionKind.NEW, group=None, num_new_rollout_nodes=1, num_new_train_nodes=1)
Moves = Callable[[PlacementView], tuple[Relocation, ...]]


class Scripted(Policy):
    """Nodes of its own for each pipeline; each time that a pipeline leaves, the next move is chosen."""

    name = "scripted"

    def __init__(self, *moves: Moves) -> None:
        self.moves = list(moves)
        self.num_pipelines = 0

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice:
        return ON_NEW_NODES

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        has_left, self.num_pipelines = view.num_pipelines < self.num_pipelines, view.num_pipelines
        return self.moves.pop(0)(view) if has_left and self.moves else ()

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return plan.choose(*start_oldest_first(plan))


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


@pytest.fixture
def start(builders):
    """Start `a` and `b`, of 10 steps of 3 s each, and as many others as there are moves."""

    def start(*moves: Moves, **fields):
        driver = builders.Driver(Scheduler(builders.cluster(rollout=8, train=8), Scripted(*moves)))
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


def test_a_move_waits_for_the_step_boundary(start):
    driver = start(b_to_a)
    leave(driver, 0, at_s=7.0)
    driver.run()
    ((moved_s, move),) = of(driver, Relocate, B)
    assert moved_s == 9.0
    assert move.placement.group == driver.actions(Admit)[0].placement.group


def test_the_moves_of_one_choice_are_each_carried_out(start):
    driver = start(both_to_new_nodes)
    leave(driver, 0, at_s=7.0)
    driver.run()
    (((_, a),), ((_, b),)) = (of(driver, Relocate, name) for name in (A, B))
    assert a.placement.group == b.placement.group


def test_a_move_chosen_again_before_its_step_boundary_is_one_move(start):
    driver = start(to_new_nodes(B), b_to_a, rollout_s=20.0)
    leave(driver, 0, at_s=4.0)
    leave(driver, 1, at_s=6.0)
    driver.run()
    ((_, move),) = of(driver, Relocate, B)
    assert move.placement.group == driver.actions(Admit)[0].placement.group


def test_replaying_a_log_gives_the_same_actions(start):
    driver = start(both_to_new_nodes)
    leave(driver, 0, at_s=7.0)
    driver.run()
    again = Scheduler(driver.scheduler.cluster, Scripted(both_to_new_nodes))
    events = [value_codec.decode(value_codec.encode(event)) for event in driver.events]
    replayed = [action for event in events for action in again.handle(event)]
    assert [value_codec.encode(one) for one in replayed] == [value_codec.encode(one) for one in driver.actions()]


def test_a_newcomer_begins_where_the_relocations_of_its_instant_leave_it():
    """It is admitted once, to its final place, and makes no start on nodes that it leaves at once."""
    made = catalog.build("rh", seed=42, num_pipelines=7)
    kinds: list[str] = []

    def observe(event, actions):
        admitted = {action.pipeline: action for action in actions if isinstance(action, Admit)}
        assert not [action for action in actions if isinstance(action, Relocate) and action.pipeline in admitted]
        if isinstance(event, PipelineSubmitted):
            kinds.append(admitted[event.pipeline.id].kind)

    result = simulate(made, make_policy("rlmux"), observer=observe)
    assert result.slo_attainment == 1.0
    assert sum(kind != "new" for kind in kinds) >= 4

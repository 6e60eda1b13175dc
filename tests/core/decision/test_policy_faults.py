"""A decision that fails is a fault of that decision: nothing of it is done, and the plain order of work stands in."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from tests.plans import Filtered

from rlmux.core.actions import Action, Admit, Queue, Relocate, ReportPolicyFault, RunStage
from rlmux.core.decision.plan import ChangeFraction, MigrateWork, PauseOrder, RunWork
from rlmux.core.decision.policy import Idling, Policy
from rlmux.core.decision.policy_faults import MAX_REPORTED
from rlmux.core.errors import PolicyError
from rlmux.core.events import PipelineCancelled
from rlmux.core.model import AdmissionKind, Cluster, DeviceId, OrderId, Phase, PipelineId, PipelineStatus, Pool
from rlmux.core.placement.choice import FruitlessSearch, PlacementChoice, Relocation
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.baselines import Fifo, Solo
from rlmux.policies.gavel import Gavel

METHODS = ("place", "rebalance", "dispatch")
OWN_NODES = PlacementChoice(kind=AdmissionKind.NEW, group=None, num_new_rollout_nodes=1, num_new_train_nodes=1)
GPU = DeviceId("gpu", 0, 0)


class Changed(Policy):
    """A policy of which some decisions of a scheduler are others; what the invariants ask is as it was."""

    def __init__(self, wrapped, **changes: Callable) -> None:
        self._wrapped = wrapped
        self._changes = changes
        self._is_deciding = False

    name = property(lambda self: self._wrapped.name)
    reacts_to_progress = property(lambda self: self._wrapped.reacts_to_progress)
    sharing = property(lambda self: self._wrapped.sharing)
    turn_taking = property(lambda self: self._wrapped.turn_taking)

    @contextmanager
    def deciding(self):
        self._is_deciding = True
        yield
        self._is_deciding = False

    def _call(self, method: str, *given):
        if self._is_deciding and method in self._changes:
            return self._changes[method](*given)
        return getattr(self._wrapped, method)(*given)

    def place(self, pipeline, view):
        return self._call("place", pipeline, view)

    def rebalance(self, view):
        return self._call("rebalance", view)

    def dispatch(self, plan):
        return self._call("dispatch", plan)

    def idling(self, view):
        """What stands in may go ahead of a cycle; that something runs is still asserted."""
        return Idling(patience_s=math.inf)


class Deciding(Scheduler):
    """Has its policy changed while it decides."""

    def handle(self, event):
        with self.policy.deciding():
            return super().handle(event)


def now_and_then(wrapped, chance: random.Random) -> dict[str, Callable]:
    """Each method raises in a quarter of its calls, some of them after the first of their choices."""

    def failing(method: str) -> Callable:
        def call(*given):
            if chance.random() < 0.25:
                raise ZeroDivisionError(f"division in {method}")
            return getattr(wrapped, method)(*given)

        return call

    def dispatch(plan):
        raises_after = [False]

        def keep(choice) -> bool:
            if raises_after[0]:
                raise ZeroDivisionError("division after a choice")
            raises_after[0] = chance.random() < 0.25
            return True

        wrapped.dispatch(Filtered(plan, keep))
        if raises_after[0]:
            raise ZeroDivisionError("division after a choice")
        return plan

    return {"place": failing("place"), "rebalance": failing("rebalance"), "dispatch": dispatch}


def faults(driver) -> Sequence[Action]:
    return driver.actions(ReportPolicyFault)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["fifo", "rollmux", "rlmux", "jigsaw"])
def test_every_pipeline_ends_under_a_policy_that_raises_now_and_then(builders, name, seed):
    chance, wrapped = random.Random(seed), make_policy(name)
    policy = Changed(wrapped, **now_and_then(wrapped, chance))
    scheduler = Deciding(builders.cluster(rollout=4, train=3), policy)
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    for number in range(6):
        rollout_s, train_s = chance.uniform(1.0, 5.0), chance.uniform(1.0, 5.0)
        driver.submit(builders.pipeline(f"p{number}", rollout_s=rollout_s, train_s=train_s, num_rollout_nodes=1))
        driver.step()
    driver.run()
    assert {scheduler.query.status(one) for one in scheduler.query.pipelines()} == {PipelineStatus.FINISHED}
    errors = {(one.method, one.error) for one in faults(driver)}
    assert ("dispatch", "ZeroDivisionError: division after a choice") in errors
    assert len(errors) == len(faults(driver)) <= 3 < scheduler.query.num_policy_faults


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_always_raises_is_reported_once_and_everything_is_trained(builders, method):
    def fail(*given):
        raise KeyError(f"{object()} is gone")

    scheduler = Deciding(builders.cluster(rollout=2, train=2), Changed(Solo(), **{method: fail}))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(*map(builders.pipeline, "abc"))
    driver.run()
    assert {scheduler.query.status(one) for one in scheduler.query.pipelines()} == {PipelineStatus.FINISHED}
    error = 'KeyError: "<object object at 0x> is gone"'.replace('"', "'")
    assert faults(driver) == [ReportPolicyFault(policy="solo", method=method, error=error)]
    assert scheduler.query.first_policy_fault == error
    assert scheduler.query.num_policy_faults > 1


def test_a_pipeline_whose_placement_fails_gets_nodes_of_its_own_or_waits_and_says_why(builders):
    def fail(pipeline, view):
        raise ValueError("no idea")

    scheduler = Deciding(builders.cluster(rollout=1, train=1), Changed(Fifo(), place=fail))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    ((admitted,), (queued,)) = driver.actions(Admit), driver.actions(Queue)
    assert (admitted.pipeline, admitted.kind) == ("a", AdmissionKind.NEW)
    assert queued.pipeline == "b"
    assert queued.reason.startswith(
        "policy fifo failed in place: ValueError: no idea; pipeline b waits for nodes of its own: 1 rollout nodes (0"
    )
    num_faults = scheduler.query.num_policy_faults
    assert scheduler.wait_of(PipelineId("b")) is not None
    assert scheduler.waits(9)
    assert scheduler.query.num_policy_faults == num_faults, "what people ask is no decision"
    driver.run()
    assert scheduler.query.status(PipelineId("b")) is PipelineStatus.FINISHED


def test_one_pool_that_serves_both_phases_has_nodes_of_ones_own_too(builders):
    def fail(pipeline, view):
        raise ValueError("no idea")

    pool = Pool(name="gpu", phase=Phase.TRAIN, num_nodes=2, serves_both_phases=True)
    scheduler = Deciding(Cluster(pools={"gpu": pool}), Changed(Fifo(), place=fail))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(builders.pipeline("a", num_rollout_nodes=2), builders.pipeline("b"))
    driver.run()
    assert [len(one.placement.rollout_nodes) for one in driver.actions(Admit)] == [2, 1]


ANSWERS = {
    "nothing": None,
    "more nodes than are free": replace(OWN_NODES, num_new_train_nodes=9),
    "half a node": replace(OWN_NODES, num_new_train_nodes=1.5),
    "a group that is not there": replace(OWN_NODES, group=7),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_placement_that_cannot_be_done_changes_nothing(builders, answer):
    scheduler = Deciding(builders.cluster(), Changed(Fifo(), place=lambda pipeline, view: answer))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.run()
    assert [(one.pipeline, one.placement.group) for one in driver.actions(Admit)] == [("a", 0), ("b", 1)]
    assert {one.method for one in faults(driver)} == {"place"}


def works(view, pipeline="a"):
    return [work for work in view.ready if work.pipeline == pipeline]


PLANS = {
    "two works on one device": (
        lambda view: [RunWork(work=work) for work in view.ready],
        "policy fifo leases 1.0 of rollout-0.0, held by {}, and 1.0 by the same plan",
    ),
    "a work twice": (
        lambda view: [RunWork(work=work, device_fraction=0.4) for work in [*works(view), *works(view)]],
        ", which is not ready",
    ),
    "work of another moment": (
        lambda view: [RunWork(work=works(view)[0]), RunWork(work=replace(works(view, "b")[0], since_s=9.0))],
        ", which is not ready",
    ),
    "no work": (lambda view: [RunWork(work=works(view)[0]), RunWork(work=None)], "starts None, which is not ready"),
    "no fraction": (
        lambda view: [RunWork(work=works(view)[0], device_fraction=0.0)],
        "leases 0.0 of rollout-0.0",
    ),
    "no number": (
        lambda view: [RunWork(work=works(view)[0], device_fraction="half")],
        "TypeError",
    ),
    "a slowdown of 0": (
        lambda view: [RunWork(work=works(view)[0], slowdown=0.0)],
        "expects a slowdown of 0.0; accepted: a number above 0",
    ),
    "states that do not fit together": (
        lambda view: [RunWork(work=work, device_fraction=0.5) for work in view.ready],
        "at once on rollout-0.0: they do not fit",
    ),
    "an order that does not run": (
        lambda view: [RunWork(work=works(view)[0]), PauseOrder(order=OrderId(99))],
        "pauses order 99, which does not compute in this group",
    ),
    "a fraction of an order that does not run": (
        lambda view: [RunWork(work=works(view)[0]), ChangeFraction(order=OrderId(99), device_fraction=0.5)],
        "changes the fraction of order 99, which does not compute in this group",
    ),
    "a migration to nowhere": (
        lambda view: [
            RunWork(work=works(view)[0]),
            MigrateWork(pipeline=PipelineId("b"), source=works(view, "b")[0].devices[0], target=GPU),
        ],
        "the source must be a ready shard",
    ),
    "a shard that starts and migrates": (
        lambda view: [
            RunWork(work=works(view)[0]),
            MigrateWork(pipeline=PipelineId("a"), source=works(view)[0].devices[0], target=GPU),
        ],
        "the source must be a ready shard",
    ),
    "a pipeline of another group": (
        lambda view: [RunWork(work=works(view)[0]), MigrateWork(pipeline=PipelineId("z"), source=GPU, target=GPU)],
        "the group has no such pipeline",
    ),
    "the work itself": (lambda view: [RunWork(work=works(view)[0]), *view.ready], "accepted: RunWork, ChangeFraction"),
    "a number": (lambda view: [3], "chose 3; accepted: RunWork"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_a_choice_that_is_not_allowed_is_dropped_as_a_whole(builders, name):
    """Both pipelines have a shard ready on one device. What stands in starts the older one alone."""
    choices, line = PLANS[name]
    is_asked = []

    def dispatch(plan):
        if is_asked:
            return Fifo().dispatch(plan)
        if plan.num_members < 2:
            return plan
        is_asked.append(True)
        return plan.choose(*choices(plan))

    scheduler = Deciding(builders.cluster(), Changed(Fifo(), dispatch=dispatch))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.check_every = 2  # the first pipeline waits for the second on purpose
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    assert [(one.pipeline, one.device_fraction) for one in driver.actions(RunStage)] == [("a", 1.0)]
    assert is_asked
    (fault,) = faults(driver)
    assert fault.method == "dispatch"
    assert line in fault.error
    driver.run()
    assert {scheduler.query.status(one) for one in scheduler.query.pipelines()} == {PipelineStatus.FINISHED}


def test_a_policy_sees_what_it_has_chosen_so_far(builders):
    seen = []

    def dispatch(plan):
        for work in plan.ready:
            plan.choose(RunWork(work=work))
            seen.append((work in plan.ready, plan.is_free(work.devices), plan.free_fraction(work.devices[0])))
        return plan

    driver = builders.Driver(Deciding(builders.cluster(), Changed(Solo(), dispatch=dispatch)))
    driver.submit(builders.pipeline("a", num_steps=1))
    driver.run()
    assert seen == [(False, False, 0.0)] * 2, "the rollout and its training"


@pytest.mark.parametrize("third", ["not placed", "no such nodes", "no relocation"])
def test_of_relocations_of_which_the_third_is_impossible_none_is_made(builders, third):
    a, b = PipelineId("a"), PipelineId("b")
    impossible = {
        "not placed": Relocation(pipeline=PipelineId("z"), choice=OWN_NODES),
        "no such nodes": Relocation(pipeline=a, choice=replace(OWN_NODES, num_new_train_nodes=99)),
        "no relocation": "a goes elsewhere",
    }[third]
    searched, is_due = FruitlessSearch(pipelines=(a, b)), []

    def rebalance(view):
        if is_due:
            return (searched, *(Relocation(pipeline=one, choice=OWN_NODES) for one in (a, b)), impossible)
        return ()

    scheduler = Deciding(builders.cluster(rollout=8, train=8), Changed(Solo(), rebalance=rebalance))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(*map(builders.pipeline, "abc"))
    placements = [scheduler.query.placement.placement(one) for one in (a, b)]
    is_due.append(True)
    driver.send(PipelineCancelled(time_s=driver.now_s, pipeline=PipelineId("c")))
    while PipelineId("c") in scheduler.query.placement:
        driver.step()
    assert [one.method for one in faults(driver)] == ["rebalance"]
    assert [scheduler.query.placement.placement(one) for one in (a, b)] == placements
    assert not scheduler.query.placement.was_searched_in_vain(searched.pipelines)
    driver.run()
    assert not driver.actions(Relocate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisingTurns(Gavel):
    def give_turns(self, *given):
        raise ValueError("no turn")


def test_where_giving_turns_fails_pipelines_have_nodes_of_their_own_one_after_another(builders):
    scheduler = Scheduler(builders.cluster(), RaisingTurns())
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.run()
    assert [one.pipeline for one in driver.actions(Admit)] == ["a", "b"]
    assert {one.method for one in faults(driver)} == {"give_turns"}
    assert {scheduler.query.status(one) for one in scheduler.query.pipelines()} == {PipelineStatus.FINISHED}


def test_no_more_errors_are_reported_than_people_would_read(builders):
    def fail(view):
        raise ValueError(f"at {view.now_s}")

    scheduler = Deciding(builders.cluster(), Changed(Solo(), dispatch=fail))
    driver = builders.Driver(scheduler, raises_policy_faults=False)
    driver.submit(builders.pipeline("a", num_steps=MAX_REPORTED))
    driver.run()
    assert len(faults(driver)) == MAX_REPORTED < scheduler.query.num_policy_faults


def test_the_same_events_give_the_same_faults_again(builders):
    def changed():
        wrapped = Fifo()
        return Changed(wrapped, **now_and_then(wrapped, random.Random(3)))

    driver = builders.Driver(Deciding(builders.cluster(rollout=1), changed()), raises_policy_faults=False)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.run()
    again = Deciding(builders.cluster(rollout=1), changed())
    replayed = [action for event in driver.events for action in again.handle(event)]
    assert replayed == [action for _, action in driver.log]
    assert any(isinstance(action, ReportPolicyFault) for action in replayed)


def test_a_test_gets_the_error_itself(builders):
    def fail(view):
        raise KeyError("gone")

    for dispatch, error in ((fail, KeyError), (lambda plan: plan.choose(None), PolicyError)):
        driver = builders.Driver(Deciding(builders.cluster(), Changed(Solo(), dispatch=dispatch)))
        with pytest.raises(error):
            driver.submit(builders.pipeline("a"))

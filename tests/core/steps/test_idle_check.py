"""The check of idle devices beside ready work notices a policy that does less than it promises."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.plans import Filtered

from rlmux.core.decision.plan import MarkPlanned, RunWork
from rlmux.core.decision.policy import Idling
from rlmux.core.events import PipelineCancelled, StagePaused
from rlmux.core.model import PipelineId
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.baselines import Fifo
from rlmux.policies.jigsaw import Jigsaw
from rlmux.policies.lookahead.dispatching import start_oldest_first, start_where_free
from rlmux.policies.rollmux import RollMux


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy(Fifo):
    """`fifo` that starts no work of pipeline `b`."""

    def dispatch(self, plan):
        return plan.choose(*[choice for choice in start_oldest_first(plan) if choice.work.pipeline != "b"])


@dataclass(frozen=True, slots=True, kw_only=True)
class OneOnly(RollMux):
    """`rollmux` that never starts `a` again after its first step, whose slots the others then wait for."""

    def dispatch(self, plan):
        RollMux.dispatch(self, Filtered(plan, lambda choice: choice.work.pipeline != "a" or choice.work.step < 2))
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfair(RollMux):
    """`rollmux` that starts `b` whenever it is ready, while it promises that none is ahead by more than a cycle."""

    def dispatch(self, plan):
        others = [work for work in plan.ready if work.pipeline == "b"]
        return plan.choose(*[choice for choice in start_oldest_first(plan) if choice.work in others])


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgetful(Jigsaw):
    """`b` never begins its rollout on the rollout pool, whatever is free there."""

    def dispatch(self, plan):
        plan.choose(MarkPlanned())
        works = [work for work in plan.ready if work.pipeline != "b" or work.devices[0].pool == "train"]
        return plan.choose(*start_where_free(plan, works))


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle(Jigsaw):
    """`jigsaw` that only plans."""

    def dispatch(self, plan):
        Jigsaw.dispatch(self, Filtered(plan, lambda choice: not isinstance(choice, RunWork)))
        return plan


def play(builders, policy):
    """`b` has rollout nodes of its own where pools are apart, and could train while `a` rolls out."""
    driver = builders.Driver(Scheduler(builders.cluster(rollout=3, train=1), policy))
    driver.submit(builders.pipeline("a", num_steps=30, rollout_s=9.0, train_s=1.0))
    driver.submit(builders.pipeline("b", num_steps=8, rollout_s=1.0, train_s=6.0, num_rollout_nodes=2))
    driver.run()


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (Lazy(), "waits beside free devices"),
        (OneOnly(), "has the first cycle slot and waits beside free devices"),
        (Unfair(), "has the first cycle slot and waits beside free devices"),
        (Forgetful(), "had waited beside free devices"),
        (Idle(), "nothing of group 0 runs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_policy_that_idles_more_than_it_promises_is_found(builders, policy, what):
    with pytest.raises(AssertionError, match=what):
        play(builders, policy)


@pytest.mark.parametrize("policy", ["rollmux", "rlmux", "jigsaw"])
def test_those_that_promise_something_keep_it_and_would_not_keep_more(builders, policy, monkeypatch):
    """Each does idle beside ready work here, so a promise of never would be found broken."""
    play(builders, make_policy(policy))
    made = make_policy(policy)
    monkeypatch.setattr(type(made), "idling", lambda self, view: Idling())
    with pytest.raises(AssertionError, match="waits beside free devices"):
        play(builders, made)


def test_devices_that_a_cancelled_pipeline_leaves_one_by_one_are_used_at_once(builders):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=2, train=1), make_policy("fifo")))
    driver.submit(builders.pipeline("a", rollout_s=9.0), builders.pipeline("b"))
    first, _ = driver.scheduler.query.orders()
    driver.send(PipelineCancelled(time_s=1.0, pipeline=PipelineId("a")))
    driver.send(StagePaused(time_s=1.0, order=first.id, seconds=1.0))
    assert {order.pipeline for order in driver.scheduler.query.orders()} == {"a", "b"}

"""Pipelines of one base side by side in one batch."""

from __future__ import annotations

import pytest

from rlmux.core.actions import RunStage, SetDeviceFraction
from rlmux.core.events import BatchShare, PipelineCancelled, StageFinished
from rlmux.core.model import Footprint, Phase, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares

SMALL = Footprint(rollout_device_bytes=1.0, train_device_bytes=1.0)


@pytest.fixture
def driver(builders):
    return builders.Driver(Scheduler(builders.cluster(), make_policy("rlmux")))


def tenants(builders, **fields):
    common = {"rollout_s": 8.0, "train_s": 1.0, "rollout_base": "b", "footprint": SMALL, **fields}
    return [builders.pipeline(name, user=name, **common) for name in "ab"]


def rollouts(driver) -> list[tuple[str, float]]:
    return [
        (action.pipeline, round(action.device_fraction, 2))
        for action in driver.actions(RunStage)
        if action.stage is Stage.GENERATE
    ]


def test_a_second_pipeline_of_the_base_begins_beside_the_first(driver, builders):
    driver.submit(*tenants(builders))
    assert rollouts(driver) == [("a", 1.0), ("b", 0.5)]
    assert [action.device_fraction for action in driver.actions(SetDeviceFraction)] == [0.5]


@pytest.mark.parametrize(
    "fields", [{"rollout_base": "c"}, {}, {"rollout_base": "b", "footprint": Footprint()}], ids=["base", "none", "size"]
)
def test_pipelines_of_other_bases_or_unknown_sizes_take_turns(driver, builders, fields):
    driver.submit(tenants(builders)[0], tenants(builders, **{"rollout_base": "", **fields})[1])
    assert rollouts(driver) == [("a", 1.0)]


def test_batches_that_were_seen_not_to_help_end(driver, builders):
    """Together they are as fast as one after the other, as both were seen alone."""
    driver.submit(*tenants(builders, num_steps=40))
    slowdowns = driver.scheduler._parts.state.batch_slowdowns
    share = BatchShare(num_together=2, tokens=100, seconds=2.0, held_s=1.0, charged_s=1.0)
    for each in 20 * tenants(builders):
        slowdowns.observe(each, Phase.ROLLOUT, tokens=200, seconds=3.0, batches=(share,))
    before = len(rollouts(driver))
    driver.run()
    assert {fraction for _, fraction in rollouts(driver)[before + 2 :]} == {1.0}


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_each_is_charged_by_its_tokens_and_all_add_up_to_what_was_held(builders, is_cancelled):
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rlmux"), FairShares()))
    driver.submit(*tenants(builders))
    first, second = [action.order for action in driver.actions(RunStage)]
    if is_cancelled:
        driver.send(PipelineCancelled(time_s=0.0, pipeline="b"))
    for order, charged_s in ((first, 6.0), (second, 2.0)):
        share = BatchShare(num_together=2, tokens=9, seconds=8.0, held_s=4.0, charged_s=charged_s)
        driver.send(StageFinished(time_s=8.0, order=order, seconds=8.0, batches=(share,)))
    charged = driver.scheduler._parts.state.charged_by_pipeline
    assert [charged[name]["rollout"] for name in "ab"] == pytest.approx([6.0, 2.0])

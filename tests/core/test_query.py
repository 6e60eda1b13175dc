"""Drivers, displays and tests read the scheduler through `Scheduler.query` alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.core.work import WorkState
from rlmux.policies import make_policy

ROOT = Path(__file__).parents[2]
A, B, ROLLOUT = PipelineId("a"), PipelineId("b"), DeviceId("rollout", 0, 0)


@pytest.fixture
def driver(builders):
    """Pipeline a rolls out by order 1; b's rollout is ready on the same device."""
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("rollmux")))
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    return driver


@pytest.mark.parametrize("room", ["src/rlmux", "tests", "benchmarks", "examples"])
def test_no_file_outside_core_reads_the_schedulers_state(room):
    reads = re.compile(r"scheduler\.(state|ledger)\b|Scheduler\([^)]*\)\.(state|ledger)\b")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / room).rglob("*.py"))
        if "core" not in path.relative_to(ROOT).parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if reads.search(line)
    ]
    assert not found, "\n".join(found)


def test_it_says_what_runs_what_waits_and_what_is_held(driver):
    query = driver.scheduler.query
    assert query.pipelines() == (A, B)
    assert [query.status(name) for name in query.pipelines()] == [PipelineStatus.RUNNING] * 2
    assert [(order.id, order.pipeline, order.phase) for order in query.orders()] == [(OrderId(1), A, Phase.ROLLOUT)]
    assert [work.pipeline for work in query.ready_work()] == [B]
    assert (query.shard_state(A, ROLLOUT), query.shard_state(B, ROLLOUT)) == (WorkState.RUNNING, WorkState.READY)
    assert (query.held_fraction(ROLLOUT), query.num_residents(ROLLOUT)) == (1.0, 1)
    assert query.placement.num_groups == len(query.groups()) == 1


def test_it_is_idle_only_once_every_pipeline_is_over(driver):
    query = driver.scheduler.query
    assert not query.is_idle()
    driver.run()
    assert query.is_idle()
    assert not query.has_orders()
    assert not query.has_order(OrderId(1))


def test_it_tells_why_a_pipeline_waits(builders):
    driver = builders.Driver(Scheduler(builders.cluster(), make_policy("solo")))
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    query = driver.scheduler.query
    assert query.status(B) is PipelineStatus.WAITING
    assert query.reason(B)
    assert query.reason(A) == ""
    assert not query.is_idle()


def test_it_offers_no_way_to_change_the_state(driver):
    query = driver.scheduler.query
    with pytest.raises(AttributeError):
        query.placement = None
    with pytest.raises(AttributeError):
        query.pipeline(A).published_version = 3
    with query.placement.trial() as ledger:
        ledger.depart(A)
    assert A in query.placement

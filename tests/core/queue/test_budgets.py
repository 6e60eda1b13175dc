"""Quotas in dollars: what waits for one, what parks for one, and what of them a later part of a run knows."""

from __future__ import annotations

import pytest

from rlmux.core.actions import Admit, Park, Refuse, Remind
from rlmux.core.events import SharesSet, UsageRestored
from rlmux.core.model import Account, Cluster, Phase, PipelineId, PipelineStatus, Pool
from rlmux.core.queue.wait_reasons import Change, Wait
from rlmux.core.queue_order import AccountShare, AccountSpent, Quota, ShareSettings
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.max_min_fairness import FairShares

ANN = Account("", "ann")
PERIOD_S = 10_000.0


@pytest.fixture
def driver(builders):
    """Four nodes of $36 an hour, a cent a second, and four of $72: a pipeline asks for $108 an hour."""
    return driver_of(builders)


def driver_of(builders):
    rollout = Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=4, usd_per_gpu_hour=36.0)
    train = Pool(name="train", phase=Phase.TRAIN, num_nodes=4, usd_per_gpu_hour=72.0)
    cluster = Cluster(pools={"rollout": rollout, "train": train})
    return builders.Driver(Scheduler(cluster, make_policy("solo"), FairShares()))


def limit(driver, **quota: float) -> None:
    shares = ShareSettings(accounts=(AccountShare(account=ANN, quota=Quota(**quota)),))
    driver.send(SharesSet(time_s=driver.now_s, shares=shares))


def wait_of(driver, name: str) -> Wait:
    wait = driver.scheduler.wait_of(PipelineId(name))
    assert wait is not None
    return wait


def status(driver, name: str) -> PipelineStatus:
    return driver.scheduler.query.status(PipelineId(name))


def test_what_is_over_the_dollars_of_an_hour_waits_and_is_told_what_would_start_it(driver, builders):
    limit(driver, max_usd_per_hour=250.0)
    driver.submit(*(builders.pipeline(name, num_steps=9, user="ann") for name in "abc"))
    driver.submit(builders.pipeline("other", num_steps=9, user="bob"))
    assert [one.pipeline for one in driver.actions(Admit)] == ["a", "b", "other"], "it holds up no other"
    wait = wait_of(driver, "c")
    assert wait.token == "over_quota"
    assert wait.reason == (
        "over quota: it requests nodes of $108.00 an hour of $250.00 that ann may have, and nodes for $216.00 are held"
    )
    assert wait.would_start_now_if == (
        Change(key="without", was="", to="a"),
        Change(key="quota.usd_per_hour", was=250.0, to=324.0),
    )


@pytest.mark.parametrize(("usd", "starts"), [(324.0, True), (323.99, False)])
def test_the_limit_that_why_names_starts_it_and_a_cent_less_does_not(driver, builders, usd, starts):
    limit(driver, max_usd_per_hour=250.0)
    driver.submit(*(builders.pipeline(name, num_steps=9, user="ann") for name in "abc"))
    limit(driver, max_usd_per_hour=usd)
    assert (status(driver, "c") is PipelineStatus.RUNNING) == starts


def test_fewer_nodes_are_named_where_they_are_within_the_quota(driver, builders):
    limit(driver, max_usd_per_hour=250.0)
    driver.submit(builders.pipeline("a", user="ann"), builders.pipeline("b", user="ann", num_rollout_nodes=3))
    change = wait_of(driver, "b").would_start_now_if[0]
    assert change == Change(key="rollout.workers", was=3, to=1), "two would ask for $252 with those of a"


def test_what_alone_asks_for_more_dollars_is_refused_with_the_numbers(driver, builders):
    limit(driver, max_usd_per_hour=100.0)
    driver.submit(builders.pipeline("a", user="ann"))
    (refused,) = driver.actions(Refuse)
    assert refused.reason == "over quota: it requests nodes of $108.00 an hour of $100.00 that ann may have"


def test_a_spent_budget_parks_at_the_next_step_and_the_next_period_goes_on(driver, builders):
    """Steps of 3 s at 3 cents a second: 9 cents each, and $45 are spent with the 500th."""
    limit(driver, budget_usd=45.0, budget_period_s=PERIOD_S)
    driver.submit(builders.pipeline("a", num_steps=900, user="ann"))
    driver.submit(builders.pipeline("other", num_steps=900, user="bob"))
    while not driver.actions(Park):
        driver.step()
    assert driver.now_s == pytest.approx(1500.0, abs=3.01), "the step in which the last cent is spent is the last"
    assert driver.actions(Park)[0].pipeline == "a"
    while not driver.actions(Remind):
        driver.step()
    wait = wait_of(driver, "a")
    assert wait.token == "budget_spent"
    begins = "it begins anew at 10000 s"
    assert wait.reason.startswith("budget spent: $45.0")
    assert wait.reason.endswith(f"of the $45.00 of ann for 0.115741 days are spent; {begins}")
    (change,) = wait.would_start_now_if
    assert (change.key, change.was) == ("quota.budget_usd.limit", 45.0)
    driver.run()
    assert status(driver, "a") is PipelineStatus.FINISHED
    starts_s = [time_s for time_s, one in driver.log if isinstance(one, Admit) and one.pipeline == "a"]
    assert starts_s == [0.0, PERIOD_S]
    (row,) = [row for row in driver.scheduler.accounts() if row.account.user == "ann"]
    assert row.usd == pytest.approx(900 * 0.09)
    assert row.spent_usd == pytest.approx(driver.scheduler.spent()[0].usd)
    assert row.budget_begins_s == 2 * PERIOD_S


def test_the_budget_that_why_names_starts_it(driver, builders):
    limit(driver, budget_usd=1.0, budget_period_s=PERIOD_S)
    driver.submit(builders.pipeline("a", num_steps=900, user="ann"))
    while not driver.actions(Remind):
        driver.step()
    (change,) = wait_of(driver, "a").would_start_now_if
    limit(driver, budget_usd=float(change.to) - 0.01, budget_period_s=PERIOD_S)
    assert status(driver, "a") is PipelineStatus.WAITING
    limit(driver, budget_usd=float(change.to), budget_period_s=PERIOD_S)
    assert status(driver, "a") is PipelineStatus.RUNNING


def test_what_is_charged_over_the_end_of_a_period_counts_where_it_falls(driver, builders):
    limit(driver, budget_usd=1e6, budget_period_s=PERIOD_S)
    driver.now_s = PERIOD_S - 1.0
    driver.submit(builders.pipeline("a", num_steps=1, user="ann"))
    driver.run()
    assert driver.scheduler.spent() == (AccountSpent(account=ANN, usd=pytest.approx(2.0 * 0.03), begun_s=PERIOD_S),)


def test_hours_of_a_day_and_a_budget_are_each_asked_for_again_when_they_begin_anew(driver, builders):
    limit(driver, budget_usd=1.0, budget_period_s=3 * 86_400.0)
    driver.submit(builders.pipeline("a", num_steps=2000, user="ann"))
    while not driver.actions(Remind):
        driver.step()
    limit(driver, device_hours_a_day=0.5)
    driver.run()
    at_s = [one.at_s for one in driver.actions(Remind)]
    assert at_s == [86_400.0 * day for day in (3, 1, 2, 4, 5, 6)], "each once"
    assert status(driver, "a") is PipelineStatus.FINISHED


def test_a_later_part_of_a_run_goes_on_with_what_was_spent(driver, builders):
    limit(driver, budget_usd=45.0, budget_period_s=PERIOD_S)
    driver.submit(builders.pipeline("a", num_steps=900, user="ann"))
    while not driver.actions(Remind):
        driver.step()
    spent = driver.scheduler.spent()
    for now_s, expected in ((driver.now_s, PipelineStatus.WAITING), (PERIOD_S, PipelineStatus.RUNNING)):
        later = driver_of(builders)
        later.now_s = now_s
        limit(later, budget_usd=45.0, budget_period_s=PERIOD_S)
        later.send(UsageRestored(time_s=now_s, usage=driver.scheduler.usage(), spent=spent))
        later.submit(builders.pipeline("a", num_steps=900, user="ann"))
        assert status(later, "a") is expected

"""A question about a run that goes on is answered by what then happens, to within a step of each pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.core.events import UsageRestored
from rlmux.core.model import Account, Cluster, Phase, PhaseSeconds, Pipeline, PipelineId, Pool, Stage
from rlmux.core.queue_order import AccountShare, AccountUsage, Quota, ShareSettings
from rlmux.log.run_log import RunLog, run_header
from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.what_if import WhatIfChange, what_if
from rlmux.sim.workloads.arrivals import Arrival, Workload
from rlmux.sim.workloads.ongoing import Ongoing, ongoing
from rlmux.sim.workloads.spread import LEAST, UNMEASURED
from rlmux.sim.world import RandomVariation, SwitchSeconds, TrueSeconds

CLUSTER = Cluster(pools={phase.value: Pool(name=phase.value, phase=phase, num_nodes=1) for phase in list(Phase)[:2]})
SWITCH = SwitchSeconds(cold_rollout_s=2.0, cold_train_s=3.0, warm_rollout_s=0.1, warm_train_s=0.2)
STEP_S = 9.0
"""Solo seconds of a step of the longer pipeline."""
CUT_S = 100.0


def arrival(name: str, rollout_s: float, train_s: float, submit_s: float = 0.0, **changes) -> Arrival:
    world = TrueSeconds(by_stage={Stage.GENERATE: rollout_s, Stage.UPDATE: train_s, Stage.PUBLISH: 0.1})
    pipeline = Pipeline(id=PipelineId(name), num_steps=30, stages=tuple(world.by_stage), **changes)
    return Arrival(submit_s=submit_s, pipeline=pipeline, world=world, switch=SWITCH)


PAIR = (arrival("long", 6.0, 3.0), arrival("short", 4.0, 2.0))


def ends_of(
    arrivals: tuple[Arrival, ...], policy: str, folder: Path | None = None, cut_s: float = CUT_S
) -> dict[str, float]:
    """When each pipeline ends; with a folder, a log that stops at `cut_s` goes there."""
    workload = Workload(name="pair", cluster=CLUSTER, arrivals=arrivals)
    if folder is None:
        result = simulate(workload, make_policy(policy))
    else:
        with RunLog.create(folder, run_header(policy=policy, backend="local", cluster=CLUSTER)) as log:

            def write(event, actions) -> None:
                if event.time_s <= cut_s:
                    log.append_event(event)
                    log.append_actions(actions)

            result = simulate(workload, make_policy(policy), observer=write)
    return {str(one.pipeline): one.left_s or 0.0 for one in result.pipelines}


def cut_run(folder: Path, policy: str = "rollmux") -> Ongoing:
    ends_of(PAIR, policy, folder)
    return ongoing(folder, CLUSTER)


@pytest.mark.parametrize("policy", ["rollmux", "fifo"])
def test_the_rest_of_a_run_ends_when_it_would(tmp_path, policy):
    truth = ends_of(PAIR, policy)
    run = cut_run(tmp_path, policy)
    said = what_if(run, WhatIfChange())["now"]["pipelines"]
    for name, end_s in truth.items():
        assert run.at_s + said[name]["ends_s"] == pytest.approx(end_s, abs=0.25 * STEP_S), name


def test_a_pipeline_that_is_added_ends_when_it_would_and_holds_up_the_others_as_it_would(tmp_path):
    truth = ends_of((*PAIR, replace(arrival("long-2", 6.0, 3.0), submit_s=CUT_S)), "rollmux")
    run = cut_run(tmp_path)
    answer = what_if(run, WhatIfChange(added=run.like("long", 1)))
    assert set(answer["then"]["pipelines"]) == {"long", "short", "long-2"}
    for name, end_s in truth.items():
        assert run.at_s + answer["then"]["pipelines"][name]["ends_s"] == pytest.approx(end_s, abs=0.5 * STEP_S), name
    assert answer["then"]["pipelines"]["short"]["ends_s"] > answer["now"]["pipelines"]["short"]["ends_s"] + STEP_S


def test_without_a_neighbour_or_with_more_devices_a_pipeline_ends_earlier(tmp_path):
    run = cut_run(tmp_path)
    more = Cluster(pools={name: replace(pool, num_nodes=2) for name, pool in CLUSTER.pools.items()})
    for change in (WhatIfChange(removed=["long"]), WhatIfChange(cluster=more, policy="solo")):
        answer = what_if(run, change)
        ends = [answer[side]["pipelines"]["short"]["ends_s"] for side in ("now", "then")]
        assert ends[1] < ends[0] - STEP_S
    assert answer["then"]["policy"] == "solo"


def test_a_pipeline_alone_is_not_faster_than_alone_with_staleness_neither(tmp_path):
    """Its rollouts overlap its training, alone too."""
    ends_of((arrival("stale", 6.0, 3.0, staleness=1),), "fifo", tmp_path)
    slowdown = what_if(ongoing(tmp_path, CLUSTER), WhatIfChange())["now"]["pipelines"]["stale"]["step_slowdown"]
    assert 1.0 - 1e-9 <= slowdown < 1.1


def test_names_that_are_not_there_or_taken_are_refused(tmp_path):
    run = cut_run(tmp_path)
    with pytest.raises(
        UserError, match="--like nobody: not a pipeline of the run that has ended a step; accepted: long, short"
    ):
        run.like("nobody", 1)
    with pytest.raises(UserError, match="--remove nobody: not a pipeline that goes on; accepted: long, short"):
        what_if(run, WhatIfChange(removed=["nobody"]))
    with pytest.raises(UserError, match="pipeline long: the run has one of this name"):
        what_if(run, WhatIfChange(added=[PAIR[0]]))


def test_what_is_not_known_yet_is_left_out_with_a_note(tmp_path):
    run = cut_run(tmp_path, "solo")  # the second has not begun
    assert [str(each.pipeline.id) for each in run.left.arrivals] == ["long"]
    assert run.left.notes == ("short is left out: it has ended no step yet, and its file has no estimate",)
    estimated = arrival("short", 4, 2, estimate=PhaseSeconds(rollout_s=4, train_s=2))
    ends_of((PAIR[0], estimated), "solo", tmp_path / "estimated")
    assert len(ongoing(tmp_path / "estimated", CLUSTER).left.arrivals) == 2


def test_a_run_of_which_nothing_is_known_or_nothing_left_is_refused(tmp_path):
    begun, over = tmp_path / "begun", tmp_path / "over"
    ends_of(PAIR[:1], "rollmux", begun, cut_s=1.0)
    with pytest.raises(UserError, match="nothing to predict; long is left out: it has ended no step"):
        ongoing(begun, CLUSTER)
    ends_of(PAIR[:1], "rollmux", over, cut_s=1e9)
    with pytest.raises(UserError, match="nothing to predict; all its pipelines are over"):
        what_if(ongoing(over, CLUSTER), WhatIfChange(policy="solo"))


def test_a_pipeline_that_has_just_finished_may_be_asked_for_again(tmp_path):
    """Beside what goes on, and where nothing does."""
    brief = replace(PAIR[1], pipeline=replace(PAIR[1].pipeline, num_steps=12))
    pair = (PAIR[0], brief)
    truth = ends_of(pair, "rollmux")
    ends_of(pair, "rollmux", tmp_path / "one", cut_s=truth["short"] + 1.0)
    one = ongoing(tmp_path / "one", CLUSTER)
    answer = what_if(one, WhatIfChange(added=one.like("short", 1)))
    assert set(answer["then"]["pipelines"]) == {"long", "short-2"}
    ends_of(pair, "rollmux", tmp_path / "none", cut_s=1e9)
    none = ongoing(tmp_path / "none", CLUSTER)
    answer = what_if(none, WhatIfChange(added=none.like("short", 1)))
    assert answer["now"]["pipelines"] == {}
    alone_s = ends_of((brief,), "rollmux")["short"]
    assert answer["then"]["pipelines"]["short-2"]["ends_s"] == pytest.approx(alone_s, rel=0.01)


# --- ranges -------------------------------------------------------------------------------------------------


def varied(seed: int) -> tuple[Arrival, ...]:
    """The pair with steps that differ."""
    return tuple(
        replace(one, world=replace(one.world, variation=RandomVariation(seed=seed + number, cv=0.4)))
        for number, one in enumerate(PAIR)
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_steps_differ_the_end_lies_in_the_range(tmp_path, seed):
    truth = ends_of(varied(seed), "rollmux")
    ends_of(varied(seed), "rollmux", tmp_path)
    run = ongoing(tmp_path, CLUSTER)
    for name, one in what_if(run, WhatIfChange())["now"]["pipelines"].items():
        assert one["low"]["ends_s"] < one["ends_s"] < one["high"]["ends_s"]
        assert one["low"]["ends_s"] <= truth[name] - run.at_s <= one["high"]["ends_s"], name


def test_steps_that_happen_to_be_alike_leave_the_least_range(tmp_path):
    one = what_if(cut_run(tmp_path), WhatIfChange())["now"]["pipelines"]["long"]
    for bound, factor in (("low", 1.0 - LEAST), ("high", 1.0 + LEAST)):
        assert one[bound]["ends_s"] == pytest.approx(factor * one["ends_s"], rel=0.02)


def test_a_change_is_the_difference_within_each_world(tmp_path):
    """So its range is narrower than the difference between the ranges of both sides."""
    run = cut_run(tmp_path)
    answer = what_if(run, WhatIfChange(added=run.like("long", 1)))
    assert set(answer["change"]["pipelines"]) == {"long", "short"}
    now, then, change = (answer[side]["pipelines"]["short"] for side in ("now", "then", "change"))
    assert change["ends_s"] == then["ends_s"] - now["ends_s"]
    assert change["low"]["ends_s"] < change["ends_s"] < change["high"]["ends_s"]
    assert change["low"]["ends_s"] > then["low"]["ends_s"] - now["high"]["ends_s"]
    assert change["high"]["ends_s"] < then["high"]["ends_s"] - now["low"]["ends_s"]
    assert answer["change"]["low"]["makespan_s"] > 0.0


def test_a_pipeline_that_has_only_an_estimate_has_a_wider_range_and_a_note(tmp_path):
    added = arrival("third", 4.0, 2.0, estimate=PhaseSeconds(rollout_s=4.0, train_s=2.0))
    answer = what_if(cut_run(tmp_path), WhatIfChange(added=[added], removed=["long", "short"]))
    one = answer["then"]["pipelines"]["third"]
    assert one["high"]["ends_s"] == pytest.approx((1.0 + UNMEASURED) * one["ends_s"], rel=0.02)
    assert answer["notes"] == ["third: fewer than 3 steps are measured; its range is 60% more or less"]


def logged_run(folder: Path, arrivals: tuple[Arrival, ...], shares: ShareSettings, cluster: Cluster) -> Ongoing:
    """A run under shares whose log stops at `CUT_S`."""
    workload = Workload(name="run", cluster=cluster, arrivals=arrivals, shares=shares)
    with RunLog.create(folder, run_header(policy="solo", backend="local", cluster=cluster)) as log:

        def write(event, actions) -> None:
            if event.time_s <= CUT_S:
                log.append_event(event)
                log.append_actions(actions)

        simulate(workload, make_policy("solo"), observer=write)
    return ongoing(folder, cluster)


FOUR = Cluster(pools={name: replace(pool, num_nodes=4) for name, pool in CLUSTER.pools.items()})


def test_a_quota_of_two_pipelines_keeps_a_third_and_a_fourth_waiting_in_the_prediction_too(tmp_path):
    two = Quota(max_running=2)
    shares = ShareSettings(accounts=(AccountShare(account=Account("", "ann"), quota=two),))
    known = {"user": "ann", "estimate": PhaseSeconds(rollout_s=6.0, train_s=3.0)}
    run = logged_run(tmp_path, tuple(arrival(f"p{number}", 6.0, 3.0, **known) for number in range(4)), shares, FOUR)
    said = what_if(run, WhatIfChange(added=run.like("p0", 1)))["then"]["pipelines"]
    begins = sorted(one["queue_s"] for one in said.values())
    assert [queue_s < 1.0 for queue_s in begins] == [True, True, False, False, False]


def test_what_was_used_counts_in_the_prediction(tmp_path):
    """A day's quota that is nearly spent: what was used before is read from the log's last note `usage`."""
    day = Quota(device_hours_a_day=1.0)
    shares = ShareSettings(accounts=(AccountShare(account=Account("", "ann"), quota=day),))
    run = logged_run(tmp_path, (arrival("p0", 6.0, 3.0, user="ann"),), shares, FOUR)
    used = UsageRestored(
        usage=(AccountUsage(account=Account("", "ann"), pool="train", device_s=3600.0, today_s=3600.0),)
    )
    spent = replace(run, left=replace(run.left, usage=used))
    assert what_if(spent, WhatIfChange(added=run.like("p0", 1)))["then"]["pipelines"]["p0-2"]["queue_s"] != 0.0


def test_a_pipeline_that_its_user_parked_is_not_predicted_to_go_on(tmp_path):
    ends_of(PAIR, "rollmux", tmp_path)
    with RunLog.open(tmp_path) as log:
        log.note("standing", CUT_S, pipeline="short", is_held=True)
    run = ongoing(tmp_path, CLUSTER)
    said = what_if(run, WhatIfChange(added=run.like("long", 1)))
    assert said["then"]["pipelines"]["short"]["ends_s"] is None
    assert any("short is held or parked" in note for note in said["notes"])

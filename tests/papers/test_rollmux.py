"""The studies behind `rlmux reproduce rollmux`, and the callers' interface."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlmux import papers
from rlmux.core.errors import UserError
from rlmux.papers import micro_cycles as micro
from rlmux.papers import rollmux
from rlmux.papers import tail_migration as tail
from rlmux.papers.offline_optimum import offline_cost
from rlmux.papers.rollmux import PAPER_ACCOUNTING, WEAVE_ACCOUNTING
from rlmux.papers.rollmux_rows import gavel_rows, micro_rows, tail_rows
from rlmux.sim import api
from rlmux.sim.results.sweep import SimRun, run_simulation, spread, sweep
from rlmux.sim.workloads import catalog


def test_sharing_a_node_pair_gives_the_published_gain():
    gain = micro.micro_gain("micro-a", is_strict=True)
    assert gain.over_solo == pytest.approx(1.82, rel=0.05)
    assert gain.over_colocated == pytest.approx(1.47, rel=0.05)


def test_training_sharing_gives_the_published_gain_first_come_first_served_only():
    assert micro.micro_gain("micro-b", is_strict=False).over_solo == pytest.approx(1.90, rel=0.05)
    assert micro.micro_gain("micro-b", is_strict=True).over_solo < 1.5


@pytest.mark.slow
def test_migrating_measured_tails_gives_the_published_gains_or_more():
    rows = tail_rows()
    assert all(row.ours >= 0.95 * row.published for row in rows)
    assert [row.figure for row in rows if not row.is_reached] == ["migration gain, 7B_8k + 7B_8k"]


def test_what_stands_between_a_micro_benchmark_and_its_figure_is_computed():
    missed = [row.as_dict() for row in micro_rows() if not row.is_reached]
    assert [row["cause_is"] for row in missed] == ["computed"] * len(missed)
    assert missed


def test_gavel_by_turns_stays_below_rollmux_and_its_misses_are_named():
    pytest.importorskip("ortools")
    rows, of_rollmux = gavel_rows(), micro_rows()
    for row in rows:
        (rollmux_gain,) = [
            one.ours for one in of_rollmux if one.figure.startswith(row.figure[:7]) and "first" in one.figure
        ]
        assert row.ours < rollmux_gain
    assert [row.as_dict()["cause_is"] for row in rows] == ["computed in part", "computed in part", "conjecture"]


def test_cold_starts_cost_turns_what_is_between_the_two_gains():
    pytest.importorskip("ortools")
    assert micro.gavel_gain("micro-a", costs=False) == pytest.approx(1.0, abs=0.01)  # two pipelines take turns
    assert micro.gavel_gain("micro-a") == pytest.approx(0.87, abs=0.01)


@pytest.mark.slow
def test_no_cause_of_a_missed_row_is_refuted_or_unknown():
    rows = papers.reproduce("rollmux", num_seeds=1)["rows"]
    kinds = {row["cause_is"] for row in rows if row["published"] is not None and "SLO" not in row["figure"]}
    assert kinds <= {"", "computed", "computed in part", "conjecture"}


def test_migration_is_never_better_than_what_bounds_the_pair():
    """No rollout can end before its longest response, nor training before that."""
    one = tail.tailed_pipeline("14B_8k")
    bound_s = one.rollout_s + one.train_s + one.switch.warm_rollout_s + one.switch.warm_train_s
    assert tail.migration_gain("14B_8k", "14B_8k").seconds_with >= bound_s


def test_an_unmeasured_rollout_is_refused():
    with pytest.raises(UserError, match="accepted: 7B_4k"):
        tail.tailed_pipeline("32B_8k")


def test_the_offline_optimum_bounds_every_policy_that_keeps_slos():
    made = catalog.build("mixed", seed=1, num_pipelines=40, **PAPER_ACCOUNTING)
    best = offline_cost(made)
    assert best.num_proven == best.num_groupings
    solo, rollmux = sweep([SimRun(workload=made, policy=name) for name in ("solo", "rollmux")], num_processes=1)
    assert best.cost_usd <= rollmux.cost_usd <= solo.cost_usd
    assert best.bound_usd <= best.cost_usd


def test_regrouping_follows_durations_that_drift():
    made = catalog.build("drift-up", seed=0, **WEAVE_ACCOUNTING)
    few = type(made)(name="few", cluster=made.cluster, arrivals=made.arrivals[:6])
    assert offline_cost(few, regroup_every_s=3600.0).num_groupings > offline_cost(few).num_groupings


def test_simulate_gives_stable_keys_with_means_minima_and_maxima():
    report = api.simulate("bl-s:num_pipelines=4", policies=["rollmux"], num_seeds=2, num_processes=1)
    figures = report["policies"]["rollmux"]
    assert {
        "cost_usd_per_hour", "cost_usd", "cost_usd_per_solo_hour", "bound_usd", "slo_attainment",
        "mean_step_slowdown", "max_step_slowdown", "makespan_s",
        "tokens_per_s", "peak_gpus", "admissions", "utilization", "decision_ms", "events", "wall_s",
        "mean_queue_s",
    } <= set(figures)  # fmt: skip
    assert set(figures["admissions"]) == {"direct", "scaled", "new"}
    assert set(figures["decision_ms"]) == {"p50", "p99"}
    low, high = figures["min"]["cost_usd"], figures["max"]["cost_usd"]
    assert low <= figures["cost_usd"] <= high
    json.dumps(report)


@pytest.mark.slow
def test_a_sweep_is_the_same_on_one_core_and_on_two():
    tasks = api.tasks_of("th-s:num_pipelines=8", ["solo", "random"], range(2))
    seen = []
    one = sweep(tasks, num_processes=1)
    two = sweep(tasks, num_processes=2, progress=lambda done, total: seen.append((done, total)))
    assert [r.cost_usd for r in one] == [r.cost_usd for r in two]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_users_mistake_in_a_worker_process_reaches_the_caller():
    with pytest.raises(UserError, match="accepted: 7B_4k"):
        spread(tail.tailed_pipeline, ["70B_8k", "7B_8k"], num_processes=2)


def test_plan_gives_the_place_slowdown_and_cost_of_every_pipeline():
    table = api.plan("micro-a")
    assert table["usd_per_hour"] == pytest.approx(8 * (1.76 + 5.28))
    assert table["solo_usd_per_hour"] == pytest.approx(2 * table["usd_per_hour"])
    first, second = table["pipelines"]
    assert (first["admission"], second["admission"]) == ("new", "direct")
    assert second["step_slowdown"] == pytest.approx((2 * (133.8 + 0.902) + 0.9) / (246.6 + 0.9))  # switches and sync
    free = api.plan("micro-a:costs=false")["pipelines"][1]
    assert free["step_slowdown"] == pytest.approx(267.6 / 246.6)
    assert sum(row["usd_per_hour"] for row in table["pipelines"]) == pytest.approx(table["usd_per_hour"])


def test_plan_on_a_full_cluster_says_which_pipelines_wait_and_why():
    rows = api.plan("micro-b", policy="solo")["pipelines"]
    assert [row["status"] for row in rows] == ["running", "waiting", "waiting"]
    assert "1 train" in rows[1]["reason"]


def test_what_is_not_there_is_refused_by_name():
    with pytest.raises(UserError, match="accepted: rollmux"):
        papers.reproduce("rolmux")
    with pytest.raises(UserError, match="policy 'x' is unknown"):
        api.simulate("weave", policies=["x"])
    with pytest.raises(UserError, match="num_seeds is 0"):
        api.simulate("weave", policies=["solo"], num_seeds=0)


def test_the_examples_of_the_manual_run(capsys):
    text = (Path(__file__).parents[2] / "docs" / "how-it-works" / "simulator.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    cost, slowdown = capsys.readouterr().out.split()
    assert float(cost) == pytest.approx(51.84, abs=0.01)
    assert float(slowdown) == pytest.approx((2 * (133.8 + 0.902) + 0.9) / (246.6 + 0.9))


def test_our_accounting_has_a_bound_and_dollars_for_an_hour_of_solo_work():
    runs = {
        ("ours", name, seed): run_simulation(SimRun(workload=catalog.build("micro-a", seed=seed), policy=name))
        for name in ("solo", "rollmux")
        for seed in range(2)
    }
    solo, shared = rollmux._our_accounting(runs, 2)
    assert (solo["policy"], shared["policy"]) == ("solo", "rollmux")
    assert solo["bound_usd"] == shared["bound_usd"] < shared["cost_usd"] < solo["cost_usd"]
    hours = 2 * 50 * 247.5 / 3600
    assert shared["cost_usd_per_solo_hour"] == pytest.approx(shared["cost_usd"] / hours, rel=0.01)

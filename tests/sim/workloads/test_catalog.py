"""Workloads by name and from CSV: what they hold, and one line for every mistake."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest

from rlmux.cli.inputs import seed_numbers
from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.policies import make_policy
from rlmux.sim import api
from rlmux.sim.split_search import splits
from rlmux.sim.workloads import catalog, trace_csv
from rlmux.sim.workloads.arrivals import profiles, switch_seconds
from rlmux.sim.world import NO_SWITCH


def test_weave_is_the_published_trace():
    made = catalog.build("weave", departure="wall")
    hours = made.end_s / 3600
    assert len(made.arrivals) == 200
    assert hours == pytest.approx(370.16, abs=0.01)
    stays = [a.depart_s - a.submit_s for a in made.arrivals]
    assert sum(stays) / 200 / 3600 == pytest.approx(27.95, abs=0.01)
    assert max(stays) / 3600 == pytest.approx(154.9, abs=0.1)
    assert all(1.1 <= a.pipeline.slo_slowdown <= 2.0 for a in made.arrivals)


@pytest.mark.parametrize("name", [name for name in catalog.names() if name != "pair"])
def test_by_default_every_policy_does_the_same_work_and_pays_for_switches_and_sync(name):
    for one in catalog.build(name).arrivals:
        pipeline = one.pipeline
        assert one.depart_s is None
        assert pipeline.num_steps >= 1
        assert one.switch.cold_train_s > one.switch.warm_train_s > 0
        assert pipeline.switch == one.switch.estimate
        assert pipeline.estimate.sync_s == one.world.by_stage[Stage.PUBLISH] > 0
        assert pipeline.estimate.solo_s == pytest.approx(sum(one.world.by_stage.values()))


@pytest.mark.parametrize("name", ["weave", "drift-up", "mixed"])
def test_the_papers_accounting_has_departures_by_the_clock_and_no_costs(name):
    for one in catalog.build(name, departure="wall", costs=False).arrivals:
        assert one.depart_s > one.submit_s
        assert one.pipeline.num_steps is None
        assert one.pipeline.switch is None
        assert one.pipeline.estimate.sync_s == 0.0


def test_a_32b_pipeline_takes_two_nodes_of_each_pool_unless_charged_one():
    def widths(**params):
        made = catalog.build("weave", **params)
        wide = [a.pipeline for a in made.arrivals if a.pipeline.num_rollout_nodes == 2]
        return len(wide), {p.num_train_nodes for p in wide}

    assert widths() == (10, {2})
    assert widths(train_nodes_32b=1) == (10, {1})


@pytest.mark.parametrize("name", catalog.names())
def test_a_workload_is_a_function_of_its_seed_and_travels_between_processes(name):
    first = catalog.build(name, seed=4)
    assert catalog.build(name, seed=4) == first
    assert pickle.loads(pickle.dumps(first)) == first
    assert [a.submit_s for a in first.arrivals] == sorted(a.submit_s for a in first.arrivals)
    if not name.startswith(("micro", "drift")):
        assert catalog.build(name, seed=5) != first


def test_synthetic_durations_lie_within_table_6():
    for a in catalog.build("rh-l", seed=1).arrivals:
        assert 400 <= a.pipeline.estimate.rollout_s <= 600
        assert 100 <= a.pipeline.estimate.train_s <= 200
    kinds = {str(a.pipeline.id).rpartition("-")[0] for a in catalog.build("mixed", seed=1).arrivals}
    assert len(kinds) == 9


def test_profiles_add_up_to_the_published_step_times():
    published = {"7B_8k": 247, "8B_8k": 431, "8B_16k": 822, "14B_8k": 436, "4B_4k": 173, "32B_8k": 539, "8B_32k": 1448}
    for name, seconds in published.items():
        assert profiles()[name].disaggregated.solo_s == pytest.approx(seconds, abs=1.0)


def test_parameters_can_be_typed_behind_the_name():
    made = catalog.load("weave:slo=1.5,costs=true,host_memory_gb=2000", seed=3)
    assert {a.pipeline.slo_slowdown for a in made.arrivals} == {1.5}
    assert all(a.switch.cold_rollout_s > 20 for a in made.arrivals)
    assert made.cluster.pools["h20"].host_memory_bytes == 2e12


def test_a_pair_may_wait_for_tools():
    usual, waiting = (catalog.load(f"pair:{text}").arrivals[0].world for text in ("tool_calls=0", "tool_calls=2"))
    assert usual.tools is None
    assert (waiting.tools.mean_calls, waiting.tools.wait_s) == (2, 10.0)
    assert catalog.load("pair:tool_calls=2,tool_wait_s=0.5").arrivals[0].world.tools.wait_s == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weav", "did you mean 'weave'"),
        ("weave:slos=2", "no parameter 'slos'; accepted: train_nodes_32b, slo"),
        ("weave:slo", "'slo' is no parameter"),
        ("weave:slo=0.5", "1 <= low <= high"),
        ("weave:train_nodes_32b=3", "train_nodes_32b is 3; accepted: 1, 2"),
        ("weave:departure=clock", "departure is 'clock'; accepted: wall, work"),
        ("bl:costs=some", "costs is 'some'; accepted: True, False"),
        ("pair:tool_call=1", "no parameter 'tool_call'; accepted: first, second, num_gpus, deployment, num_steps, "),
        ("pair:tool_calls=x", "workload 'pair': tool_calls is 'x'; accepted: a number, 0 or more"),
        ("pair:tool_calls=1,tool_wait_s=-1", "workload 'pair': tool_wait_s is -1; accepted: a number, 0 or more"),
        ("bl:num_pipelines=301", "accepted: 1 to 300"),
        ("nowhere.csv", "nowhere.csv: no such file"),
    ],
)
def test_a_mistaken_name_or_parameter_says_what_is_accepted(text, expected):
    with pytest.raises(UserError) as caught:
        catalog.load(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def written(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_csv_trace_becomes_a_workload(tmp_path):
    path = written(
        tmp_path,
        "# two of them\n"
        "pipeline,submit_s,duration_s,num_steps,profile,rollout_s,train_s,slo_slowdown,tokens_per_step,rollout_host_gb\n"
        "b,20,,5,,60.5,40,,,\n"
        "a,10,3600,,32B_8k,,,1.5,2e6,100\n",
    )
    made = trace_csv.load(path)
    a, b = made.arrivals
    note = "row 4: submit_s is 10, before row 3; rows were sorted; accepted: 20 or later"
    assert made.notes.count(note) == 1, "row 1 is the comment"
    assert (a.pipeline.id, a.depart_s, a.pipeline.num_rollout_nodes) == ("a", None, 2)
    assert a.pipeline.num_steps == round(3600 / profiles()["32B_8k"].disaggregated.solo_s)  # the same under any policy
    assert (a.switch, a.pipeline.estimate.sync_s) == (switch_seconds("32B"), 3.9)
    assert b.switch == NO_SWITCH
    assert a.pipeline.footprint.rollout_host_bytes == 100e9
    assert a.tokens_per_step == 2e6
    assert (b.pipeline.num_steps, b.pipeline.estimate.rollout_s, b.pipeline.slo_slowdown) == (5, 60.5, float("inf"))


HEADER = "pipeline,submit_s,depart_s,profile,slo_slowdown\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it is empty; accepted: a header"),
        (HEADER, "a header and no row"),
        ("pipeline,depart_s,profile\na,1,7B_8k\n", "row 1: missing column submit_s; found: pipeline, depart_s"),
        ("pipeline,submit_s,profile\na,1,7B_8k\n", "missing column depart_s (or duration_s, or num_steps)"),
        ("pipeline,submit_s,depart_s\na,1,2\n", "missing column profile (or rollout_s and train_s)"),
        ("pipeline,submit_s,depart_s,profil\na,1,2,7B_8k\n", "column 'profil' is unknown; did you mean 'profile'"),
        (
            HEADER + "a,1,2,7B_8k,1.5\nb,x,2,7B_8k,1.5\n",
            "row 3: column 'submit_s' is 'x'; accepted: a number of at least 0",
        ),
        (HEADER + "a,-1,2,7B_8k,1.5\n", "row 2: column 'submit_s' is -1; accepted: a number of at least 0"),
        (HEADER + "a,nan,2,7B_8k,1.5\n", "column 'submit_s' is nan"),
        (HEADER + "a,5,4,7B_8k,1.5\n", "column 'depart_s' is 4, not after submit_s 5"),
        (HEADER + "a,1,2,7B_9k,1.5\n", "column 'profile' is '7B_9k'; did you mean '7B_8k'"),
        (HEADER + "a,1,2,7B_8k,0.9\n", "column 'slo_slowdown' is 0.9; accepted: a number of at least 1"),
        (HEADER + "a,1,2,7B_8k\n", "row 2: 4 values for 5 columns"),
        (HEADER + "a,1,2,7B_8k,1.5\na,1,2,7B_8k,1.5\n", "column 'pipeline' was given before, in row 2"),
        (HEADER + ",1,2,7B_8k,1.5\n", "column 'pipeline' is empty"),
        (HEADER + "a,1,,7B_8k,1.5\n", "are all empty; accepted: exactly one"),
        (HEADER + "a,1e300,2,7B_8k,1.5\n", "column 'submit_s' is 1e+300; accepted: seconds since the trace began, at"),
        (HEADER + "a,1,9e9,7B_8k,1.5\n", "column 'depart_s' is 9e9: 3.65e+07 steps, which no simulation ends"),
        (
            "pipeline,submit_s,num_steps,profile\na,1,1e30,7B_8k\n",
            "row 2: column 'num_steps' is 1e30: 1e+30 steps, which no simulation ends; accepted: what makes at most",
        ),
    ],
)
def test_a_mistake_in_a_trace_is_one_line_with_file_row_and_column(tmp_path, text, expected):
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        trace_csv.load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message


def test_nothing_is_said_of_a_trace_in_the_order_of_time(tmp_path):
    path = written(tmp_path, "pipeline,submit_s,num_steps,profile\na,0,3,7B_8k\nb,0,3,7B_8k\nc,1,3,7B_8k\n")
    assert not any("sorted" in note for note in trace_csv.load(path).notes)


def test_a_policy_is_made_by_name_with_its_options():
    assert make_policy("random", seed=3).seed == 3
    assert make_policy("rollmux", skips_saturated=True).skips_saturated
    with pytest.raises(UserError, match="did you mean 'rollmux'"):
        make_policy("rolmux")
    with pytest.raises(UserError, match="no option 'size'; accepted"):
        make_policy("solo", size=2)


def test_a_pipeline_that_never_ends_is_refused_by_name():
    weave = catalog.build("weave")
    arrival = weave.arrivals[0]
    for num_steps, expected in ((None, "never ends: it has neither a number of steps nor"), (10**12, "1e+12 steps")):
        endless = replace(arrival, pipeline=replace(arrival.pipeline, num_steps=num_steps), depart_s=None)
        with pytest.raises(UserError, match=re.escape(f"pipeline {arrival.pipeline.id} ")) as caught:
            api.tasks_of(replace(weave, arrivals=(endless,)), ["solo"], [0])
        assert expected in str(caught.value)


def test_an_slo_that_cannot_hold_even_alone_is_named(tmp_path):
    path = tmp_path / "one_pool.yaml"
    path.write_text(
        "cluster: {pools: {all: {phase: both, devices: 1, device_memory_gb: 10}}}\n"
        "pipelines:\n"
        "- {name: tight, steps: 3, slo_slowdown: 1.5, estimate: &seconds {rollout_s: 10, train_s: 5,"
        " rollout_switch_s: 4, train_switch_s: 4}}\n"
        "- {name: loose, steps: 3, slo_slowdown: 1.6, estimate: *seconds}\n"
    )
    (note,) = [note for note in api.notes_of(catalog.load(str(path)), ["solo"]) if "even alone" in note]
    assert note.startswith("slo_slowdown 1.5 of pipeline tight cannot hold even alone")
    assert "with its switches (8 s a step) a step takes 1.533 times its estimate; accepted: 1.534 or more" in note


@pytest.mark.parametrize(("num_steps", "is_named"), [(2, True), (100, False)])
def test_an_slo_that_a_cold_start_breaks_is_named_where_steps_are_few(tmp_path, num_steps, is_named):
    path = tmp_path / "cold.yaml"
    path.write_text(
        "cluster: {pools: {r: {phase: rollout, devices: 1}, t: {phase: train, devices: 1}}}\n"
        f"pipelines: [{{name: short, steps: {num_steps}, slo_slowdown: 1.5, estimate: {{rollout_s: 10, train_s: 5,"
        " sync_s: 5, cold_rollout_switch_s: 12, cold_train_switch_s: 14}}]\n"
    )
    notes = [note for note in api.notes_of(catalog.load(str(path)), ["solo"]) if "even alone" in note]
    assert bool(notes) is is_named
    if is_named:
        assert "with its cold start, over 2 steps (13 s a step) a step takes 1.650 times its estimate" in notes[0]
        assert notes[0].endswith("accepted: 1.65 or more")


def test_pipelines_whose_slo_cannot_hold_are_listed_up_to_three(tmp_path):
    path = tmp_path / "many.yaml"
    path.write_text(
        "cluster: {pools: {all: {phase: both, devices: 9, device_memory_gb: 10}}}\n"
        "defaults: {steps: 3, slo_slowdown: 1, estimate: {rollout_s: 1, train_s: 1, rollout_switch_s: 1,"
        " train_switch_s: 1}}\n"
        f"pipelines: [{', '.join(f'{{name: p{number}}}' for number in range(5))}]\n"
    )
    notes = [note for note in api.notes_of(catalog.load(str(path)), ["solo"]) if "even alone" in note]
    assert [note.partition(" cannot")[0].split()[-1] for note in notes[:-1]] == ["p0", "p1", "p2"]
    assert notes[-1] == "more pipelines whose SLO cannot hold even alone: 2"


def test_a_pool_without_a_price_beside_one_with_a_price_is_named(tmp_path):
    path = tmp_path / "priced.yaml"
    for price, expected in (("", 1), (", usd_per_gpu_hour: 3", 0)):
        path.write_text(
            f"cluster: {{pools: {{rollout: {{devices: 1, usd_per_gpu_hour: 2}}, train: {{devices: 1{price}}}}}}}\n"
            "pipelines: [{name: a, steps: 3, estimate: {rollout_s: 10, train_s: 5}}]\n"
        )
        notes = api.notes_of(catalog.load(str(path)), ["solo"])
        assert sum("nodes of pool train cost nothing" in note for note in notes) == expected


@pytest.mark.parametrize("column", ["num_rollout_nodes", "num_train_nodes"])
@pytest.mark.parametrize("number", [100_000, 10**9])
def test_more_nodes_than_a_simulation_takes_on_are_refused_before_anything_runs(tmp_path, column, number):
    path = tmp_path / "wide.csv"
    path.write_text(f"pipeline,submit_s,num_steps,rollout_s,train_s,{column}\na,0,5,3,2,{number}\n")
    with pytest.raises(UserError, match=rf"pipeline a requests {number:,} \w+ nodes; accepted [^\n]*1,000"):
        api.tasks_of(str(path), ["solo"], [0])


def test_more_shards_than_a_simulation_takes_on_are_refused(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text("pipeline,submit_s,num_steps,rollout_s,train_s,num_rollout_nodes\na,0,1000000,3,2,1000\n")
    with pytest.raises(UserError, match=r"pipeline a has 1e\+09 rollout shards, one a node and step; accepted"):
        api.tasks_of(str(path), ["solo"], [0])


def test_a_plan_refuses_too_many_nodes_too(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text("pipeline,submit_s,num_steps,rollout_s,train_s,num_rollout_nodes\na,0,5,3,2,100000\n")
    with pytest.raises(UserError, match="requests 100,000 rollout nodes"):
        api.plan(str(path))
    with pytest.raises(UserError, match="--split 1000000000: every split is tried; accepted: 2 to 1,000 nodes"):
        splits(catalog.build("weave"), 10**9)


@pytest.mark.parametrize("seeds", ["1000000000", "5-1000000000", "10001"])
def test_more_seeds_than_a_command_takes_on_are_refused(seeds):
    with pytest.raises(UserError, match="from 1 to 10,000"):
        seed_numbers(seeds)

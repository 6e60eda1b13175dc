"""What `plan` and `simulate` say of the terms of their figures, and how they end."""

from __future__ import annotations

import json
import re

import pytest
from tests.log_script import AlternatingRun
from tests.small_files import RAISING_POLICY

from rlmux.sim import api

PLAN = """\
cluster:
  pools:
    h20: {phase: rollout, nodes: 2, gpus_per_node: 8, usd_per_gpu_hour: 1}
    h800: {phase: train, nodes: 2, gpus_per_node: 8, usd_per_gpu_hour: 3}
defaults: {steps: 5, slo_slowdown: 1.5}
pipelines:
  - {name: a, estimate: {rollout_s: 60, train_s: 40}}
  - {name: b, estimate: {rollout_s: 50, train_s: 50, colocated_rollout_s: 70, colocated_train_s: 40}}
"""
RUN = """\
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
policy: rollmux
pipelines: [{name: sort, steps: 30, task: sort}]
"""
TRACE = """\
pipeline,submit_s,duration_s,depart_s,profile,rollout_s,train_s,slo_slowdown
a,0,36000,,7B_8k,,,1.5
b,60,,7200,,60,40,2
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Simulations run one after another: to start processes for them takes longer than these small ones."""
    monkeypatch.setattr("rlmux.sim.results.sweep.num_fitting", lambda tasks: 1)


@pytest.fixture
def files(folder):
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "trace.csv").write_text(TRACE)
    return folder


def test_a_colocated_plan_says_which_seconds_are_missing(rlmux, files):
    said = rlmux("plan", "plan.yaml", "--policy", "colocated")
    assert said.code == 0
    assert "note: colocated: 1 of 2 pipelines have no colocated_rollout_s and colocated_train_s" in said.out
    assert "colocated: " not in rlmux("plan", "plan.yaml", "--policy", "rollmux").out
    assert "note: colocated: 1 of 2" in rlmux("simulate", "plan.yaml", "--policies", "colocated").out


def test_a_plan_that_refuses_a_pipeline_ends_with_code_1(rlmux, files):
    said = rlmux(
        "plan", "plan.yaml", "--set", "pipelines.a.footprint={rollout_host_gb: 200}",
        "--set", "cluster.pools.h20.host_memory_gb=100",
    )  # fmt: skip
    assert said.code == 1
    assert "refused" in said.out
    waiting = rlmux("plan", "plan.yaml", "--policy", "solo", "--set", "cluster.pools.h20.nodes=1")
    assert (waiting.code, "waiting" in waiting.out) == (0, True)


@pytest.mark.parametrize("what", ["device", "host"])
def test_a_worker_that_no_device_holds_is_refused_by_a_plan_and_a_simulation_as_by_a_run(rlmux, folder, what):
    pools = f"rollout: {{devices: 1}}, train: {{devices: 1, {what}_memory_gb: 0.0001}}"
    pipeline = "name: a, task: sort, steps: 1, estimate: {rollout_s: 1, train_s: 1}"
    (folder / "big.yaml").write_text(f"cluster: {{pools: {{{pools}}}}}\npipelines: [{{{pipeline}}}]\n")
    planned, run = rlmux("plan", "big.yaml"), rlmux("run", "big.yaml", "--out", "big")
    simulated = rlmux("simulate", "big.yaml")
    assert planned.err.startswith("rlmux: pipeline a: its train worker needs 0.")
    assert f"of {what} memory" in planned.err
    assert "and there are 0.0001 GB" in planned.err
    assert (planned.code, planned.err) == (run.code, run.err) == (simulated.code, simulated.err)
    assert not (folder / "big").exists()


def test_a_simulation_says_why_pipelines_were_refused(rlmux, files):
    said = rlmux(
        "simulate", "plan.yaml", "--policies", "solo,rollmux",
        "--set", "pipelines.a.footprint={rollout_device_gb: 90, train_device_gb: 1}",
        "--set", "cluster.pools.h20.device_memory_gb=80",
    )  # fmt: skip
    assert said.code == 0
    assert (
        "note: refused by solo, rollmux: pipeline a keeps a state of 90.000 GB on a device of pool 'h20', which has "
        "80.000 GB\n"
    ) in said.out


def test_a_file_may_say_what_switches_and_sync_take_and_else_is_told_that_they_are_free(rlmux, files):
    free = rlmux("simulate", "plan.yaml", "--policies", "rollmux")
    assert "note: switches and weight sync are free for every pipeline" in free.out
    costs = "{rollout_s: 60, train_s: 40, sync_s: 2, rollout_switch_s: 1, train_switch_s: 3, cold_train_switch_s: 30}"
    said = rlmux("simulate", "plan.yaml", "--policies", "solo", "--json", "--set", f"pipelines.a.estimate={costs}")
    told = json.loads(said.out)
    assert told["notes"][0].startswith("switches and weight sync are free for 1 of 2 pipelines")
    assert told["policies"]["solo"]["makespan_s"] == pytest.approx(5 * 102 + 1 + 30)
    synced = rlmux("plan", "plan.yaml", "--set", "pipelines.a.estimate.sync_s=2")
    assert "note: switches are free for every pipeline" in synced.out
    odd = rlmux("plan", "plan.yaml", "--set", "pipelines.a.estimate.rollout_switch_s=1")
    assert odd.code == 2
    assert "accepted: rollout_switch_s and train_switch_s together" in odd.err


def test_a_plan_shows_what_is_paid_for_from_the_bound_to_all_nodes(rlmux, files):
    said = rlmux("plan", "plan.yaml", "--policy", "solo")
    told = json.loads(rlmux("plan", "plan.yaml", "--policy", "solo", "--json").out)
    keys = {"paid_usd_per_hour", "bound_usd_per_hour", "usd_per_solo_hour", "paid_for"}
    assert keys <= told.keys()
    assert sum(told["paid_for"].values()) == told["paid_usd_per_hour"]
    table = said.out.partition("what is paid for, in $/h:\n")[2].splitlines()
    assert [line.split("  ")[0] for line in table[1:5]] == [
        "work on nodes never idle", "rollout nodes wait", "training nodes wait", "all",
    ]  # fmt: skip
    assert table[4].endswith("█" * 40)
    assert f"bound ${told['bound_usd_per_hour']:,.2f}/h, ${told['usd_per_solo_hour']:.4g}/solo h" in said.out


def test_a_plan_writes_its_picture(rlmux, files):
    said = rlmux("plan", "plan.yaml", "--out", "pictures")
    assert "pictures/waterfall.svg\n" in said.out
    assert "work on nodes never idle" in (files / "pictures" / "waterfall.svg").read_text()


def test_a_plan_without_prices_shows_no_dollars_that_are_paid(rlmux, files):
    free = [part for pool in ("h20", "h800") for part in ("--set", f"cluster.pools.{pool}.usd_per_gpu_hour=0")]
    said = rlmux("plan", "plan.yaml", *free, "--out", "pictures")
    assert "note: no pool has a price" in said.out
    assert "what is paid for" not in said.out
    assert not (files / "pictures").exists()


def test_a_plan_states_the_probability_that_was_asked_for(rlmux, files):
    limit = "{rollout_s: 60, train_s: 40, limit_rollout_s: 70, limit_train_s: 45}"
    asked = ("--set", "defaults.slo_probability=0.9", "--set", "defaults.slo_slowdown=3")
    estimates = [part for name in ("a", "b") for part in ("--set", f"pipelines.{name}.estimate={limit}")]
    said = rlmux("plan", "plan.yaml", *asked, *estimates)
    assert "a: keeps its SLO over the steps that are left, with a probability of 0.9" in said.out
    told = json.loads(rlmux("plan", "plan.yaml", "--json", *asked, *estimates).out)
    assert [one["slo_probability"] for one in told["pipelines"]] == [0.9, 0.9]
    assert "at most 64.9 s of rollout and 43.2 s of training (estimate: 60 s and 40 s)" in said.out
    assert [one["bound"]["rollout_s"] for one in told["pipelines"]] == pytest.approx([64.86] * 2, abs=0.01)


def test_a_trace_says_on_which_nodes_it_is_priced_and_takes_others(rlmux, files):
    said = rlmux("simulate", "trace.csv", "--policies", "solo")
    assert "note: priced on nodes of h20 for rollout (8 GPUs a node, $1.76 for a GPU-hour, as many as" in said.out
    assert "note: 1 of 2 pipelines leave at depart_s: a slower policy does less of their work" in said.out
    assert "note: switches and weight sync are free for 1 of 2 pipelines" in said.out
    usual, dearer = (
        json.loads(rlmux("simulate", "trace.csv", "--policies", "solo", "--json", *more).out)
        for more in ([], ["--set", "cluster.pools.h20.usd_per_gpu_hour=3.52"])
    )
    assert dearer["policies"]["solo"]["cost_usd"] == pytest.approx(1.25 * usual["policies"]["solo"]["cost_usd"])
    few = rlmux("simulate", "trace.csv", "--policies", "solo", "--set", "cluster.pools.h800.nodes=1")
    assert "h800 for train (8 GPUs a node, $5.28 for a GPU-hour, 1 node)" in few.out


def test_a_simulation_says_what_each_mechanism_is_worth(rlmux):
    asked = ("simulate", "pair:num_steps=2", "--policies", "rlmux", "--ablate", "tails,fractions")
    told = json.loads(rlmux(*asked, "--json").out)
    assert list(told["policies"]) == ["rlmux", "rlmux-no-tails", "rlmux-no-fractions", "rlmux-no-tails-no-fractions"]
    worth = told["ablations"]["rlmux"]
    assert list(worth) == ["tails", "fractions", "tails,fractions"]
    assert worth["fractions"]["figure"] == "makespan_s"
    assert worth["fractions"]["without"] == told["policies"]["rlmux-no-fractions"]["makespan_s"]
    assert worth["fractions"]["ratio"] > 1.2
    assert f"{worth['fractions']['ratio']:.1%}" in rlmux(*asked).out


def test_where_nodes_are_paid_a_mechanism_is_worth_dollars(rlmux, files):
    asked = ("simulate", "plan.yaml", "--policies", "solo,rollmux", "--ablate", "all")
    told = json.loads(rlmux(*asked, "--json").out)
    assert list(told["ablations"]) == ["rollmux"]
    assert told["ablations"]["rollmux"]["tails"]["figure"] == "cost_usd_per_solo_hour"
    assert "$/solo h" in rlmux(*asked).out.partition("what mechanisms are worth")[2]


def test_where_every_pipeline_is_refused_no_mechanism_has_a_worth(rlmux, files):
    refused = ("--set", "defaults.footprint={rollout_host_gb: 200}", "--set", "cluster.pools.h20.host_memory_gb=100")
    said = rlmux("simulate", "plan.yaml", "--policies", "rollmux", "--ablate", "all", "--json", *refused)
    assert json.loads(said.out)["ablations"]["rollmux"]["tails"]["ratio"] is None


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("pipelines.a.steps=3", "--set pipelines.a.steps=3: trace.csv takes overrides of its cluster only, such as"),
        ("cluster.pools.h20.prize=3", "--set cluster.pools.h20.prize=3: cluster.pools.h20.prize"),
        ("cluster.pools.h20.usd_per_gpu_hour=-1", "--set cluster.pools.h20.usd_per_gpu_hour=-1: cluster.pools.h20"),
    ],
)
def test_an_override_that_a_trace_cannot_take_is_one_line(rlmux, files, override, line):
    said = rlmux("simulate", "trace.csv", "--set", override)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"rlmux: {line}"), said.err
    assert said.err.count("\n") == 1


def test_waiting_and_the_bound_stand_in_the_table_beside_the_slos(rlmux, files):
    """Two that share nothing on a node each: the second waits 500 s, and is within twice its solo time."""
    said = rlmux(
        "simulate", "plan.yaml", "--policies", "solo", "--set", "cluster.pools.h20.nodes=1",
        "--set", "cluster.pools.h800.nodes=1", "--set", "defaults.slo_slowdown=3",
    )  # fmt: skip
    header, row = (line.split("  ") for line in said.out.splitlines()[2:4])
    names, cells = ([cell.strip() for cell in line if cell.strip()] for line in (header, row))
    shown = dict(zip(names, cells, strict=True))
    assert (shown["SLOs kept"], shown["queued s"], shown["wait s"]) == ("100.0%", "250", "250")
    assert float(shown["$"]) > float(shown["bound $"]) > 0
    assert {"$/solo h", "slowdown mean"} <= set(shown)


@pytest.mark.slow
def test_seeds_are_counted_or_named(rlmux):
    words = ("simulate", "bl-s:num_pipelines=4", "--policies", "rollmux", "--json", "--seeds")
    counted, named, both = (json.loads(rlmux(*words, seeds).out) for seeds in ("2", "1-1", "0-1"))
    assert (counted["seeds"], named["seeds"], named["num_seeds"]) == ([0, 1], [1], 1)
    costs = [one["policies"]["rollmux"]["cost_usd"] for one in (counted, both)]
    assert costs[0] == costs[1]
    extremes = {counted["policies"]["rollmux"][which]["cost_usd"] for which in ("min", "max")}
    assert named["policies"]["rollmux"]["cost_usd"] in extremes
    said = rlmux("simulate", "bl-s:num_pipelines=2", "--policies", "solo", "--seeds", "3-4")
    assert "2 seeds (3 to 4)" in said.out


def test_a_file_can_be_simulated_and_planned_from_python(files):
    figures = api.simulate("plan.yaml", policies=["solo"], num_processes=1)["policies"]["solo"]
    assert figures["slo_attainment"] == 1.0
    assert api.plan("plan.yaml")["num_groups"] == 1


def test_a_plan_counts_the_base_of_adapters_once(rlmux, files):
    tenant = "task: sort, model: {seed: 1}, adapter: {rank: 4, alpha: 8}, estimate: "
    (files / "plan.yaml").write_text(PLAN.replace("estimate: ", tenant))
    (base,) = json.loads(rlmux("plan", "plan.yaml", "--json").out)["bases"]
    assert base["pipelines"] == ["a", "b"]
    said = rlmux("plan", "plan.yaml")
    assert f"base {base['base']}: {base['gb']:.3f} GB of host memory, once for a, b" in said.out
    (files / "plan.yaml").write_text(PLAN)
    assert json.loads(rlmux("plan", "plan.yaml", "--json").out)["bases"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing would change; accepted: FILE, --add N --like NAME, --remove, --policy or --set"),
        (("--add", "3"), "--add and --like go together, such as --add 40 --like NAME"),
        (("--set", "pipelines.0.steps=3"), "accepted: keys of the cluster, such as cluster.pools.rollout.devices=2"),
        (("--policy", "rolmux"), "--policy 'rolmux': nearest: rollmux; accepted: "),
        (("--remove", "a"), "runs/none: no such folder; accepted: the folder of a run"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(rlmux, folder, words, said):
    answer = rlmux("whatif", "runs/none", *words)
    assert answer.code == 2
    assert said in answer.err
    assert answer.err.count("\n") == 1


def test_a_question_is_answered_with_ranges(rlmux, folder):
    script = AlternatingRun(num_steps=30).script
    script.file = RUN
    script.write(folder / "runs" / "half", len(script.rows) // 2)
    words = ("whatif", "runs/half", "--add", "1", "--like", "sort")
    answer = json.loads(rlmux(*words, "--json").out)
    sort = answer["change"]["pipelines"]["sort"]
    assert 0.0 < sort["low"]["ends_s"] < sort["ends_s"] < sort["high"]["ends_s"]
    (row,) = (line for line in rlmux(*words).out.splitlines() if line.startswith("sort "))
    _, now, then, later_by, *_ = re.split(" {2,}", row)
    for shown in (now, then, later_by):
        assert re.fullmatch(r"\S+ to \S+", shown), "no single number"
    assert later_by == "{:+.3g} to {:+.3g}".format(*(sort[bound]["ends_s"] for bound in ("low", "high")))


def test_a_plan_splits_nodes_between_the_phases(rlmux, files):
    said = rlmux("plan", "plan.yaml", "--split", "4")
    assert "best split of the nodes for each pipeline by itself" in said.out
    (first, *_) = json.loads(rlmux("plan", "plan.yaml", "--split", "4", "--json").out)["splits"]
    assert first["rollout_nodes"] + first["train_nodes"] <= 4
    assert first["step_s"] <= first["asked"]["step_s"]


def test_a_split_of_one_node_and_a_run_that_is_not_there_are_refused(rlmux, files):
    assert rlmux("plan", "plan.yaml", "--split", "1").code == 2
    alone = rlmux("plan", "plan.yaml", "--from-run", "runs/demo")
    assert alone.code == 2
    assert alone.err.startswith("rlmux: --from-run runs/demo: no summary.json of a run")


def test_a_plan_names_origin_range_and_basis_of_each_second(rlmux, folder):
    words = ("plan", "small.yaml", "--set", "pipelines.b.estimate=null", "--gpu", "h100")
    figures = json.loads(rlmux(*words, "--json").out)["figures"]
    assert [each["origin"] for each in figures["a"][:3]] == ["typed", "typed", "roofline"]
    computed = {each["name"]: each for each in figures["b"]}
    assert computed["rollout_s"]["low"] < computed["rollout_s"]["seconds"] < computed["rollout_s"]["high"]
    shown = rlmux(*words).out
    assert re.search(r"\nb +rollout_s .* to .* roofline +8 answers of . tokens, our engine on 1 H100-80GB-SXM\n", shown)


def test_pipelines_with_equal_seconds_share_their_rows(rlmux, folder):
    words = ("plan", "small.yaml", "--set", "pipelines.*.estimate=null", "--set", "pipelines.b.task=sort")
    assert rlmux(*words).out.count("limit_train_s") == 1


@pytest.mark.slow
def test_what_moves_saved_is_printed_as_the_difference_of_two_bills(rlmux, files):
    words = ("simulate", "bl-s:num_pipelines=6", "--policies", "rlmux,solo", "--seeds", "2", "--moves-saved")
    figures = json.loads(rlmux(*words, "--json").out)["policies"]
    saved, paid = figures["rlmux"]["moves_saved_usd"], figures["rlmux"]["paid_usd"]
    (line,) = (line for line in rlmux(*words).out.splitlines() if line.startswith("rlmux: moves: "))
    num_moves, *printed = [float(number.replace(",", "")) for number in re.findall(r"(?<=[ $-])[\d,]+(?:\.\d+)?", line)]
    assert num_moves == figures["rlmux"]["num_moves"] > 0
    least, most = (figures["rlmux"][bound]["moves_saved_usd"] for bound in ("min", "max"))
    assert printed == [pytest.approx(abs(usd), abs=0.006) for usd in (saved, paid, paid + saved, least, most)]
    assert 2 * saved == pytest.approx(least + most)
    assert figures["solo"]["moves_saved_usd"] == 0


def test_without_the_flag_nothing_is_said_of_what_moves_saved(rlmux, files):
    words = ("simulate", "bl-s:num_pipelines=3", "--policies", "rlmux,solo")
    figures = json.loads(rlmux(*words, "--json").out)["policies"]
    out = rlmux(*words).out
    assert f"\nrlmux: moves: {figures['rlmux']['num_moves']:g}\n" in out
    assert "saved" not in out
    assert "solo: moves" not in out
    assert [one["moves_saved_usd"] for one in figures.values()] == [None, None]


def test_a_simulation_says_how_many_decisions_of_a_policy_failed(rlmux, files):
    (files / "raising.py").write_text(RAISING_POLICY)
    said = rlmux("simulate", "plan.yaml", "--policies", "fifo,raising:Raising")
    assert said.code == 0, said.err
    (note,) = [line for line in said.out.splitlines() if "failed" in line]
    assert re.match(
        r"note: \d+ decisions of policy raising:Raising failed and were replaced by the plain order of work: "
        r"policy raising:Raising: dispatch raised AttributeError: ",
        note,
    )

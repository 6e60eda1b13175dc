"""`import rlmux`: the names that it offers, what they return, and how they refuse."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.waiting import until

import rlmux

pytestmark = pytest.mark.xdist_group("interface")  # one run for all
FILE = {
    "cluster": {"pools": {"rollout": {"devices": 1}, "train": {"devices": 1}}},
    "defaults": {
        "steps": 2,
        "model": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 32},
        "algorithm": {"prompts_per_step": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 4, "slots": 4},
    },
    "pipelines": [
        {"name": "a", "seed": 1, "task": "sort", "estimate": {"rollout_s": 2, "train_s": 1}},
        {"name": "b", "seed": 2, "task": "reverse", "estimate": {"rollout_s": 1, "train_s": 2}},
    ],
}
"""A file made in code, small enough to train in seconds."""


def test_a_pool_without_a_price_beside_one_with_a_price_is_named_before_a_run(caplog):
    pools = {"rollout": {"devices": 1, "usd_per_gpu_hour": 2}, "train": {"devices": 1}}
    note = "nodes of pool train cost nothing, as it has no price; accepted: cluster.pools.train.usd_per_gpu_hour"
    rlmux.load({**FILE, "cluster": {"pools": pools}})
    assert caplog.messages.count(note) == 1
    caplog.clear()
    rlmux.load(FILE)
    assert caplog.messages == []


def test_the_public_names_are_these():
    errors = "PipelineError PolicyError RlmuxError SpecError UserError"
    functions = "compare connect load open_run plan run simulate verify"
    assert set(rlmux.__all__) == {"Connection", "Run", "Table", *errors.split(), *functions.split()}
    for name in rlmux.__all__:
        assert inspect.getdoc(getattr(rlmux, name)), name
    assert set(dir(rlmux)) == {*rlmux.__all__, "__version__"}


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(AttributeError, match="no attribute 'simulat'; it has: Connection"):
        rlmux.simulat  # noqa: B018


def test_planning_and_simulating_need_no_torch():
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        f"import rlmux; file = {FILE!r}\n"
        "assert rlmux.plan(file)['num_groups'] == 1\n"
        "assert set(rlmux.simulate(file, policies=['solo', 'rlmux'], processes=1)['policies']) == {'solo', 'rlmux'}"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_file_made_in_code_plans_as_the_same_file_does(tmp_path):
    spec = rlmux.load(FILE, policy="rollmux", overrides=["pipelines.*.steps=5"], purpose="plan")
    (tmp_path / "file.yaml").write_text(spec.resolved, encoding="utf-8")
    assert [one.pipeline.num_steps for one in spec.pipelines] == [5, 5]
    assert rlmux.plan(spec) == rlmux.plan(tmp_path / "file.yaml", policy="rollmux")


def test_an_ablation_is_simulated_beside_its_policy():
    told = rlmux.simulate(FILE, policies=["rollmux"], ablate=["tails"], processes=1)
    assert list(told["policies"]) == ["rollmux", "rollmux-no-tails"]
    assert told["ablations"]["rollmux"]["tails"]["policy"] == "rollmux-no-tails"


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: rlmux.plan({**FILE, "pipeline": []}),
            "mapping: pipeline is an empty list: unknown key; nearest: pipelines",
        ),
        (lambda: rlmux.plan(3), "3 is no file; accepted: a path, a mapping, or what rlmux.load returned"),
        (lambda: rlmux.plan("nowhere.yaml"), "nowhere.yaml: no such file"),
        (lambda: rlmux.plan(FILE, policy="rolmux"), "policy 'rolmux' is unknown"),
        (lambda: rlmux.simulate("wave"), "workload 'wave' is neither"),
        (lambda: rlmux.simulate("weave", overrides=["a=1"]), "only a YAML file takes overrides"),
        (lambda: rlmux.simulate(FILE, policies=["rollmux"], ablate=["fill"]), "--ablate fill: policy 'rollmux' has no"),
        (lambda: rlmux.compare(FILE, policies=["solo"], ablate=["all"]), "--ablate all: policy 'solo' has no such"),
        (lambda: rlmux.open_run("nowhere"), "nowhere: no such folder; accepted: the folder of a run"),
        (lambda: rlmux.connect("http://127.0.0.1:1"), "http://127.0.0.1:1: no token; accepted: RLMUX_TOKEN=..."),
        (lambda: rlmux.load(FILE, purpose="train"), "purpose is 'train'; accepted: run, plan"),
    ],
)
def test_each_mistake_is_one_line(call, line):
    with pytest.raises(rlmux.UserError) as refused:
        call()
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of FILE that is over."""
    pytest.importorskip("torch")
    return rlmux.run(FILE, policy="rollmux", out=tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.slow
def test_a_run_made_in_code_trains_every_pipeline(finished):
    assert finished.is_over
    assert {name: one["status"] for name, one in finished.summary["pipelines"].items()} == {
        "a": "finished",
        "b": "finished",
    }


def test_the_tables_of_a_run_are_plain_rows(finished):
    assert [(row["pipeline"], row["step"]) for row in finished.steps] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert {"reward_mean", "seconds"} <= set(finished.steps.columns)
    assert [row["device"] for row in finished.devices] == ["rollout-0.0", "train-0.0"]
    assert {row["stage"] for row in finished.orders} >= {"generate", "update"}
    for device in finished.devices:
        spans = [row for row in finished.intervals if row["device"] == device["device"]]
        assert sum(row["end_s"] - row["start_s"] for row in spans) == pytest.approx(finished.summary["makespan_s"])


def test_a_table_becomes_a_data_frame_where_pandas_is(finished):
    pytest.importorskip("pandas")
    frame = finished.steps.to_pandas()
    assert list(frame.columns) == list(finished.steps.columns)
    assert len(frame) == len(finished.steps)


def test_without_pandas_the_line_says_how_to_get_it(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(rlmux.UserError, match="pip install pandas"):
        finished.steps.to_pandas()


def test_resuming_a_run_that_is_over_changes_nothing(finished):
    before = finished.summary["pipelines"]
    assert finished.resume().summary["pipelines"] == before


def test_a_run_is_verified_by_a_sample_or_at_every_step(finished):
    sampled = rlmux.verify(finished.folder, seed=1)
    assert sampled["is_equal"]
    assert {name: one["seed"] for name, one in sampled["pipelines"].items()} == {"a": 1, "b": 1}
    whole = rlmux.verify(finished.folder, ["b"], all_steps=True)["pipelines"]
    assert {name: (one["steps_equal"], one["sampled_steps"]) for name, one in whole.items()} == {"b": (2, None)}


def test_nothing_is_connected_to_a_run_that_is_over(finished):
    with pytest.raises(rlmux.UserError, match="nothing runs here now"):
        rlmux.connect(finished.folder)


def test_pipelines_come_and_go_through_a_connection(tmp_path):
    pytest.importorskip("torch")
    folder = tmp_path / "run"
    endless = {**FILE["pipelines"][0], "name": "endless", "steps": 100_000}
    thread = threading.Thread(target=rlmux.run, args=({**FILE, "pipelines": [endless]},), kwargs={"out": folder})
    thread.start()
    try:
        connection = _connected(folder, thread)
        late = {**FILE["pipelines"][1], "name": "late"}
        (outcome,) = connection.submit({"defaults": FILE["defaults"], "pipelines": [late]})
        assert (outcome["pipeline"], outcome["outcome"]) == ("late", "placed")
        assert connection.wait("late") == {"late": "finished"}
        with pytest.raises(rlmux.UserError, match="no pipeline 'x'; accepted: endless, late"):
            connection.wait("x")
    finally:
        rlmux.connect(folder).cancel("endless")
        thread.join()
    assert rlmux.open_run(folder).summary["pipelines"]["endless"]["status"] == "cancelled"


def _connected(folder: Path, thread: threading.Thread) -> rlmux.Connection:
    """A connection as soon as the run answers."""

    def connect() -> rlmux.Connection:
        if not thread.is_alive():
            pytest.fail("the run ended before it could be reached")
        return rlmux.connect(folder)

    return until(connect, "an answer of the run", not_yet=(rlmux.UserError, rlmux.RlmuxError))

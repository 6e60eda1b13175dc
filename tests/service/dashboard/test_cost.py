"""What a lane costs: nodes that are held, each once, beside the price without sharing, of a run that is over too."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.log_script import AlternatingRun

from rlmux.log.run_log import LogReader
from rlmux.report.reports import read_timeline
from rlmux.report.timeline.build import exposed
from rlmux.report.timeline.intervals import Kind
from rlmux.report.timeline.run_clock import unix_of
from rlmux.report.usage import UsageSums, Window, add_run

USD = 3.0


@pytest.fixture
def script(monkeypatch):
    made = AlternatingRun(num_steps=12).script
    header = made.header
    for pool in header["pools"].values():
        pool["usd_per_node_hour"] = USD
    monkeypatch.setattr(type(made), "header", header)
    return made


def test_two_that_share_pay_for_their_nodes_once_and_alone_would_pay_twice(script, tmp_path, dashboard):
    folder = script.write(tmp_path / "demo")
    shown = dashboard(folder)
    cost = shown.get("/lanes/demo/cost")
    slowdowns = {row["name"]: row["step_slowdown"] for row in shown.get("/pipelines")["items"]}
    timeline = read_timeline(folder)
    hours = (timeline.end_s - timeline.start_s) / 3600
    assert cost["unit"] == "usd_per_hour"
    ends_s = {name: record.ended_s or timeline.end_s for name, record in script.history().pipelines.items()}
    assert cost["sums"]["paid"] == pytest.approx(2 * USD * max(ends_s.values()) / 3600, rel=1e-9)
    alone_s = sum(end_s / slowdowns[name] for name, end_s in ends_s.items())
    assert cost["sums"]["alone"] == pytest.approx(2 * USD * alone_s / 3600, rel=1e-9)
    assert alone_s < sum(ends_s.values())
    busy_s = sum(
        piece.seconds
        for each in timeline.devices.values()
        for piece in exposed(list(each.intervals))
        if piece.kind is Kind.BUSY
    )
    assert cost["sums"]["computing"] == pytest.approx(USD * busy_s / 3600, rel=0.01)
    assert cost["sums"]["computing"] < cost["sums"]["paid"]
    assert cost["sums"]["paid"] == pytest.approx(2 * USD * hours, rel=1e-9)
    assert len({len(cost[name]) for name in ("x", "paid", "alone", "computing")}) == 1
    assert cost["x"][-1] == pytest.approx(timeline.end_s)


def test_without_prices_devices_are_counted(finished_run, dashboard):
    shown = dashboard(finished_run)
    cost = shown.get("/lanes/demo/cost")
    assert cost["unit"] == "devices"
    assert max(cost["paid"]) == pytest.approx(2.0)
    assert max(cost["alone"]) == pytest.approx(4.0)


def test_a_runs_header_has_its_prices(tmp_path):
    from rlmux.core.model import Cluster, Phase, Pool
    from rlmux.log.run_log import RunLog, run_header

    pool = Pool(name="train", phase=Phase.TRAIN, num_nodes=1, gpus_per_node=8, usd_per_gpu_hour=USD)
    cluster = Cluster(pools={"train": pool, "rollout": dataclasses.replace(pool, name="rollout", phase=Phase.ROLLOUT)})
    RunLog.create(tmp_path / "run", run_header(policy="solo", backend="local", cluster=cluster)).close()
    with LogReader(tmp_path / "run") as log:
        assert log.header["pools"]["train"]["usd_per_node_hour"] == 8 * USD


def test_the_service_charges_a_stretch_of_time_as_the_log_does(script, tmp_path, dashboard):
    folder = script.write(tmp_path / "demo")
    shown = dashboard(folder).get("/usage", since="2d", until="2100-01-01")
    sums = UsageSums(Window(unix_of(shown["since"]), unix_of(shown["until"])))
    add_run(sums, "demo", folder)
    expected = json.loads(json.dumps(sums.to_json()))
    for key, rows in expected["by"].items():
        found = {row[key]: row for row in shown["by"][key]}
        assert found.keys() == {row[key] for row in rows}, key
        for row in rows:
            same = {name: value for name, value in row.items() if isinstance(value, float)}
            assert {name: found[row[key]][name] for name in same} == pytest.approx(same, abs=1e-9), (key, row[key])
    assert shown["total"]["usd"] == pytest.approx(USD * shown["total"]["device_hours"])


def test_a_stretch_of_time_that_is_none_is_refused_in_a_line(finished_run, dashboard):
    answer = dashboard(finished_run).client.get("/usage", params={"since": "yesterday"})
    assert answer.status_code == 400
    assert answer.json()["where"] == "?since"

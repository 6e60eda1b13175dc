"""A run's figures are the same wherever they are told: status, pages, alerts, Prometheus and `summary.json`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.test_what_if import unpacked
from tests.log_script import AlternatingRun, LogScript
from tests.service.dashboard.test_prometheus import of, scraped
from tests.service.pages_server import Pages

from rlmux.log.run_log import LogReader
from rlmux.report.reports import write_report
from rlmux.report.timeline.step_causes import read_step_causes
from rlmux.runtime.control.run_status import StatusReader

TOLD = ("step_slowdown", "slo_slowdown", "keeps_slo", "reward_first", "reward_last", "promise")


def rows_of(name: str, folder: Path) -> LogScript:
    """A scripted run that waits for its environment and loses a worker, or one that was recorded."""
    if name == "scripted":
        return AlternatingRun(num_steps=12, failing="tools").script
    script = LogScript()
    with LogReader(unpacked(name, folder / "recorded")) as log:
        script.rows = list(log.entries())
    return script


@pytest.mark.parametrize("part", [1 / 2, 1.0], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("name", ["scripted", "follow-up.rollmux"])
def test_figures_are_the_same_wherever_they_are_told(tmp_path: Path, name: str, part: float) -> None:
    script = rows_of(name, tmp_path)
    folder = script.write(tmp_path / "demo", int(part * len(script.rows)))
    with closing(StatusReader(folder)) as reader:
        status = reader.read()
    write_report(folder)
    summary = json.loads((folder / "summary.json").read_text())
    with closing(Pages(folder)) as pages:
        rows = {row["name"]: row for row in pages.get("/pipelines")["items"]}
        lane, series = pages.get("/lanes/demo"), scraped(pages)
        alerts = [without_words(one) for one in pages.get("/lanes/demo/alerts")["items"]]
        causes = {one: pages.get(f"/pipelines/demo/{one}/causes", steps=1000) for one in rows}
    assert set(status["pipelines"]) == set(rows) == set(summary["pipelines"])
    assert any(one["step_slowdown"] for one in summary["pipelines"].values())
    for pipeline, one in summary["pipelines"].items():
        for key in TOLD:
            for told in (status["pipelines"][pipeline][key], rows[pipeline][key]):
                assert told == (pytest.approx(one[key], rel=1e-9) if isinstance(one[key], float) else one[key]), key
        assert rows[pipeline]["step_s_mean"] == one["step_s_mean"]
        in_folder = read_step_causes(folder, pipeline)
        assert causes[pipeline]["step_s"] == pytest.approx(one["step_s_mean"])
        assert causes[pipeline]["alone_s"] == (None if in_folder is None else pytest.approx(in_folder.alone_s))
        assert [cause["label"] for cause in causes[pipeline]["causes"]] == (
            [] if in_folder is None else [cause.label for cause in in_folder.causes]
        )
        if rows[pipeline]["status"] == "stopped":
            continue  # a scrape tells of what runs, and of what has ended since
        for gauge, key in (("step_seconds", "step_s_mean"), ("step_slowdown", "step_slowdown")):
            scrape = of(series, f"rlmux_pipeline_{gauge}", pipeline=pipeline)
            assert scrape == pytest.approx(one[key] or 0.0, rel=1e-9), gauge
    assert lane["slo_attainment"] == summary["slo_attainment"]
    assert of(series, "rlmux_slo_kept_ratio") == (summary["slo_attainment"] or 0.0)
    assert [without_words(one) for one in status["alerts"]] == alerts


def without_words(alert: dict[str, Any]) -> tuple[Any, ...]:
    return alert["rule"], alert["level"], alert["pipeline"], alert["step"]

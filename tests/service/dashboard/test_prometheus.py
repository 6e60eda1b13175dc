"""What Prometheus scrapes is what the API says, in a form that its own parser reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.log_script import AlternatingRun, LogScript, append
from tests.service.pages_server import Pages

from rlmux.core.actions import Release
from rlmux.core.events import PipelineFailed
from rlmux.log.run_log import RunLog

COUNTERS = ("rlmux_device_seconds", "rlmux_switches", "rlmux_migrations")


def scraped(pages, **headers):
    """Value by (series, labels)."""
    answer = pages.client.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    read = parse_openmetrics if "openmetrics" in answer.headers["content-type"] else parse
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in read(answer.text)
        for sample in family.samples
    }


def of(series, name, **labels):
    return sum(value for (its, has), value in series.items() if its == name and labels.items() <= set(has))


@pytest.fixture(scope="module")
def pages(finished_run: Path) -> Iterator[Pages]:
    """A run that is over, for tests that change nothing."""
    with closing(Pages(finished_run)) as shown:
        yield shown


def test_a_scrape_says_what_the_lane_says(pages):
    series, lane = scraped(pages), pages.get("/lanes/demo")
    assert of(series, "rlmux_lane_up", lane="demo") == 0
    assert of(series, "rlmux_switches_total") == lane["num_switches"] > 0
    assert of(series, "rlmux_run_seconds") == lane["makespan_s"]
    assert of(series, "rlmux_pipelines", status="finished") == 2
    settled = {kind: of(series, "rlmux_device_seconds_total", kind=kind) for kind in ("busy", "switch", "bubble")}
    assert settled["busy"] > 0
    for kind, seconds in settled.items():
        assert seconds <= lane["seconds"][kind] + 1e-6
    row = pages.get("/pipelines/demo/sort")
    assert of(series, "rlmux_pipeline_step", pipeline="sort") == row["step"]
    assert of(series, "rlmux_pipeline_reward_mean", pipeline="sort") == row["reward_last"]


def test_both_formats_of_prometheus_are_read_by_its_own_parsers(pages):
    plain, open_metrics = scraped(pages), scraped(pages, Accept="application/openmetrics-text; version=1.0.0")
    shared = {key: value for key, value in plain.items() if "http" not in key[0]}
    assert shared == {key: value for key, value in open_metrics.items() if "http" not in key[0]}


def test_counters_only_grow_while_a_run_goes_on_and_over_a_restart_of_the_server(tmp_path, dashboard):
    script = AlternatingRun(num_steps=4).script
    folder, before = tmp_path / "demo", {}
    log = RunLog.create(folder, script.header)
    for at in range(0, len(script.rows), 60):
        append(log, script.rows[at : at + 60])
        log.commit()
        pages = dashboard(folder)
        now = scraped(pages)
        for key, value in before.items():
            if key[0].removesuffix("_total") in COUNTERS:
                assert now[key] >= value, key
        before = now
        pages.close()
    log.close()
    assert of(before, "rlmux_device_seconds_total", kind="busy") > 0


def test_a_pipeline_that_ended_long_ago_has_no_series(tmp_path, dashboard):
    script = AlternatingRun(num_steps=2).script
    script.submit(script.rows[-1].time_s + 1e4, "later")
    pages = dashboard(script.write(tmp_path / "demo"))
    shown = [key for key in scraped(pages) if key[0].startswith("rlmux_pipeline_")]
    assert not shown
    assert of(scraped(pages), "rlmux_pipelines", status="finished") == 2


def test_any_name_of_a_pipeline_is_a_label(tmp_path, dashboard):
    names = ('quote " and \\ and \n line', "{}=,", "\u2028")
    script = LogScript()
    for name in names:
        script.submit(0.0, name)
    for name in names:
        script.event(PipelineFailed(time_s=0.5, pipeline=name, reason="it fell"), Release(pipeline=name))
    series = scraped(dashboard(script.write(tmp_path / "demo")))
    assert [of(series, "rlmux_pipeline_steps_planned", pipeline=name) for name in names] == [2, 2, 2]


def test_the_grafana_file_asks_for_series_that_there_are(pages):
    told = {
        *(family.name for family in parse(pages.client.get("/metrics").text)),
        *(name for name, _ in scraped(pages)),
    }
    file = pages.get("/metrics/grafana.json")
    asked = {
        name
        for panel in file["panels"]
        for target in panel["targets"]
        for name in re.findall(r"rlmux_\w+", target["expr"])
    }
    optional = {f"rlmux_pipeline_{key}" for key in ("kl", "logprob_gap", "response_len_mean")}
    assert asked - optional <= told
    assert len(file["panels"]) == len({panel["id"] for panel in file["panels"]})


def test_a_token_that_may_only_read_metrics_reads_nothing_else(finished_run, dashboard):
    pages = dashboard(finished_run)
    pages.dashboard.access.add_token("scraper", scopes=["metrics"])
    headers = {"Authorization": "Bearer scraper"}
    assert pages.anyone.get(f"{pages.url}/api/v1/metrics", headers=headers).status_code == 200
    assert pages.anyone.get(f"{pages.url}/api/v1/lanes", headers=headers).status_code == 403
    assert pages.anyone.get(f"{pages.url}/api/v1/metrics").status_code == 401

"""From the logs of two jobs to a plan of both on shared pools, in two commands."""

from __future__ import annotations

import json

import pytest

LINE = (
    "(TaskRunner pid=7) step:{step} - timing_s/gen:{gen_s} - timing_s/update_actor:{train_s} - timing_s/step:{step_s}\n"
)


@pytest.fixture
def logs(folder):
    for name, gen_s, train_s in (("a", 80, 50), ("b", 60, 60)):
        lines = [LINE.format(step=step, gen_s=gen_s, train_s=train_s, step_s=gen_s + train_s) for step in (1, 2, 3)]
        (folder / f"{name}.log").write_text("".join(lines), encoding="utf-8")
    return folder


def test_what_is_printed_is_a_file_that_plan_and_simulate_take_as_it_is(rlmux, logs):
    printed = rlmux("estimate", "a.log", "b.log")
    assert (printed.code, printed.err) == (0, "")
    (logs / "jobs.yaml").write_text(printed.out, encoding="utf-8")
    planned = json.loads(rlmux("plan", "jobs.yaml", "--json").out)
    assert {row["pipeline"]: row["status"] for row in planned["pipelines"]} == {"a": "running", "b": "running"}
    assert len({row["group"] for row in planned["pipelines"]}) == 1
    simulated = rlmux("simulate", "jobs.yaml", "--policies", "solo,rollmux", "--json")
    assert simulated.code == 0


def test_json_has_the_same_figures_by_pipeline(rlmux, logs):
    printed = json.loads(rlmux("estimate", "a.log", "b.log", "--name", "both", "--json").out)
    (pipeline,) = printed["pipelines"]
    assert pipeline["name"] == "both"
    assert pipeline["logs"] == ["a.log", "b.log"]
    assert pipeline["estimate"]["rollout_s"] == 60.0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("absent.log",), "rlmux: absent.log: No such file or directory; accepted: "),
        (("a.log", "small.yaml"), "rlmux: small.yaml has no timings of steps; accepted: "),
        (("a.log", "--rollout-s", "0"), "rlmux: --rollout-s 0: accepted: seconds, more than 0"),
        (("a.log", "--rollout-s", "nan"), "rlmux: --rollout-s nan: accepted: seconds, more than 0"),
    ],
)
def test_one_bad_log_is_one_line_with_exit_code_2_and_nothing_is_printed(rlmux, logs, words, complaint):
    said = rlmux("estimate", *words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(complaint)
    assert said.err.count("\n") == 1

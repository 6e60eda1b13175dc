"""What a run measured, as estimates of a plan and beside those of one."""

from __future__ import annotations

import json

import pytest
from tests.small_files import SORT, small_file

from rlmux.core.errors import UserError
from rlmux.profiling.recorded_steps import plan_errors, read_recorded

LEARNED = {
    "source": "learned",
    "rollout_s": 4.0,
    "train_s": 2.0,
    "low": {"rollout_s": 3.0, "train_s": 1.5},
    "high": {"rollout_s": 5.0, "train_s": 2.5},
    "num_steps": 6,
}
TYPED = SORT.replace("}", ", estimate: {rollout_s: 5, train_s: 1}}")


@pytest.fixture
def run_of(tmp_path):
    """`run_of(estimate)`: a folder whose summary has this estimate of pipeline a."""

    def write(estimate):
        (tmp_path / "summary.json").write_text(json.dumps({"pipelines": {"a": {"estimate": estimate}}}))
        return tmp_path

    return write


def test_a_run_gives_its_medians_with_their_ranges_and_its_folder(run_of):
    rollout, train = read_recorded(run_of(LEARNED))["a"].figures
    assert (rollout.seconds, rollout.low, rollout.high, rollout.origin) == (4.0, 3.0, 5.0, "recorded")
    assert (train.seconds, train.basis) == (2.0, f"6 steps of {run_of(LEARNED)}")


@pytest.mark.parametrize(
    "estimate", [None, {"source": "given", "rollout_s": 4.0, "train_s": 2.0}, LEARNED | {"train_s": 0.0}]
)
def test_a_pipeline_that_learned_nothing_of_both_phases_is_absent(run_of, estimate):
    assert read_recorded(run_of(estimate)) == {}


@pytest.mark.parametrize("text", [None, "", "{}", '{"pipelines": 3}'])
def test_a_folder_without_a_summary_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"no summary.json of a run; accepted: the folder of a finished run"):
        read_recorded(tmp_path)


def test_a_plan_is_off_by_planned_over_measured(run_of):
    summary = {"pipelines": {"a": {"estimate": LEARNED}}}
    rollout, train = plan_errors(small_file(TYPED, steps=2), summary, None)
    assert (rollout["origin"], rollout["planned_s"], rollout["measured_s"], rollout["error"]) == (
        "typed",
        5.0,
        4.0,
        0.25,
    )
    assert train["error"] == -0.5
    computed, _ = plan_errors(small_file(SORT, steps=2), summary, None)
    assert computed["origin"] == "roofline"
    assert computed["low_s"] < computed["planned_s"] < computed["high_s"]


def test_a_plan_of_an_unknown_gpu_or_of_pipelines_that_learned_nothing_is_not_compared():
    assert plan_errors(small_file(SORT, steps=2), {"pipelines": {"a": {"estimate": LEARNED}}}, "V100") == []
    assert plan_errors(small_file(SORT, steps=2), {"pipelines": {}}, None) == []

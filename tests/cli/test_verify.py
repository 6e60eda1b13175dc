"""What `rlmux verify` prints of its verdicts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from rlmux.cli import verification
from rlmux.runtime.checks.replay_verification import Difference, Sample, Verdict
from rlmux.runtime.records import folders

EQUAL = Verdict(
    pipeline="a",
    num_equal=61,
    num_steps=61,
    difference=None,
    determinism_class="exact",
    num_equal_by_sum={"checksum": 61, "sha256": 7},
)
OTHER = Verdict(
    pipeline="b",
    num_equal=6,
    num_steps=9,
    difference=Difference(step=7, compared="checksum", logged="b1946ac92492d2347c", alone="4dd1c1e2a0a0a0a0"),
    determinism_class="statistical",
)
STUCK = Verdict(
    pipeline="c",
    num_equal=1,
    num_steps=2,
    difference=Difference(step=2, compared="sha256", logged="b1946ac92492d2347c", alone=None),
    determinism_class="exact",
    reason="reward: KeyError",
)
GAPS = Verdict(
    pipeline="d",
    num_equal=7,
    num_steps=9,
    difference=None,
    determinism_class=None,
    num_equal_by_sum={"checksum": 0, "sha256": 7},
)
SAMPLED = Verdict(
    pipeline="f",
    num_equal=4,
    num_steps=80,
    difference=None,
    determinism_class="exact",
    num_equal_by_sum={"checksum": 4, "sha256": 0},
    sample=Sample(seed=7, parts=(range(1, 4), range(80, 81)), num_reachable=6, num_logged=80),
)
DAMAGED = Verdict(
    pipeline="g",
    num_equal=0,
    num_steps=80,
    difference=Difference(
        step=79, compared="sha256", logged="b1946ac92492d2347c", alone="4dd1c1e2a0a0a0a0", checkpoint="step_79"
    ),
    determinism_class="exact",
    sample=SAMPLED.sample,
)
NOTHING = Verdict(pipeline="e", num_equal=0, num_steps=0, difference=None, determinism_class=None, reason="no hash")


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (EQUAL, "a: equal at all 61 steps (checksum, sha256 at 7)"),
        (
            OTHER,
            "b: differs at step 7 of 9: checksum b1946ac92492 in the log, 4dd1c1e2a0a0 alone; its engines promise "
            "statistical",
        ),
        (STUCK, "c: differs at step 2 of 2: sha256 b1946ac92492 in the log, reward: KeyError alone"),
        (GAPS, "d: equal at 7 steps (sha256); the log has no sum of the other 2"),
        (NOTHING, "e: nothing to compare: no hash"),
        (
            SAMPLED,
            "f: equal at 4 of 80 steps (sample of 1 in 20 from the 6 steps near the start or a kept checkpoint, "
            "seed 7; --all compares every step)",
        ),
        (
            DAMAGED,
            "g: differs at step 79 of 80: sha256 b1946ac92492 in the log, damaged checkpoint step_79: 4dd1c1e2a0a0",
        ),
    ],
    ids=lambda value: value.pipeline if isinstance(value, Verdict) else "",
)
def test_each_verdict_is_one_line(verdict, line, capsys):
    code = verification.show([verdict], as_json=False)
    assert capsys.readouterr().out == line + "\n"
    assert code == (0 if verdict.pipeline in "adf" else 1)


def test_json_says_where_it_differs(capsys):
    assert verification.show([EQUAL, OTHER, SAMPLED], as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["is_equal"] is False
    assert said["pipelines"]["a"] == {
        "is_equal": True,
        "steps_equal": 61,
        "steps": 61,
        "steps_equal_by_sum": {"checksum": 61, "sha256": 7},
        "first_difference": None,
        "promise": "exact",
        "reason": "",
        "sampled_steps": None,
        "seed": None,
        "disturbed_steps": None,
        "sampled_kinds": None,
    }
    assert said["pipelines"]["b"]["first_difference"]["step"] == 7
    assert said["pipelines"]["b"]["first_difference"]["compared"] == "checksum"
    assert (said["pipelines"]["f"]["sampled_steps"], said["pipelines"]["f"]["seed"]) == ([1, 2, 3, 80], 7)


@pytest.mark.parametrize(
    ("words", "sample_seed"), [([], 0), (["--seed", "3"], 3), (["--all"], None), (["--all", "--seed", "3"], None)]
)
def test_the_command_hands_over_names_and_the_seed_of_the_sample(rlmux, monkeypatch, words, sample_seed):
    monkeypatch.setattr(folders, "check_run", lambda folder: None)
    monkeypatch.setattr(verification, "is_hosted", lambda folder: False)
    replay = create_autospec(verification.verify, return_value=[EQUAL])
    monkeypatch.setattr(verification, "verify", replay)
    said = rlmux("verify", "run", "a", *words)
    assert (said.code, said.out) == (0, EQUAL.line() + "\n")
    assert replay.call_args.args[1] == ["a"]
    assert replay.call_args.kwargs["sample_seed"] == sample_seed


FINISHED = {"status": "finished", "promise": "exact", "steps": 80, "step_s_mean": 3.0, "step_slowdown": 1.5}


@pytest.mark.parametrize(
    ("pipelines", "estimate"),
    [
        ([FINISHED], "about 13 s"),
        ([FINISHED, FINISHED | {"steps": 20001, "step_slowdown": None}], "about 3,021 s"),
        ([FINISHED, FINISHED | {"promise": "replayable"}], None),
        ([FINISHED, FINISHED | {"promise": "statistical"}], None),
        ([FINISHED, FINISHED | {"promise": None}], None),
        ([FINISHED, FINISHED | {"status": "cancelled"}], None),
        ([FINISHED, FINISHED | {"score": 0.5}], None),
        ([], None),
    ],
)
def test_the_receipt_line_names_the_command_where_every_pipeline_can_be_verified(pipelines, estimate):
    summary = {"backend": "local", "pipelines": dict(enumerate(pipelines))}
    line = f"receipt: rlmux verify runs/demo ({estimate} without SFT warm-up)"
    assert verification.receipt(summary, Path("runs/demo")) == (line if estimate else "")
    assert verification.receipt(summary | {"backend": "ray"}, Path("runs/demo")) == ""


def test_a_folder_without_a_run_is_a_mistake(rlmux):
    said = rlmux("verify", "nowhere")
    assert (said.code, said.out) == (2, "")
    assert said.err == "rlmux: nowhere: no such folder; accepted: the folder of a run\n"

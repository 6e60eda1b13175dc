"""What is told of a run's steps, samples and alerts is the same of its folder and of a server that shows it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import AlternatingRun, LogScript
from tests.service.pages_server import Pages

from rlmux.cli.main import run_command_line
from rlmux.report.samples import KeptSample, SampleWriter, SpecialTexts


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Two runs: one with samples, one whose reward is the same for all answers from step 3 on."""
    root = tmp_path_factory.mktemp("runs")
    AlternatingRun(num_steps=12).script.write(root / "demo")
    (root / "demo" / "sort").mkdir()
    writer = SampleWriter(root / "demo" / "sort" / "samples.db")
    for step in (1, 2):
        writer.add(step, [sample(0, 0, reward=0.1 * step), sample(0, 1, reward=1.0), sample(1, 0, reward=0.5)])
    writer.close()
    script = LogScript()
    script.submit(0.0, "flat", num_steps=99)
    for step in range(1, 20):
        metrics = {"reward_mean": 0.5, "reward_std": 0.2 if step < 3 else 0.0}
        script.note(float(step), "step", pipeline="flat", step=step, metrics=metrics)
    script.write(root / "ill")
    pages = Pages(root)
    yield pages
    pages.close()


def sample(prompt: int, place: int, *, reward: float) -> KeptSample:
    texts = ("carry the one<end>", "ok<end>")
    special = SpecialTexts(prompt_text="<bos>sort 312", turns=texts, names_by_turn=({},)) if prompt == 0 else None
    return KeptSample(
        prompt=prompt, sample=place, prompt_text="sort 312", turns=[(True, "carry the one"), (False, "ok")],
        reward=reward, advantage=reward - 0.5, stop="stop", tokens=7, num_turns=1, first_version=0, last_version=0,
        special=special,
    )  # fmt: skip


def folder_of(shown: Pages) -> Path:
    return Path(shown.dashboard.token_path).parent


@pytest.fixture
def both(shown: Pages, capsys: Any, monkeypatch: Any) -> Any:
    """Run a command on the folder and on the address; what it printed, which is the same."""
    monkeypatch.setenv("RLMUX_TOKEN", shown.token)

    def run(lane: str, *words: str) -> tuple[int, str, str]:
        found = []
        capsys.readouterr()
        for place in (str(folder_of(shown) / lane), f"{shown.url}/lanes/{lane}"):
            code = run_command_line([words[0], place, *words[1:]])
            found.append((code, *capsys.readouterr()))
        assert found[0][:2] == found[1][:2]
        return found[0]

    return run


def test_trajectories_are_found_and_read(both):
    code, out, _ = both("demo", "samples", "sort", "--step", "2", "--most", "0.6", "--sort", "reward", "--json")
    found = json.loads(out)
    assert [(one["step"], one["prompt"], one["reward"]) for one in found["items"]] == [(2, 0, 0.2), (2, 1, 0.5)]
    assert (found["next"], found["first_step"], found["last_step"]) == (None, 1, 2)
    one = json.loads(both("demo", "samples", "sort", "--at", "2/0/1", "--json")[1])
    assert one["said"][0] == {"role": "model", "text": "carry the one", "is_cut": False}
    assert "environment:\nok" in both("demo", "samples", "sort", "--at", "2/0/1")[1]
    marked = json.loads(both("demo", "samples", "sort", "--at", "2/0/1", "--special-tokens", "--json")[1])
    assert (marked["prompt_text"], marked["said"][0]["text"]) == ("<bos>sort 312", "carry the one<end>")
    assert "environment:\nok<end>" in both("demo", "samples", "sort", "--at", "2/0/1", "--special-tokens")[1]
    assert both("demo", "samples", "sort", "--text", "carry the two")[1] == "no trajectory meets that\n"
    assert code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["samples", "nobody"], "no pipeline 'nobody'; accepted: sort, tools"),
        (["samples", "tools"], "no trajectories of tools were kept"),
        (["samples", "sort", "--at", "1/2"], "--at '1/2': accepted: STEP/PROMPT/SAMPLE"),
        (["samples", "sort", "--at", "9/9/9"], "this trajectory was not kept"),
        (["samples", "sort", "--special-tokens"], "--special-tokens: accepted: with --at STEP/PROMPT/SAMPLE"),
        (
            ["samples", "sort", "--at", "2/1/0", "--special-tokens"],
            "special tokens of this trajectory were not kept; accepted: a run of this version",
        ),
        (["samples", "sort", "--sort", "size"], "--sort 'size': accepted: step, -step"),
        (["export", "nobody"], "no pipeline 'nobody'; accepted: sort, tools"),
        (["why", "nobody"], "no pipeline 'nobody'; accepted: sort, tools"),
        (["export", "--to", "xml"], "--to 'xml': accepted: jsonl, csv, wandb, mlflow, trackio, hf"),
        (["alerts", "--ack", "kl_huge"], "no alert 'kl_huge' fires; accepted: none fires"),
    ],
)
def test_a_mistake_is_one_line(both, words, line):
    code, _, said = both("demo", *words)
    assert code == 2
    assert line in said
    assert said.count("\n") == 1


def test_a_pipeline_that_is_over_is_told_where_the_time_of_its_steps_went(both):
    code, out, _ = both("demo", "why", "sort")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "sort is finished: it does not wait"
    assert "as long as alone (mean of 11 steps):" in lines[1]
    assert lines[3].startswith("alone ")
    assert any(line.startswith("waited for a device that tools had (generate)") for line in lines)
    found = json.loads(both("demo", "why", "sort", "--json")[1])["steps"]
    parts = [found["alone_s"], *(one["seconds"] for one in found["causes"])]
    assert sum(parts) == pytest.approx(found["step_s"])


def test_the_table_of_steps_is_the_apis_and_a_file_gets_each_step_once(both, shown, tmp_path, monkeypatch):
    rows = [json.loads(line) for line in both("demo", "export")[1].splitlines()]
    assert [row for row in rows if row["pipeline"] == "sort"] == [
        {"pipeline": "sort", **row} for row in shown.get("/pipelines/demo/sort/steps")["items"]
    ]
    for to in ("jsonl", "csv"):
        out = tmp_path / f"steps.{to}"
        words = ["export", str(folder_of(shown) / "demo"), "--to", to, "--out", str(out)]
        assert run_command_line([*words, "sort"]) == 0
        whole = out.read_bytes()
        out.write_bytes(whole[: 2 * len(whole) // 3])  # the writer was killed in the middle of a row
        assert run_command_line(words) == 0
        text = out.read_text().splitlines()
        kept = [json.loads(line) for line in text] if to == "jsonl" else list(csv.DictReader(text))
        places = [(row["pipeline"], int(row["step"])) for row in kept]
        assert sorted(places) == sorted((row["pipeline"], row["step"]) for row in rows)
        assert len(set(places)) == len(places)
    assert run_command_line(["export", str(folder_of(shown) / "demo"), "--to", "jsonl", "--out", str(out)]) == 2


def test_a_table_that_was_begun_without_checksums_goes_on_with_its_own_columns(shown, tmp_path):
    words, out = ["export", str(folder_of(shown) / "demo"), "--to", "csv", "--out"], tmp_path / "steps.csv"
    assert run_command_line([*words, str(out)]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    columns = [name for name in rows[0] if name != "weights_checksum"]
    with (tmp_path / "old.csv").open("w", newline="") as file:
        old = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        old.writeheader()
        old.writerows(rows[:3])
    assert run_command_line([*words, str(tmp_path / "old.csv")]) == 0
    kept = list(csv.DictReader((tmp_path / "old.csv").read_text().splitlines()))
    assert kept == [{name: row[name] for name in columns} for row in rows]


def test_an_alert_is_seen_once_and_for_all(both, shown):
    (before,) = json.loads(both("ill", "alerts", "--json")[1])["alerts"]
    assert (before["rule"], before["step"], before["acknowledged"]) == ("no_signal", 3, None)
    assert "warning: no_signal flat since step 3" in both("ill", "alerts")[1]
    assert run_command_line(["alerts", f"{shown.url}/lanes/ill", "--ack", "no_signal", "--pipeline", "flat"]) == 0
    (after,) = json.loads(both("ill", "alerts", "--json")[1])["alerts"]
    assert after["acknowledged"]["by"]
    assert "(seen by" in both("ill", "alerts")[1]
    assert shown.get("/lanes/ill/alerts")["items"] == [after]
    assert shown.client.post("/lanes/ill/alerts", json={"rule": 3}).status_code == 400


def test_the_queue_of_a_run_that_is_over_is_refused(both):
    assert both("demo", "queue")[0] == 2

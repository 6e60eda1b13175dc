"""Steps go into other people's trackers once each, whatever ended an export; one that is absent or broken is a line."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.log_script import AlternatingRun, append

import rlmux
from rlmux.cli.main import run_command_line
from rlmux.client import trackers
from rlmux.client.trackers import TRACKERS, RunOrigin, figures_of
from rlmux.log.notes import EndNote
from rlmux.log.run_log import RunLog
from rlmux.report.timeline.step_rows import read_step_rows

NUM_STEPS = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two pipelines that is over."""
    return AlternatingRun(num_steps=NUM_STEPS).script.write(tmp_path / "demo")


def export(folder: Path, to: str, out: Path, *words: str) -> int:
    return run_command_line(["export", str(folder), *words, "--to", to, "--out", str(out)])


def test_a_step_has_the_names_of_its_tensorboard_events_and_its_seconds(folder):
    row = read_step_rows(folder)["sort"][2]
    figures = figures_of({**row, "metrics": {**row["metrics"], "tokens": 100, "kl": None, "loss": math.nan}})
    assert figures["reward/mean"] == row["metrics"]["reward_mean"]
    assert figures["rollout/tokens"] == 100
    assert figures["perf/tokens_per_s"] == 100 / row["seconds"]
    assert (figures["perf/step_s"], figures["time/end_s"]) == (row["seconds"], row["end_s"])
    assert {name for name in figures if name.startswith("time/")} == {
        "time/end_s",
        *(f"time/{stage}_s" for stage in row["stages"]),
    }
    assert math.isnan(figures["train/loss"])
    assert "train/kl" not in figures


def test_a_pipeline_of_a_run_has_one_id_for_good():
    made = [RunOrigin(run, "2026-11-23T10:00:00+00:00", name, {}) for run in ("r", "s") for name in ("a", "b")]
    assert len({one.id for one in made}) == 4
    assert all(one.id.isalnum() and one.id == one._replace(config={"a": 1}).id for one in made)
    assert made[0].time_ms(1.5) - made[0].time_ms(0.0) == 1500


@pytest.mark.parametrize("to", TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_in_a_line_with_what_to_install(
    folder, to, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert export(folder, to, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"--to {to}: it is not installed; accepted: pip install " in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_fails_is_a_line_and_no_traceback(folder, tmp_path):
    """The library is a module of the test, in a process of its own: what counts is what becomes of its error."""
    (tmp_path / "wandb.py").write_text("def Settings(**_): raise RuntimeError('no space left\\nand more')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path(rlmux.__file__).parents[1])])
    asked = subprocess.run(
        command(folder, "wandb", tmp_path / "out"),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    line = "wandb failed, and what it has of the run stays as it is: no space left"
    assert (asked.returncode, asked.stdout, asked.stderr) == (1, "", f"rlmux: {line}\n")


def installed(to: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(to) is None, reason=f"needs {to}")


@pytest.mark.slow
@pytest.mark.parametrize("to", [pytest.param(to, marks=installed(to)) for to in TRACKERS])
def test_each_step_is_in_the_trackers_files_once(to, tmp_path):
    """Exported twice in the middle of the run, killed in a third export, and exported when it is over."""
    script, out = AlternatingRun(num_steps=NUM_STEPS).script, tmp_path / "out"
    half = len(script.rows) // 2
    folder = script.write(tmp_path / "demo", half)
    for _ in range(2):
        assert export_apart(folder, to, out) == 0
    some = READ[to](out)
    assert 2 <= len(some) < 2 * NUM_STEPS
    with RunLog.open(folder) as log:
        append(log, script.rows[half:])
    killed = subprocess.Popen(command(folder, to, out), env=environment(out), stderr=subprocess.DEVNULL)
    try:
        killed.wait(2.5)
    except subprocess.TimeoutExpired:
        killed.kill()
        killed.wait()
    assert export_apart(folder, to, out) == 0
    expected = {
        (name, row["step"]): row["metrics"]["reward_mean"]
        for name, rows in read_step_rows(folder).items()
        for row in rows
    }
    found = READ[to](out)
    assert Counter((name, step) for name, step, _ in found) == Counter(expected.keys())
    assert {(name, step): value for name, step, value in found} == pytest.approx(expected)


def command(folder: Path, to: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "rlmux", "export", str(folder), "--to", to, "--out", str(out)]


def environment(out: Path) -> dict[str, str]:
    return {**os.environ, "TRACKIO_DIR": str(out)}


def export_apart(folder: Path, to: str, out: Path) -> int:
    """In a process of its own, as a user does: trackio reads its folder when it is imported."""
    return subprocess.run(command(folder, to, out), env=environment(out), timeout=120, check=False).returncode


Read = list[tuple[str, int, float]]
"""(pipeline, step, mean reward) of what a tracker's files have."""


def read_wandb(out: Path) -> Read:
    from wandb.proto import wandb_internal_pb2 as wire

    found: Read = []
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        name = ""
        for data in records(path.read_bytes()):
            record = wire.Record.FromString(data)
            if record.HasField("run"):
                name = record.run.display_name.rpartition("-")[0]
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                found.append((name, int(items["_step"]), json.loads(items["reward/mean"])))
    return found


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B: blocks of 32 KiB with pieces in them, after a head of seven bytes.

    The form is that of LevelDB's log (google/leveldb, doc/log_format.md).
    """
    at, begun = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + 7 : at + 7 + size]
        begun = piece if kind in (1, 2) else begun + piece
        if kind in (1, 4):
            yield begun
        at += 7 + size


def read_mlflow(out: Path) -> Read:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=out.as_uri())
    runs = client.search_runs([client.get_experiment_by_name("rlmux").experiment_id])
    return [
        (run.data.tags["rlmux.pipeline"], metric.step, metric.value)
        for run in runs
        for metric in client.get_metric_history(run.info.run_id, "reward/mean")
    ]


def read_trackio(out: Path) -> Read:
    copied = out.with_name("read")
    shutil.copytree(out, copied, dirs_exist_ok=True)
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S;"
        "print(json.dumps([[run.rpartition('-')[0], row['step'], row['reward/mean']]"
        " for run in S.get_runs('rlmux') for row in S.get_logs('rlmux', run)]))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], env=environment(copied), capture_output=True, text=True, check=True
    )
    return [(name, step, value) for name, step, value in json.loads(said.stdout.splitlines()[-1])]


READ = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.mark.slow
@pytest.mark.parametrize("to", [pytest.param(to, marks=installed(to)) for to in ("wandb", "mlflow")])
def test_a_followed_run_has_each_step_once_when_it_is_over(to, tmp_path):
    """The follower is killed in the middle and begins again; the run ends while it lives."""
    script = AlternatingRun(num_steps=NUM_STEPS).script
    half = len(script.rows) // 2
    folder = script.write(tmp_path / "demo", half)
    out = folder if to == "wandb" else folder / "mlruns"
    words = [sys.executable, "-m", "rlmux", "export", str(folder), "--to", to, "--follow"]
    with RunLog.open(folder) as log:
        killed = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while not out.is_dir() or not any(out.rglob("*")):
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
        killed.wait()
        follower = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        append(log, script.rows[half:])
        log.append_note(log.last_time_s, EndNote(pipelines={}, control_s=0.0))
        log.commit()
        assert follower.wait(120) == 0
        assert "steps written to" in follower.stderr.read()
        follower.stderr.close()
    expected = Counter((name, row["step"]) for name, rows in read_step_rows(folder).items() for row in rows)
    assert Counter((name, step) for name, step, _ in READ[to](out)) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "jsonl"], "--follow with --to jsonl: accepted: wandb, mlflow, trackio"),
        (["--to", "hf"], "--follow with --to hf: accepted: wandb, mlflow, trackio"),
    ],
)
def test_only_a_tracker_is_followed(folder, words, said, capsys):
    assert run_command_line(["export", str(folder), "--follow", *words]) == 2
    assert said in capsys.readouterr().err

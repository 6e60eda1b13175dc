"""A run that is backed up while it trains, restored elsewhere and resumed ends with the weights of the run itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.command_line import command
from tests.runtime.killed_runs import weights
from tests.small_files import REVERSE, SORT, small_file
from tests.waiting import until

from rlmux.runtime.control.backup import back_up

STEPS = 80


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.slow
def test_a_run_restored_from_a_backup_of_its_training_ends_with_the_same_weights(tmp_path):
    file, run = tmp_path / "two.yaml", tmp_path / "run"
    file.write_text(small_file(SORT, REVERSE, steps=STEPS))
    process = subprocess.Popen(
        command("run", str(file), "--out", str(run)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    backups, seqs = [tmp_path / f"backup{number}" for number in (10, 30, 50)], []
    for backup in backups:
        num_steps = int(backup.name.removeprefix("backup"))
        until(
            lambda num_steps=num_steps: num_lines(run / "a" / "metrics.jsonl") >= num_steps,
            f"step {num_steps}",
            limit_s=300.0,
            process=process,
        )
        seqs.append(back_up(run, backup).logs["."]["last_seq"])
    assert process.poll() is None, "the run was over before its last backup"
    assert process.wait() == 0
    undisturbed = weights(run)
    lines = {name: num_lines(run / name / "metrics.jsonl") for name in "ab"}
    run.rename(tmp_path / "gone")
    for backup in backups:
        again = tmp_path / f"again-{backup.name}"
        subprocess.run(command("restore", str(backup), "--to", str(again)), check=True, capture_output=True)
        subprocess.run(command("resume", str(again)), check=True, capture_output=True)
        assert weights(again) == undisturbed
        assert {name: num_lines(again / name / "metrics.jsonl") for name in "ab"} == lines
    assert seqs == sorted(set(seqs)), "each backup is of another moment"
    shutil.rmtree(tmp_path / "gone")

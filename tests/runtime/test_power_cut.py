"""A power cut takes the log's newest commits, or checkpoints, as if they had never been: the same weights.

The images are copies of a run's folder, taken while it trains, with what had not reached the disk cut off.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines

STEPS = 6
CUT_AT = 4


@pytest.fixture(scope="module")
def pair(real):
    return [
        real.submission("sort", seed=1, num_steps=STEPS),
        real.submission("tool", seed=2, num_steps=STEPS, task="calculator", staleness=1),
    ]


class TakesImage:
    """Copies a folder, once both pipelines have published a step: the log and its tail in `run.db-wal`."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self.image = folder, image
        self.steps: dict[str, int] = {}
        self.early_bytes = 0
        """Bytes of the tail before any pipeline had published its second step; by the image all have its checkpoint."""

    def update(self, now_s, events, actions, notes) -> None:
        for note in notes:
            if note.type == "step":
                self.steps[note.pipeline] = note.step
        if max(self.steps.values(), default=0) < 2:
            self.early_bytes = (self.folder / "run.db-wal").stat().st_size
        if len(self.steps) == 2 and min(self.steps.values()) >= CUT_AT and not self.image.exists():
            with contextlib.suppress(shutil.Error):  # a checkpoint is written meanwhile
                shutil.copytree(self.folder, self.image)
            (self.image / "run.db-shm").unlink()


@pytest.fixture(scope="module")
def taken(real, pair, tmp_path_factory):
    """(weights of the run that was left alone, image, bytes of its log's tail before the first second step)"""
    base = tmp_path_factory.mktemp("cut")
    takes_image = TakesImage(base / "run", base / "image")
    options = RunOptions(listeners=[takes_image])
    result = run_pipelines(real.cluster(), pair, make_policy("rollmux"), base / "run", options, spec={})
    return weights(result.summary), base / "image", takes_image.early_bytes


def weights(summary) -> dict[str, str]:
    return {name: one["weights_sha256"] for name, one in summary["pipelines"].items()}


def last_logged_step(folder: Path, pipeline: str) -> int:
    with LogReader(folder) as reader:
        steps = [entry.value for entry in reader.entries() if entry.type == "step"]
    return max([fields["step"] for fields in steps if fields["pipeline"] == pipeline], default=0)


def newest_checkpoint(folder: Path, pipeline: str) -> int:
    steps = [int(path.name[5:]) for path in (folder / pipeline).glob("step_*") if path.name[5:].isdigit()]
    return max(steps, default=0)


def resume(real, pair, folder: Path) -> dict[str, str]:
    result = resume_pipelines(real.cluster(), pair, make_policy("rollmux"), folder)
    assert result.is_complete
    assert {one["status"] for one in result.summary["pipelines"].values()} == {"finished"}
    return weights(result.summary)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_checkpoints_may_be_newer_than_the_log(real, pair, taken, tmp_path, kept):
    """With nothing of its tail kept, the log is its header: all that was ever waited for."""
    undisturbed, image, early_bytes = taken
    folder = tmp_path / "run"
    shutil.copytree(image, folder)
    tail = folder / "run.db-wal"
    size = int(early_bytes * kept)
    tail.write_bytes(tail.read_bytes()[:size])
    for name in ("sort", "tool"):
        assert last_logged_step(folder, name) < newest_checkpoint(folder, name), "nothing was lost"
    assert resume(real, pair, folder) == undisturbed


@pytest.mark.slow
def test_the_log_may_be_newer_than_the_checkpoints(real, pair, taken, tmp_path):
    undisturbed, image, _ = taken
    folder = tmp_path / "run"
    shutil.copytree(image, folder)
    for name in ("sort", "tool"):
        last = last_logged_step(folder, name)
        for step in range(last, STEPS + 1):  # one may have been written before its step could be logged
            for path in (folder / name).glob(f"step_{step}*"):
                shutil.rmtree(path)
        assert last > newest_checkpoint(folder, name)
    assert resume(real, pair, folder) == undisturbed


def test_both_may_be_behind_what_was_done(real, pair, taken, tmp_path):
    """The log is its header, and one pipeline has no checkpoint at all: it begins again."""
    undisturbed, image, _ = taken
    folder = tmp_path / "run"
    shutil.copytree(image, folder)
    (folder / "run.db-wal").write_bytes(b"")
    shutil.rmtree(folder / "sort")
    assert resume(real, pair, folder) == undisturbed

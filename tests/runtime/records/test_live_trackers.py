"""A tracker's process is started with the run, started again where it ends early, and waited for at the end."""

from __future__ import annotations

import sys
from pathlib import Path

from rlmux.runtime.records.live_trackers import OUTPUT_NAME, LiveTrackers


def program(folder: Path, text: str) -> list[str]:
    """What stands in for the command line: a script that gets its words."""
    path = folder / "program.py"
    path.write_text(f"import sys, pathlib\nfolder = pathlib.Path(sys.argv[2])\n{text}\n")
    return [sys.executable, str(path)]


def test_each_tracker_is_exported_as_it_goes_and_its_output_is_kept(tmp_path):
    trackers = LiveTrackers(tmp_path, ["wandb", "mlflow"], program(tmp_path, "print(*sys.argv[1:])"))
    assert trackers.finish() == {}
    lines = sorted((tmp_path / OUTPUT_NAME).read_text().splitlines())
    assert lines == [f"export {tmp_path} --to {to} --follow" for to in ("mlflow", "wandb")]


def test_one_that_ends_early_is_started_again_later_and_later(tmp_path):
    trackers = LiveTrackers(tmp_path, ["wandb"], program(tmp_path, "print('begun', flush=True); sys.exit(3)"))

    def num_begun() -> int:
        return (tmp_path / OUTPUT_NAME).read_text().count("begun")

    (feed,) = trackers._feeds
    for now_s, expected in ((10.0, 1), (12.0, 1), (20.0, 2), (30.0, 2), (36.0, 2), (50.0, 3)):
        feed.process.wait()
        trackers.update(now_s, (), (), ())
        feed.process.wait()
        assert num_begun() == expected, now_s


def test_the_end_says_which_tracker_lacks_steps_and_where_the_reason_is(tmp_path):
    trackers = LiveTrackers(tmp_path, ["wandb"], program(tmp_path, "print('no space left'); sys.exit(1)"))
    assert trackers.finish() == {"wandb": f"has not got every step; {tmp_path / OUTPUT_NAME} has the reason"}
    assert "no space left" in (tmp_path / OUTPUT_NAME).read_text()

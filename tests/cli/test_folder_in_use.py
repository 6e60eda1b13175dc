"""A run's folder belongs to one process for the run's life; another that wants it is refused, and told which."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.waiting import until

from rlmux.log.folder_lock import FolderInUseError, FolderLock
from rlmux.runtime.records import folders

LIMIT_S = 200


def end(process: subprocess.Popen[str], number: signal.Signals | None = None) -> tuple[int, str, str]:
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


@pytest.fixture
def going(folder: Path, start) -> subprocess.Popen[str]:
    """A run in the folder `one` that has trained a step."""
    process = start("run", "long.yaml", "--out", "one")
    until((folder / "one" / "a" / "metrics.jsonl").exists, "a step of `a`", limit_s=LIMIT_S, process=process)
    return process


def num_steps(folder: Path) -> int:
    return len((folder / "one" / "a" / "metrics.jsonl").read_text().splitlines())


def test_a_live_run_is_neither_overwritten_nor_resumed_and_its_pid_is_told(folder, going, rlmux):
    inode = (folder / "one").stat().st_ino
    for words in (["run", "long.yaml", "--out", "one", "--overwrite"], ["resume", "one"]):
        said = rlmux(*words)
        assert said.code == 2, said.err
        assert said.err.startswith("rlmux: one: another process is writing here: pid "), said.err
        assert f"pid {going.pid};" in said.err
        assert said.err.count("\n") == 1
    before = num_steps(folder)
    until(lambda: num_steps(folder) > before, "one more step of `a`", limit_s=LIMIT_S, process=going)
    code, _, err = end(going, signal.SIGINT)
    assert code == 130, err
    assert (folder / "one").stat().st_ino == inode
    assert json.loads((folder / "one" / "summary.json").read_text())["pipelines"]["a"]["steps"] >= before


@pytest.mark.slow
def test_a_run_whose_process_was_killed_may_be_overwritten_at_once(folder, going, start):
    end(going, signal.SIGKILL)
    process = start("run", "long.yaml", "--out", "one", "--overwrite", "--json", "--set", "pipelines.a.steps=3")
    code, out, err = end(process)
    assert code == 0, err
    assert json.loads(out)["pipelines"]["a"]["steps"] == 3
    assert not (folder / "one" / "a" / "step_4").exists()


@pytest.mark.slow
def test_a_live_comparison_is_not_overwritten(folder, start, rlmux):
    process = start("compare", "long.yaml", "--policies", "solo,rollmux", "--out", "both")
    until((folder / "both" / "solo" / "run.db").exists, "the first run's log", limit_s=LIMIT_S, process=process)
    said = rlmux("compare", "long.yaml", "--out", "both", "--overwrite")
    assert (said.code, f"pid {process.pid};" in said.err) == (2, True), said.err


@pytest.mark.parametrize(
    "how", ["moved", *(pytest.param(how, marks=pytest.mark.slow) for how in ("removed", "log removed"))]
)
def test_a_run_whose_folder_goes_away_does_not_promise_that_it_can_be_resumed(folder, going, how):
    if how == "removed":
        while (folder / "one").exists():
            shutil.rmtree(folder / "one", ignore_errors=True)  # workers make and remove files meanwhile
    elif how == "log removed":
        (folder / "one" / "run.db").unlink()
    else:
        (folder / "one").rename(folder / "two")
    code, _, err = end(going)
    last = err.strip().splitlines()[-1]
    assert code == 1, err
    assert "Traceback" not in err
    if how == "moved":
        assert last.endswith(f"resume the run there: rlmux resume {folder / 'two'}")
    else:
        assert "nothing that was finished is lost" not in err
        assert "it cannot be resumed" in last
    if how == "removed":
        assert not (folder / "one").exists(), "no checkpoint brings the folder back"


def test_commands_that_start_in_the_same_second_get_folders_of_their_own(folder):
    num = 8
    start_together, all_are_in = threading.Barrier(num), threading.Barrier(num)

    def choose(_: int) -> Path:
        start_together.wait()
        with folders.chosen(None, "long-rollmux") as chosen:
            all_are_in.wait()
            (chosen / "run.db").touch()
        return chosen

    with ThreadPoolExecutor(num) as pool:
        chosen = list(pool.map(choose, range(num)))
    assert len(set(chosen)) == num
    assert all((path / "run.db").exists() for path in chosen), "a folder with a run in it stays"
    assert all(re.fullmatch(r"long-rollmux-\d{8}-\d{6}(-\d)?", path.name) for path in chosen)


def test_a_mistake_leaves_no_folder_behind(folder, rlmux):
    said = rlmux("run", "small.yaml", "--address", "here:1")
    assert said.code == 2
    assert not (folder / "runs").exists()


def test_the_lock_ends_with_its_process_and_a_stale_signature_names_no_process(folder):
    (folder / "one").mkdir()
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from pathlib import Path; from rlmux.log.folder_lock import FolderLock\n"
            "lock = FolderLock.take(Path('one')); lock.sign(); print('held', flush=True); input()",
        ],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(FolderInUseError, match=f"pid {child.pid};"):
        FolderLock.take(Path("one"))
    child.kill()
    child.communicate()
    with FolderLock.take(Path("one")) as lock, pytest.raises(FolderInUseError) as refused:
        FolderLock.take(Path("one"))  # `lock` has not signed, and the killed one's signature is still there
    assert str(child.pid) not in str(refused.value)
    assert os.path.exists("one")
    lock.release()

"""Checks of prompts and rewards before anything starts, the user's code in a process of its own.

    pipelines without code of the user ──▶ rl.preflight, here
    the others ──pickle──▶ child: rl.preflight ──JSON lines──▶ complaints
                              {"index": 1, "is_user_code": true}     the time limit begins
                              {"index": 1, "complaint": null}        the next pipeline

A child that hangs where no alarm reaches it, or that ends early, is a complaint about the pipeline under way. What the
user's code prints is dropped.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlmux.rl.config import TrainingConfig
from rlmux.rl.preflight import calls_user_code, complaint_about

_GRACE_S = 2.0
"""Seconds beyond a pipeline's own time limit, whose alarm ends most calls that hang."""
_PATIENCE_S = 40.0
"""Longest wait for a reward on its sample. A reward that may take longer, and does, is left to the run."""

_CHILD = "import sys; sys.path[:] = sys.argv[2:]; from rlmux.cli import preflight; preflight.serve(int(sys.argv[1]))"


def complaints_about(configs: Sequence[TrainingConfig], code_folder: Path) -> list[str | None]:
    """The first thing, for each pipeline, that is wrong with its prompts or its reward; None where all is well.

    `code_folder`: the folder of reward modules.
    """
    complaints = [None if calls_user_code(config) else complaint_about(config) for config in configs]
    asked = [index for index, config in enumerate(configs) if calls_user_code(config)]
    if asked and not any(complaints):
        found = _ask_child([configs[index] for index in asked], code_folder)
        for index, complaint in zip(asked, found, strict=True):
            complaints[index] = complaint
    return complaints


def serve(report: int) -> None:
    """The child's side: reads pipelines from stdin, writes events to the file descriptor `report`."""

    def tell(**event: Any) -> None:
        os.write(report, json.dumps(event).encode() + b"\n")

    try:
        for index, config in enumerate(pickle.load(sys.stdin.buffer)):
            complaint = complaint_about(config, partial(tell, index=index, is_user_code=True))
            tell(index=index, complaint=complaint)
    except Exception:
        tell(crash=traceback.format_exc())
    os._exit(0)  # whatever the user's code left running ends here


def _ask_child(configs: Sequence[TrainingConfig], code_folder: Path) -> list[str | None]:
    """Every complaint up to the first, as the child finds them."""
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(writer), str(code_folder), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
    try:
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin as stdin:
            stdin.write(pickle.dumps(list(configs)))
        return _complaints(_Events(reader), configs, child)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        os.close(reader)


def _complaints(events: _Events, configs: Sequence[TrainingConfig], child: subprocess.Popen[bytes]) -> list[str | None]:
    complaints: list[str | None] = [None] * len(configs)
    done, limit_s = 0, None
    while done < len(configs) and not any(complaints):
        task = configs[done].task
        try:
            event = events.next(limit_s)
        except TimeoutError:
            if task.reward_timeout_s > _PATIENCE_S:
                break
            text = f"did not return within {task.reward_timeout_s:g} s (task.reward_timeout_s)"
            complaints[done] = f"task.reward: reward {task.reward} on a sample {text}"
            break
        except EOFError:
            code = child.wait()
            what = "task: reading its prompts" if limit_s is None else f"task.reward: reward {task.reward} on a sample"
            complaints[done] = f"{what} ended its process (exit code {code})"
            break
        if "crash" in event:
            raise RuntimeError(event["crash"])
        limit_s = min(task.reward_timeout_s, _PATIENCE_S) + _GRACE_S if "is_user_code" in event else None
        if "complaint" in event:
            complaints[done] = event["complaint"]
            done += 1
    return complaints


class _Events:
    """JSON lines from a pipe, each waited for with a time limit."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._bytes = b""

    def next(self, limit_s: float | None) -> dict[str, Any]:
        """The next event. Raises TimeoutError after `limit_s` seconds, EOFError at the end of the pipe."""
        due_s = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._bytes:
            left_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            if not select.select([self._reader], [], [], left_s)[0]:
                raise TimeoutError
            read = os.read(self._reader, 65536)
            if not read:
                raise EOFError
            self._bytes += read
        line, _, self._bytes = self._bytes.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

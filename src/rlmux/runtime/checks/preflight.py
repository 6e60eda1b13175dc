"""Checks of prompts and rewards before anything starts, the user's code in a process of its own.

    pipelines without code of the user ──▶ rl.preflight, here
    the others ──pickle──▶ child: rl.preflight ──JSON lines──▶ complaints
                              {"index": 1, "user_code": "reward"}     the time limit begins
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlmux.rl.config import TaskConfig, TrainingConfig
from rlmux.rl.user_code.reward_preflight import calls_user_code, complaint_about

_GRACE_S = 2.0
"""Seconds beyond a pipeline's own time limit, whose alarm ends most calls that hang."""
_PATIENCE_S = 40.0
"""Default limit in seconds for a reward on its sample."""
_SILENCE_S = 3.0
"""Seconds of waiting before a message on stderr."""

_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from rlmux.runtime.checks import preflight; preflight.serve(int(sys.argv[1]))"
)


def complaints_about(
    configs: Sequence[TrainingConfig], code_folder: Path, patience_s: float = _PATIENCE_S
) -> list[str | None]:
    """The first thing, for each pipeline, that is wrong with its prompts or its reward; None where all is well.

    `code_folder`: the folder of reward modules. `patience_s`: longest wait, in seconds, for a reward on its sample. A
    reward that may take longer, and does, is left to the run.
    """
    complaints = [None if calls_user_code(config) else complaint_about(config) for config in configs]
    checked = [index for index, config in enumerate(configs) if calls_user_code(config)]
    while checked and not any(complaints):
        found = _check_in_child([configs[index] for index in checked], code_folder, patience_s)
        for index, complaint in zip(checked, found, strict=False):
            complaints[index] = complaint
        checked = checked[len(found) :]
    return complaints


def serve(report: int) -> None:
    """The child's side: reads pipelines from stdin, writes events to the file descriptor `report`."""

    def emit(**event: Any) -> None:
        os.write(report, json.dumps(event).encode() + b"\n")

    try:
        for index, config in enumerate(pickle.load(sys.stdin.buffer)):
            complaint = complaint_about(config, partial(_emit_key, emit, index))
            emit(index=index, complaint=complaint)
    except Exception:  # a fault of ours: the parent raises it, this process has no stderr to print it on
        emit(crash=traceback.format_exc())
    os._exit(0)  # whatever the user's code left running ends here


def _emit_key(emit: Callable[..., None], index: int, key: str) -> None:
    emit(index=index, user_code=key)


def _check_in_child(configs: Sequence[TrainingConfig], code_folder: Path, patience_s: float) -> list[str | None]:
    """Complaints about the first pipelines, at least one: up to the first complaint, or to a reward left to the run."""
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
        return _complaints(_Events(reader), configs, child, patience_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        os.close(reader)


def _complaints(
    events: _Events, configs: Sequence[TrainingConfig], child: subprocess.Popen[bytes], patience_s: float
) -> list[str | None]:
    complaints: list[str | None] = []
    key: str | None = None  # of the user's code that is being called
    while len(complaints) < len(configs) and not any(complaints):
        task = configs[len(complaints)].task
        limit_s = min(task.reward_timeout_s + _GRACE_S, patience_s)
        try:
            event = _next_of_user(events, _named(task, key), limit_s) if key else events.next(None)
        except TimeoutError:
            complaints.append(_complaint_about_time(task, key or "reward", limit_s))
            break
        except EOFError:
            code = child.wait()
            what = f"task.{key}: {_named(task, key)}" if key else "task: reading its prompts"
            complaints.append(f"{what} ended its process (exit code {code})")
            break
        if "crash" in event:
            raise RuntimeError(event["crash"])
        key = event.get("user_code")
        if "complaint" in event:
            complaints.append(event["complaint"])
    return complaints


def _next_of_user(events: _Events, what: str, limit_s: float) -> dict[str, Any]:
    """The next event; long waits are reported on stderr. Raises TimeoutError after `limit_s` seconds."""
    try:
        return events.next(min(limit_s, _SILENCE_S))
    except TimeoutError:
        if limit_s <= _SILENCE_S:
            raise
    print(f"rlmux: waiting for {what}, at most {limit_s:g} s", file=sys.stderr)
    return events.next(limit_s - _SILENCE_S)


def _named(task: TaskConfig, key: str) -> str:
    return f"{'task' if key == 'name' else key} {getattr(task, key)} on a sample"


def _complaint_about_time(task: TaskConfig, key: str, waited_s: float) -> str | None:
    """None for code that may take longer: the run waits for it."""
    if task.reward_timeout_s > waited_s:
        print(
            f"rlmux: {key} {getattr(task, key)} takes over {waited_s:g} s on a sample; it was not checked",
            file=sys.stderr,
        )
        return None
    text = f"did not return within {task.reward_timeout_s:g} s (task.reward_timeout_s)"
    return f"task.{key}: {_named(task, key)} {text}"


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

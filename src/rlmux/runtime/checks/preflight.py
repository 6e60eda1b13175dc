"""Checks of prompts and rewards before anything starts, the user's code in the kind of process that will run it.

    pipelines without code of the user ──▶ rl.preflight, here
    each of the others ──▶ a process like its env worker: rl.preflight, up to the next call of the user's code
                               ◀── the key of `task` that names it: the time limit begins
                               ◀── the complaint, or none

A process that hangs where no alarm reaches it, or that ends early, is a complaint. What the user's code prints is
dropped, and what it changes or leaves running ends with its process.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from rlmux import plugins
from rlmux.core.errors import RlmuxError, UserError
from rlmux.rl.config import TaskConfig, TrainingConfig
from rlmux.rl.user_code.reward_preflight import calls_user_code, checks, complaint_about
from rlmux.runtime.workers.processes import WorkerProcess, warm_up

_GRACE_S = 2.0
"""Seconds beyond a pipeline's own time limit, whose alarm ends most calls that hang."""
_PATIENCE_S = 40.0
"""Default limit in seconds for a reward on its sample."""
_SILENCE_S = 3.0
"""Seconds of waiting before a message on stderr."""


def complaints_about(
    configs: Sequence[TrainingConfig], code_folder: Path, patience_s: float = _PATIENCE_S
) -> list[str | None]:
    """The first thing, for each pipeline, that is wrong with its prompts or its reward; None where all is well.

    `code_folder`: the folder of reward modules. `patience_s`: longest wait, in seconds, for a reward on its sample. A
    reward that may take longer, and does, is left to the run.
    """
    complaints: list[str | None] = [None if calls_user_code(config) else complaint_about(config) for config in configs]
    for index, config in enumerate(configs):
        if any(complaints):
            break
        if calls_user_code(config):
            complaints[index] = _complaint_in_process(config, code_folder, patience_s)
    return complaints


class CheckWorker:
    """The process's side."""

    def __init__(self, config: TrainingConfig, code_folder: Path) -> None:
        plugins.look_in(code_folder, is_first=True)
        self._checks = checks(config)

    def advance(self) -> tuple[str, str | None]:
        """Check up to the next call of the user's code: ("user_code", its key), ("complaint", None or the complaint)
        at the end, or ("crash", traceback) for a fault of ours."""
        try:
            key = next(self._checks, None)
        except UserError as error:
            return "complaint", str(error)
        except Exception:  # the process's output is dropped
            return "crash", traceback.format_exc()
        return ("complaint", None) if key is None else ("user_code", key)


def _complaint_in_process(config: TrainingConfig, code_folder: Path, patience_s: float) -> str | None:
    """The complaint about one pipeline; None for a reward that is left to the run, too."""
    warm_up(imports=__name__)
    process = WorkerProcess(
        f"{config.name}/check",
        CheckWorker,
        (config, code_folder),
        cores=(),
        log_path=Path(os.devnull),
        call_limit_s=float("inf"),
    )
    task, key = config.task, None
    limit_s = min(task.reward_timeout_s + _GRACE_S, patience_s)
    try:
        while True:
            try:
                kind, text = _advanced(process, _named(task, key) if key else None, limit_s)
            except TimeoutError:
                return _complaint_about_time(task, key or "reward", limit_s)
            except RlmuxError as error:
                return f"task.{key}: {error}" if key else f"task: reading its prompts: {error}"
            if kind == "crash":
                raise RuntimeError(text)
            if kind == "complaint":
                return text
            key = text
    finally:
        process.kill()


def _advanced(process: WorkerProcess, what: str | None, limit_s: float) -> tuple[str, str | None]:
    """The worker's next answer. `what`: the call of the user's code that it makes first, which has `limit_s` seconds;
    a long one is reported on stderr. Raises TimeoutError, and what `receive` raises."""
    answers: list[tuple[str, str | None]] = []
    process.call(time.monotonic(), "advance", (), answers.append)
    started_s, is_announced = time.monotonic(), limit_s <= _SILENCE_S
    while not answers:
        waited_s = time.monotonic() - started_s
        left_s = None if what is None else max(0.0, (limit_s if is_announced else _SILENCE_S) - waited_s)
        if wait([process.connection], left_s):
            process.receive(time.monotonic())
        elif is_announced:
            raise TimeoutError
        else:
            print(f"rlmux: waiting for {what}, at most {limit_s:g} s", file=sys.stderr)
            is_announced = True
    return answers[0]


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

"""Sandboxes for tests: closed after each, skipped where the machine has no namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmux.rl.sandboxes import SandboxLimits, make_sandbox, process
from rlmux.rl.sandboxes.folder import FolderSandbox
from rlmux.rl.sandboxes.harbor_suite import HarborTask, read_task

LIMIT_S = 120.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FolderSandbox]]:
    """Makes sandboxes of a kind, in one folder."""
    made: list[FolderSandbox] = []

    def make(kind: str, *, environment: Any = None, **limits: int) -> FolderSandbox:
        if kind == "process" and (reason := process.unavailable_reason()) is not None:
            pytest.skip(f"no namespaces here: {reason}")
        root = tmp_path / "sandboxes" / str(len(made))
        made.append(make_sandbox(kind, root, limits=SandboxLimits(**limits), environment=environment))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int | None, str]]:
    """Runs a program to its end: (exit code, what it printed)."""

    def run(sandbox: Any, *argv: str, **how: Any) -> tuple[int | None, str]:
        output = tmp_path / "output"
        output.unlink(missing_ok=True)
        program = sandbox.start(argv, env=how.pop("env", {}), output=output, **how)
        code = program.wait(LIMIT_S)
        program.kill()
        return code, output.read_text(encoding="utf-8")

    return run


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    """A small task that the test may change in its folder."""
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 60\n",
        "instruction.md": "Write yes to answer.txt.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": 'grep -q yes /app/answer.txt && r=1 || r=0\necho "$r" > /logs/verifier/reward.txt\n',
        "solution/solve.sh": "echo yes > /app/answer.txt\n",
    }
    for name, text in files.items():
        file = tmp_path / "suite" / "answer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_task(tmp_path / "suite" / "answer")

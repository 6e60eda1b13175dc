"""Kind "process": Linux namespaces, without a daemon and without an image.

What a program sees: the machine's own files, read-only; /app, /tests, /logs, /solution, /tmp and its HOME, which are
the sandbox's; the processes that it started itself; a network with nothing in it but the gateway. Its user is shown as
root. Each start has fresh namespaces over the same folders.

What it does not see: other sandboxes, the folder of its task with tests and solution, the machine's /run and /tmp, but
for Python, rlmux and the user's code where they lie there. **It
can read every other file that the user who runs rlmux can read, and connect to a unix socket that lies elsewhere.**
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.sandboxes.folder import OWN_FOLDERS, FolderSandbox
from rlmux.rl.sandboxes.sandbox import Gateway, RunningProgram, SandboxLimits, start_guarded


class ProcessSandbox(FolderSandbox):
    """Files in the folder `root`; programs see its parent, where other sandboxes are, empty. `hidden`: folders that
    they see empty as well. `shown`: folders that they can read wherever they lie."""

    has_own_root = True

    def __init__(
        self, root: Path, limits: SandboxLimits, *, hidden: Sequence[Path] = (), shown: Sequence[Path] = ()
    ) -> None:
        super().__init__(root, limits)
        needed = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], *shown)
        self._shown = _outermost(path.absolute() for path in needed if path.absolute().is_relative_to("/tmp"))
        self._hidden = [str(path.resolve()) for path in (root.parent, *hidden)]

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
        cwd: str | None = None,
        gateway: Gateway | None = None,
    ) -> RunningProgram:
        """As `Sandbox.start`."""
        namespaces = {
            "folders": {path.name: str(path) for path in sorted(self._root.iterdir())},
            "hidden": self._hidden,
            "shown": self._shown,
            "port": None if gateway is None else gateway.port,
            "socket": None if gateway is None else str(gateway.socket.absolute()),
        }
        program = start_guarded(
            argv,
            env=self._environment(env),
            output=output,
            cwd=cwd or self.workdir,
            limits=self._limits,
            namespaces=namespaces,
        )
        self._programs.append(program)
        return program

    def _seen(self, inside: str) -> Path:
        return Path(inside)

    def _place(self, inside: str) -> Path:
        """As for a folder. Raises UserError for a path in one of the machine's own folders."""
        found = super()._place(inside)
        top = found.relative_to(self._root).parts[:1]
        if not top or (top[0] not in OWN_FOLDERS and os.path.lexists(f"/{top[0]}")):
            raise UserError(
                f"sandbox: process: {inside} is the machine's own; accepted: paths in "
                f"{', '.join(f'/{name}' for name in OWN_FOLDERS)} or in a folder of / that this machine does not have, "
                "or sandbox: docker"
            )
        return found


def _outermost(paths: Iterable[Path]) -> list[str]:
    """Folders that lie in none of the others."""
    found: list[Path] = []
    for path in sorted({*paths}):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found]


@cache
def unavailable_reason() -> str | None:
    """Why this machine has no process sandboxes; None if it has. One is tried, once."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    with tempfile.TemporaryDirectory(prefix="rlmux-probe-") as folder:
        output = Path(folder) / "output"
        sandbox = ProcessSandbox(Path(folder) / "sandboxes" / "probe", SandboxLimits())
        try:
            code = sandbox.start(["true"], env={}, output=output).wait(60.0)
        except PipelineError as error:
            return str(error).removeprefix("sandbox: ")
        finally:
            sandbox.close()
        said = output.read_text(encoding="utf-8", errors="replace").strip()
        return None if code == 0 else f"`true` ended with {code} in a namespace: {said[-200:]}"

"""`python -m rlmux` with workers from the fork server of the test's own process, which has imported torch already.

    command("run", "one.yaml") ──▶ a process that reads its words as `python -m rlmux` does, and ends with its exit code
                                     └── workers ◀── the fork server of this process, as under `ray`

An import of torch and transformers costs more than all steps of a small run. Tests about the life of a fork server, and
of what ends with it, start `python -m rlmux` itself.
"""

from __future__ import annotations

import sys

_SCRIPT = """\
import sys
from rlmux.runtime.workers.processes import borrow_fork_server
borrow_fork_server(sys.argv.pop(1))
from rlmux.cli import main
main()
"""


def command(*words: str) -> list[str]:
    """The words of a process that runs this command line. A fork server is started where this process has none."""
    from rlmux.runtime.workers.processes import fork_server_address

    return [sys.executable, "-c", _SCRIPT, fork_server_address(), *words]

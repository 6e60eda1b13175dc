"""`rlmux serve DIR`: read-only pages of one run or of a folder of runs.

DIR ─▶ Server ◀─ Dashboard ─▶ on_ready(an address that logs a browser in)   of a run only index.db is written
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.service.addresses import Listening
from rlmux.service.dashboard.dashboard import Dashboard
from rlmux.service.http_server import Server
from rlmux.service.index.lanes import Root


def open_folder(
    folder: Path,
    *,
    listening: Listening,
    allowed_hosts: Collection[str] = (),
    on_ready: Callable[[Dashboard], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises UserError, before anything is made, for a folder without a run, and for an address that other machines
    read in the clear.
    """
    if not Root(folder, folder).lanes():
        raise UserError(f"{folder}: no run in it; accepted: the folder of a run, or one with runs' folders in it")
    listening.check_private()
    server = Server(listening)
    dashboard = None
    try:
        dashboard = Dashboard(folder, server, allowed_hosts=allowed_hosts)
        server.start()
        dashboard.start()
        on_ready(dashboard)
        wait_for_signal(lambda: _check(server, dashboard))
    finally:
        server.close()
        if dashboard is not None:
            dashboard.close()


def _check(server: Server, dashboard: Dashboard) -> None:
    server.thread.check()
    dashboard.check()


def wait_for_signal(check: Callable[[], None]) -> None:
    """Return at Ctrl-C or SIGTERM. `check`: called every second; what it raises ends the wait."""
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    while not is_over.wait(1.0):
        check()

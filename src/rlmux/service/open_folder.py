"""`rlmux serve DIR`: the pages of one run or of a folder of runs, to read, until Ctrl-C.

DIR ─▶ Server ◀─ Dashboard ─▶ on_ready(an address that logs a browser in)   of a run only index.db is written
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.service.dashboard.app import Dashboard
from rlmux.service.index.lanes import Root
from rlmux.service.server import Server

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def open_folder(
    folder: Path,
    *,
    address: tuple[str, int],
    allowed_hosts: Collection[str] = (),
    on_ready: Callable[[Dashboard], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises UserError, before anything is made, for a folder without a run, and for an address that other machines reach.
    """
    if not Root(folder, folder).lanes():
        raise UserError(f"{folder}: no run in it; accepted: the folder of a run, or one with runs' folders in it")
    check_loopback(address)
    server = Server(*address)
    dashboard = None
    try:
        dashboard = Dashboard(folder, server, allowed_hosts=allowed_hosts)
        server.start()
        dashboard.start()
        on_ready(dashboard)
        wait_for_signal()
    finally:
        server.close()
        if dashboard is not None:
            dashboard.close()


def check_loopback(address: tuple[str, int]) -> None:
    """Raises UserError for an address that other machines reach."""
    if address[0] not in LOOPBACK:
        raise UserError(
            f"--listen {address[0]}: other machines would read the pages in the clear; accepted: 127.0.0.1, and from "
            f"elsewhere: ssh -L {address[1]}:127.0.0.1:{address[1]} THIS-MACHINE"
        )


def wait_for_signal() -> None:
    """Return at Ctrl-C or SIGTERM."""
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    while not is_over.wait(1.0):
        pass

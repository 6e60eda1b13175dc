"""`rlmux serve FILE` with lanes: one address for all of them, until it is stopped; the lanes go on without it.

file ─▶ a Spec for each lane ─┬─ a thread each: controller started or adopted
                              └─ Server ◀─ Dashboard of the folder
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rlmux.config.load import Spec
from rlmux.log.folder_lock import FolderLock
from rlmux.service.addresses import Listening
from rlmux.service.dashboard.dashboard import Dashboard
from rlmux.service.folder_address import wait_for_signal
from rlmux.service.http_server import Server
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.devices import parts_of
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

_POLL_EVERY_S = 0.5


class LaneSupervisor:
    """Every lane, each polled in its own thread, so that a busy lane delays no other."""

    def __init__(self, root: Path, specs: Mapping[str, Spec]) -> None:
        """Raises UserError for a lane whose run began with another cluster, and for more devices than there are;
        LogError for another's ledger."""
        parts = parts_of(root, specs)
        self.by_name = {name: LaneController(root, name, spec, parts[name]) for name, spec in specs.items()}
        self._ledger = SubmissionLedger(root)
        bundles = Bundles(root)
        self._submissions = LaneSubmissions(self.by_name, self._ledger, bundles)
        self.addresses = (*self._submissions.addresses(), *bundles.addresses())
        self._by_folder = {lane.folder: lane for lane in self.by_name.values()}
        self._failure_by_lane: dict[str, str] = {}
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._tend, args=(lane,), name=f"lane {lane.name}", daemon=True)
            for lane in self.by_name.values()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Controllers go on."""
        self._is_over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._ledger.close()

    def trouble(self, folder: Path) -> str | None:
        """What is wrong with the lane in this folder, in one sentence; None where nothing is."""
        lane = self._by_folder.get(folder)
        return None if lane is None else self._failure_by_lane.get(lane.name) or lane.trouble()

    def down(self, folder: Path) -> str | None:
        """A lane's problem that needs an operator, in one sentence; None without one."""
        lane = self._by_folder.get(folder)
        return None if lane is None else lane.down()

    def _tend(self, lane: LaneController) -> None:
        while not self._is_over.is_set():
            try:
                lane.poll()
                self._submissions.deliver(lane.name)
                self._failure_by_lane.pop(lane.name, None)
            except Exception as error:  # a full disk, for one: it may have room again; no fault ends this thread
                self._failure_by_lane[lane.name] = f"lane {lane.name} is not looked after: {error or repr(error)}"
            self._is_over.wait(_POLL_EVERY_S)


def serve_lanes(
    specs: Mapping[str, Spec],
    root: Path,
    lock: FolderLock,
    *,
    listening: Listening,
    allowed_hosts: Collection[str] = (),
    on_ready: Callable[[str, Dashboard], None],
) -> Mapping[str, int | None]:
    """Serve until Ctrl-C or SIGTERM; returns the process of each lane, which goes on.

    `lock`: the folder's, released at the end. Raises UserError, before anything is started, for an address that cannot
    be had and for a lane whose run began with another cluster.
    """
    server = dashboard = None
    with lock:
        listening.check_private()
        server = Server(listening)
        lanes = LaneSupervisor(root, specs)
        try:
            dashboard = Dashboard(
                root,
                server,
                allowed_hosts=allowed_hosts,
                trouble=lanes.trouble,
                down=lanes.down,
                lanes=list(lanes.by_name),
                more=lanes.addresses,
            )
            lanes.start()
            server.start()
            dashboard.start()
            on_ready(server.url, dashboard)
            wait_for_signal(server, dashboard)
        finally:
            server.close()
            lanes.close()
            if dashboard is not None:
                dashboard.close()
        return {name: lane.pid for name, lane in lanes.by_name.items()}

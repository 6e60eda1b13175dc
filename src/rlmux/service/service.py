"""`rlmux serve FILE`: one address for all lanes of the file, until it is stopped; lanes with submissions only go on.

file ─▶ a Lane each ─┬─ a thread each: controller started or adopted
                     ├─ the lane with models or permits: its controller in this process
                     └─ Server ◀─ Dashboard of the folder, LaneApis
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlmux.config.service_file import Lane
from rlmux.core.errors import UserError
from rlmux.log.run_log import LOG_NAME
from rlmux.runtime.records.folders import ADDRESS, DRAINING
from rlmux.service.addresses import Listening
from rlmux.service.dashboard.dashboard import Dashboard
from rlmux.service.folder_address import wait_for_signal
from rlmux.service.health import HealthAddress
from rlmux.service.hosted_lane import HostedLane
from rlmux.service.http_server import Server
from rlmux.service.lane_apis import TINKER, LaneApis
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.devices import neighbours_of, parts_of
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

_POLL_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A server that answers."""

    url: str
    lanes: tuple[str, ...]
    dashboard: Dashboard | None
    """None at an address that other machines would read in the clear; submissions then have no address either."""
    tinker_url: str | None
    """Value of TINKER_BASE_URL; None without models."""
    permits: str | None
    """Value of RLMUX_BROKER; None without permits."""
    neighbours: tuple[str, ...]
    """Other runs and services on devices of its lanes, in a sentence each."""
    other_versions: tuple[str, ...] = ()
    """Lanes that this version cannot resume, in a sentence each."""


class LaneSupervisor:
    """Every lane, each polled in its own thread, so that a busy lane delays no other."""

    def __init__(self, root: Path, lanes: Mapping[str, Lane]) -> None:
        """Raises UserError for a lane whose run began with another cluster, for more devices than there are, and where
        another version wrote every lane's log;
        LogError for another's ledger."""
        (root / DRAINING).unlink(missing_ok=True)
        parts = parts_of(root, {name: lane.spec for name, lane in lanes.items()})
        self.by_name = {
            name: (LaneController if lane.serve is None else HostedLane)(root, name, lane, parts[name])
            for name, lane in lanes.items()
        }
        others = [lane for lane in self.by_name.values() if lane.other_version is not None]
        if others and len(others) == len(self.by_name):
            raise UserError(f"{others[0].folder / LOG_NAME}: {others[0].other_version}")
        self.hosted = next((lane for lane in self.by_name.values() if isinstance(lane, HostedLane)), None)
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

    def num_ready(self) -> tuple[int, int]:
        """(lanes without trouble, lanes)."""
        return sum(self.trouble(folder) is None for folder in self._by_folder), len(self._by_folder)

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
    lanes: Mapping[str, Lane],
    root: Path,
    *,
    listening: Listening,
    allowed_hosts: Collection[str] = (),
    health: tuple[str, int] | None = None,
    on_ready: Callable[[Ready], None],
) -> Mapping[str, int | None]:
    """Serve until Ctrl-C or SIGTERM; returns the process of each lane that goes on.

    `root`: the service's folder, locked by the caller. `health`: host and port of the address for probes. Raises
    UserError, before anything is started, for an address that cannot be had and for a lane whose run began with another
    cluster.
    """
    with closing(Server(listening)) as server:
        supervisor = LaneSupervisor(root, lanes)
        probes = None if health is None else HealthAddress(*health, supervisor.num_ready)
        if probes is not None:
            server.run_beside(probes.run)
        opened = _Opened(root, server, supervisor, allowed_hosts, listening.is_private, on_ready)
        try:
            if supervisor.hosted is not None:
                supervisor.hosted.run(server, opened.open, opened.check)
            else:
                listening.check_private()
                opened.open(None)
                wait_for_signal(opened.check)
        finally:
            server.close()  # before what answers its requests
            supervisor.close()
            opened.close()
            if probes is not None:
                probes.close()
        return {name: lane.pid for name, lane in supervisor.by_name.items() if lane is not supervisor.hosted}


class _Opened:
    """The pages, and the lanes behind them, once every API is mounted."""

    def __init__(
        self,
        root: Path,
        server: Server,
        supervisor: LaneSupervisor,
        allowed_hosts: Collection[str],
        has_pages: bool,
        on_ready: Callable[[Ready], None],
    ) -> None:
        self._root = root
        self._server = server
        self._supervisor = supervisor
        self._allowed_hosts = allowed_hosts
        self._has_pages = has_pages
        self._on_ready = on_ready
        self._dashboard: Dashboard | None = None

    def open(self, apis: LaneApis | None) -> None:
        """`apis`: of the lane with models or permits, mounted."""
        supervisor, server = self._supervisor, self._server
        if self._has_pages:
            self._dashboard = Dashboard(
                self._root,
                server,
                allowed_hosts=self._allowed_hosts,
                trouble=supervisor.trouble,
                down=supervisor.down,
                lanes=list(supervisor.by_name),
                more=supervisor.addresses,
            )
        supervisor.start()
        server.start()
        if self._dashboard is not None:
            self._dashboard.start()
        (self._root / ADDRESS).write_text(server.url, encoding="utf-8")
        self._on_ready(
            Ready(
                url=server.url,
                lanes=tuple(supervisor.by_name),
                dashboard=self._dashboard,
                tinker_url=f"{server.url}{TINKER}" if apis and apis.has_models else None,
                permits=apis.permits.address if apis and apis.permits else None,
                neighbours=tuple(map(str, neighbours_of(self._root, supervisor.by_name))),
                other_versions=tuple(
                    str(lane.down()) for lane in supervisor.by_name.values() if lane.other_version is not None
                ),
            )
        )

    def check(self) -> None:
        """Raises ThreadDiedError or StorageError if a thread of the server or of its pages has ended."""
        self._server.thread.check()
        if self._dashboard is not None:
            self._dashboard.check()

    def close(self) -> None:
        if self._dashboard is not None:
            self._dashboard.close()

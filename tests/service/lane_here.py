"""A lane of a service in the test's own process: controller, log and socket are real, and no process trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmux.config import Spec
from rlmux.config.load import parse_spec
from rlmux.config.shares import parse_shares
from rlmux.core.events import Event
from rlmux.core.queue_order import QueueOrder
from rlmux.core.scheduler import Scheduler
from rlmux.log.notes import Note
from rlmux.log.run_log import RunLog, run_header
from rlmux.policies import make_policy
from rlmux.runtime.control.control_socket import ControlServer
from rlmux.runtime.control.retries import Retries
from rlmux.runtime.control.run_control import RunControl
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend
from rlmux.runtime.launch import parser
from rlmux.runtime.records.usage_notes import UsageNotes

LANE = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}"


class Endless(FakeBackend):
    """Orders that never end: what is placed stays, and what waits behind it waits."""

    def __init__(self) -> None:
        super().__init__(lambda action: 1.0)

    def poll(self, timeout_s: float) -> tuple[Sequence[Event], Sequence[Note]]:
        time.sleep(min(timeout_s, 0.02))
        return (), ()


class Lane:
    """A lane whose controller is a thread of this process, on the fake backend: its log and its socket are real."""

    def __init__(
        self,
        root: Path,
        policy: str = "rollmux",
        backend: FakeBackend | None = None,
        queue_order: QueueOrder | None = None,
        has_retries: bool = False,
    ) -> None:
        """`queue_order`: where shares count. `has_retries`: what failed may be tried again."""
        self.folder, self.name = root / "cpu", "cpu"
        self.other_version: str | None = None
        self.spec: Spec = parse_spec(LANE, source="lanes", folder=root, may_be_empty=True)
        scheduler = Scheduler(self.spec.cluster, make_policy(policy), queue_order)
        self.log = RunLog.create(self.folder, self._header(policy))
        self.run_api = RunControl(
            ControlServer(self.folder),
            scheduler,
            parser(self.spec),
            over={},
            is_kept_open=True,
            parse_shares=parse_shares,
        )
        self._usage = UsageNotes(scheduler, self.log)
        self._is_over = False
        self._backend = backend or FakeBackend(lambda action: 0.01)
        retries = Retries(self.folder, scheduler.query, {}) if has_retries else None
        self.run_api._retries = retries
        self.controller = Controller(scheduler, self._backend, self.log, run_api=self.run_api, retries=retries)
        self._thread = threading.Thread(
            target=self.controller.run, args=([],), kwargs={"until": lambda: self._is_over}, daemon=True
        )
        self._thread.start()

    def _header(self, policy: str) -> dict[str, Any]:
        file = {"source": "lanes", "resolved": self.spec.resolved}
        return run_header(policy=policy, backend="fake", cluster=self.spec.cluster, spec=file)

    def down(self) -> str | None:
        """As that of a lane whose controller answers."""
        return None

    def hang(self) -> None:
        """Listen on, and answer nothing more."""
        self._is_over = True
        self._thread.join()

    def close(self) -> None:
        self.hang()
        self.run_api.close()
        self._usage.write(self._backend.now_s())
        self.log.close()

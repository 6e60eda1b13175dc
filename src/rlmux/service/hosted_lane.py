"""A lane that serves models and permits: its controller, and the APIs of clients and programs, in the server's process.

    lane ─▶ run folder ─┬─ controller (the main thread) ◀── Inbox ──┐
                        └─ HTTP server (a thread) ── LaneApis ─▶ TinkerFront (its event loop)

The folder is a run's folder: the log has every decision, `tinker.db` every request and result. Pipelines are submitted
to it as to any lane. It ends with its server; the next one resumes it, and its clients continue.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlmux import plugins
from rlmux.broker.broker_run import check_address, environment_token
from rlmux.broker.certificate import Tls
from rlmux.config.serve_file import ServeConfig, ServeSpec, read_written
from rlmux.config.service_file import Lane
from rlmux.core.actions import Action
from rlmux.core.errors import UserError
from rlmux.core.events import Event
from rlmux.log.notes import Note
from rlmux.log.run_log import LogReader
from rlmux.policies import is_plugin, make_policy
from rlmux.runtime.launch import resume_run, spec_of, start_run
from rlmux.runtime.records.folders import SERVED
from rlmux.runtime.run import RunOptions
from rlmux.service.http_server import Server
from rlmux.service.lane_apis import LaneApis
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.devices import NOT_HELD, LaneDevices
from rlmux.service.model_serving import LEDGER, budgets_of, with_bases
from rlmux.service.tinker.ledger import Ledger
from rlmux.service.tinker.project_budgets import Charges, ProjectBudgets


def served_of(folder: Path) -> ServeSpec:
    """What a lane's folder serves. Raises UserError for a folder that serves nothing."""
    file = folder / SERVED
    if not file.is_file():
        raise UserError(f"{folder}: serves no models; accepted: the folder of a lane with serve")
    spec = spec_of(folder)
    with LogReader(folder) as log:
        _look_for_policy(spec.policy, log.header["spec"]["source"])
    serve = read_written(file.read_text(encoding="utf-8"), str(file))
    return ServeSpec(cluster=spec.cluster, policy=spec.policy, serve=serve)


def _look_for_policy(policy: str, source: str) -> None:
    """Let a policy of the user's own be found beside the service's file, or in the working folder."""
    if is_plugin(policy):
        for place in (Path.cwd(), Path(source).absolute().parent):
            plugins.look_in(place)


@contextlib.contextmanager
def open_budgets(folder: Path) -> Iterator[tuple[ProjectBudgets, list[str]]]:
    """Budgets and project names of a lane, running or not. Raises UserError."""
    serve = served_of(folder).serve
    ledger = Ledger(folder / LEDGER)
    try:
        budgets = budgets_of(serve, ledger)
        yield budgets, budgets.projects(key.project for key in serve.keys.values())
    finally:
        ledger.close()


def check_permits(serve: ServeConfig, tls: Tls | None) -> None:
    """Raises UserError for an address of permits that any program could join, or that needs a certificate."""
    if serve.permits is not None and serve.permits.listen:
        check_address("serve.permits.listen", serve.permits.listen, token=environment_token(), tls=tls)


class HostedLane(LaneController):
    """A lane whose controller runs in the server's own process."""

    def __init__(self, root: Path, name: str, lane: Lane, part: LaneDevices = NOT_HELD) -> None:
        """Raises UserError where its run began with another cluster, or has clients of other models."""
        super().__init__(root, name, lane, part)
        assert lane.serve is not None
        self._serve = lane.serve
        if self.other_version is not None:
            raise UserError(f"{self.folder}: {self.other_version}; accepted: that version, or a lane of another name")
        if self._is_locked():
            raise UserError(f"{self.folder}: its controller still runs by itself; first: rlmux stop {self.folder}")
        if (self.folder / SERVED).is_file():
            self._check_same_models(served_of(self.folder).serve)

    def poll(self) -> None:
        """Its controller lives as long as the server."""

    def run(self, server: Server, open_server: Callable[[LaneApis], None], check: Callable[[], None]) -> None:
        """Run its controller until Ctrl-C or SIGTERM.

        `open_server`: called once its APIs are mounted. `check`: called in every turn of the controller.
        Raises UserError, before anything is made, for memory that its models do not have and for a taken address.
        """
        check_permits(self._serve, server.tls)
        self._hold_to_part()
        _look_for_policy(self.spec.policy, self.spec.source)
        policy = make_policy(self.spec.policy)
        apis = LaneApis(
            ServeSpec(cluster=self.spec.cluster, policy=policy.name, serve=self._serve), self.folder, server
        )
        try:
            is_resuming = self._has_begun()
            starter = _Starter(apis, open_server, check, is_resuming=is_resuming)
            options = RunOptions(listeners=[starter], is_kept_open=True, inbox=apis.inbox)
            spec = replace(self.spec, cluster=with_bases(self.spec.cluster, self._serve))
            if is_resuming:
                resume_run(spec, self.folder, policy=policy, options=options)
            else:
                self._begin()
                start_run(spec, self.folder, policy=policy, options=options)
        finally:
            server.close()
            apis.close()

    def _check_same_models(self, before: ServeConfig) -> None:
        """A model's clients rely on its weights, and the checks of their results on its settings."""
        here = f"{self.spec.source}: lanes.{self.name}.serve"
        for name, model in before.models.items():
            if self._serve.models.get(name) != model:
                raise UserError(
                    f"{here}.models.{name}: not as it was served in {self.folder}; accepted: the model as it is in "
                    f"{self.folder / SERVED}, or a lane of another name"
                )
        if self._serve.parameters != before.parameters:
            raise UserError(
                f"{here}.parameters is {self._serve.parameters}; accepted: {before.parameters}, as in {self.folder}, "
                "or a lane of another name"
            )

    def _hold_to_part(self) -> None:
        """Keep this process, and what it starts from now on, on the lane's devices."""
        if self._part.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._part.gpus)
        if self._part.cores:
            os.sched_setaffinity(0, self._part.cores)


class _Starter:
    """A listener that opens the APIs at the controller's first turn and charges projects for their orders."""

    def __init__(
        self, apis: LaneApis, open_server: Callable[[LaneApis], None], check: Callable[[], None], *, is_resuming: bool
    ) -> None:
        self._apis = apis
        self._open_server = open_server
        self._check = check
        self._is_open = False
        self._is_resuming = is_resuming
        self._charges = Charges(apis.charge)

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        self._apis.check()
        self._check()
        if not self._is_open:
            self._is_open = True
            self._apis.open(is_resuming=self._is_resuming)
            self._open_server(self._apis)
        self._charges.update(events, actions, notes)
        for listener in self._apis.listeners():
            listener.update(now_s, events, actions, notes)

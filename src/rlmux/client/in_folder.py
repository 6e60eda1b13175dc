"""A run in a folder of this machine: its control socket, its log, its files."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.client.own_service import own_root
from rlmux.config import Spec
from rlmux.core.errors import UserError
from rlmux.log.folder_lock import FolderInUseError, FolderLock, living_owner
from rlmux.log.notes import encode
from rlmux.log.run_log import LogReader
from rlmux.report.acknowledgements import acknowledge
from rlmux.report.samples import SAMPLES_NAME, SampleReader, page_of, whole_of
from rlmux.report.timeline.records import removed_text
from rlmux.report.timeline.step_causes import read_step_causes
from rlmux.report.timeline.step_rows import read_step_rows
from rlmux.runtime.control.control_requests import ControlRequest, GetUsage, ListQueue, SetShares, Submit, record_of
from rlmux.runtime.control.control_socket import NotRunningError, send_request
from rlmux.runtime.control.removals import remove_here, remove_run
from rlmux.runtime.control.run_control import removal_fields
from rlmux.runtime.control.run_status import StatusReader
from rlmux.runtime.records import folders

_LOOK_EVERY_S = 0.1


class InFolder:
    """A Target."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where the folder holds no run."""
        folders.check_run(folder)
        self._folder = folder
        self._reader: StatusReader | None = None

    def spec(self) -> Spec:
        from rlmux.runtime.launch import spec_of

        return spec_of(self._folder)

    def submit(self, spec: Spec, source: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._request(Submit(text=spec.resolved, source=source))["pipelines"]
        return answer

    def send_command(self, request: str, name: str, **fields: Any) -> dict[str, Any]:
        if request == "remove":
            fields = {"by": getpass.getuser(), **fields}
        try:
            return self._request(record_of({"request": request, "name": name, **fields}))
        except NotRunningError:
            if request == "remove":
                note = remove_here(self._folder, name, fields["parts"], by=fields["by"], is_dry=fields["dry_run"])
                return removal_fields(note, is_dry=fields["dry_run"])
            if request != "retry":
                raise
            raise UserError(
                f"{self._folder}: nothing runs there now; once it has ended: rlmux resume {self._folder} --retry {name}"
            ) from None

    def usage(self) -> dict[str, Any]:
        try:
            return self._request(GetUsage())
        except NotRunningError:
            with LogReader(self._folder) as log:
                accounts = log.state().accounts
            return {"accounts": []} if accounts is None else encode(accounts)

    def set_shares(self, text: str, source: str) -> dict[str, Any]:
        return self._request(SetShares(text=text, source=source))

    def _request(self, request: ControlRequest) -> dict[str, Any]:
        answer = send_request(self._folder, request)
        del answer["ok"]
        return answer

    def status(self) -> dict[str, Any]:
        self._reader = self._reader or StatusReader(self._folder)
        return self._reader.read()

    def queue(self) -> dict[str, Any]:
        return self._request(ListQueue())

    def alerts(self) -> list[dict[str, Any]]:
        firing: list[dict[str, Any]] = self.status()["alerts"]
        return firing

    def acknowledge(self, rule: str, pipeline: str | None) -> list[dict[str, Any]]:
        return acknowledge(self._folder, self.alerts(), rule=rule, pipeline=pipeline, by=getpass.getuser())

    def samples(self, name: str, filters: Mapping[str, Any], *, sort: str, at: int, limit: int) -> dict[str, Any]:
        with self._samples_of(name) as reader:
            return page_of(reader, filters, sort=sort, at=at, limit=limit)

    def sample(self, name: str, step: int, prompt: int, sample: int, *, special_tokens: bool) -> dict[str, Any]:
        with self._samples_of(name) as reader:
            found = whole_of(reader, step, prompt, sample, special_tokens=special_tokens)
        if found is None:
            raise UserError("this trajectory was not kept; accepted: one of those that `rlmux samples` lists")
        return found

    def steps(self, name: str | None) -> dict[str, list[dict[str, Any]]]:
        every = read_step_rows(self._folder)
        if name is None:
            return every
        if name not in every:
            raise UserError(f"no pipeline {name!r}; accepted: {', '.join(every) or 'none yet'}")
        return {name: every[name]}

    def step_causes(self, name: str) -> dict[str, Any] | None:
        causes = read_step_causes(self._folder, name)
        return None if causes is None else causes.as_json()

    def header(self) -> dict[str, Any]:
        with LogReader(self._folder) as log:
            return {key: log.header.get(key) for key in ("run_id", "created")}

    def _samples_of(self, name: str) -> SampleReader:
        known = self.status()["pipelines"]
        if name not in known:
            raise UserError(f"no pipeline {name!r}; accepted: {', '.join(known) or 'none yet'}")
        path = self._folder / name / SAMPLES_NAME
        if not path.is_file():
            for removed in known[name].get("removed", ()):
                if removed["parts"] != "checkpoints":
                    raise UserError(f"no trajectories of {name} are left: {removed_text(removed)}")
            raise UserError(
                f"no trajectories of {name} were kept; accepted: a pipeline with samples: true that has trained"
            )
        return SampleReader(path)

    def log(self, name: str, position: int) -> tuple[str, int]:
        path = self._folder / name / "workers.log"
        if not path.is_file():
            return "", position
        with path.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace"), file.tell()

    def page(self, names: Sequence[str]) -> str | None:
        return None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def stop(folder: Path) -> dict[str, Any]:
    """Stop the folder's run, server, lane or broker, as Ctrl-C would, and wait for its end.

    Returns the keys of `rlmux stop --json`. Raises UserError for a folder without a process, a process of another
    machine, and a lane that its server would restart.
    """
    has_run, owner = (folder / folders.RUN_LOG).is_file(), living_owner(folder)
    if owner is None or not _is_locked(folder):
        folders.check_run(folder)
        raise UserError(f"{folder}: nothing runs there now; accepted: the folder of what runs")
    pid, host = owner
    if host != socket.gethostname():
        raise UserError(f"{folder}: process {pid} on {host} has it; accepted: rlmux stop {folder}, there")
    parent = folder.absolute().parent
    if has_run and _is_locked(parent):
        raise UserError(f"{folder}: its server would start it again; accepted: rlmux stop {parent} first")
    os.kill(pid, signal.SIGINT)
    while living_owner(folder) == owner:
        time.sleep(_LOOK_EVERY_S)
    return {"folder": str(folder), "pid": pid, "resume": _how_to_resume(folder) if has_run else _how_to_serve(folder)}


def drain(folder: Path, *, keeps_pages: bool, on_end: Callable[[str], None]) -> str | None:
    """End a service so that its next start goes on with everything: no more submissions, each lane, then the server.

    `keeps_pages`: the server goes on. `on_end`: called with each lane that has ended. Returns the command that starts
    the service, None where it goes on. Raises UserError for a folder of no service.
    """
    if not (folder / folders.ADDRESS).is_file():
        raise UserError(f"{folder}: no service has been here; accepted: the folder of a service")
    lanes = sorted(path.parent for path in folder.glob(f"*/{folders.RUN_LOG}") if not path.parent.name.startswith("."))
    hosted = [lane.name for lane in lanes if folders.is_hosted(lane)]
    is_served = living_owner(folder) is not None and _is_locked(folder)
    if keeps_pages and hosted and is_served:
        raise UserError(f"--keep-pages: the controller of {hosted[0]} runs in the server; accepted: without it")
    if is_served:
        (folder / folders.DRAINING).touch(mode=0o600)
        running = [lane for lane in lanes if lane.name not in hosted and _is_locked(lane)]
        while running:
            for lane in [lane for lane in running if not _is_locked(lane)]:
                running.remove(lane)
                on_end(lane.name)
            time.sleep(_LOOK_EVERY_S)
        if keeps_pages:
            return None
        stop(folder)
    for lane in [lane for lane in lanes if _is_locked(lane)]:  # of a server that was killed, or was just started
        stop(lane)
        on_end(lane.name)
    if is_served:
        for name in hosted:
            on_end(name)
    return _how_to_serve(folder)


def remove(folder: Path, *, is_dry: bool) -> int:
    """Remove the folder of a run that nothing runs in; returns its bytes. Raises UserError for any other folder."""
    folders.check_run(folder, may_be_damaged=True)
    parent = folder.absolute().parent
    if _is_locked(parent):
        raise UserError(
            f"{folder}: a server has it; accepted: rlmux remove URL --lane {folder.name}, of a lane that its file no "
            f"longer names, or rlmux stop {parent} first"
        )
    return remove_run(folder, is_dry=is_dry)


def _is_locked(folder: Path) -> bool:
    try:
        FolderLock.take(folder).release()
    except FolderInUseError:
        return True
    return False


def _how_to_serve(folder: Path) -> str:
    return "rlmux serve" if folder.absolute() == own_root() else f"rlmux serve FILE --out {folder}"


def _how_to_resume(folder: Path) -> str:
    if folders.is_hosted(folder):
        return _how_to_serve(folder.absolute().parent)
    with LogReader(folder) as log:
        is_broker, source = log.header.get("backend") == "permits", (log.header.get("spec") or {}).get("source")
    return f"rlmux broker {source} --out {folder}" if is_broker else f"rlmux resume {folder}"

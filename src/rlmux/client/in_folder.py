"""A run in a folder of this machine: its control socket, its log, its files."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmux.config import Spec
from rlmux.core.errors import UserError
from rlmux.report.acknowledged import acknowledge
from rlmux.report.log import LogReader
from rlmux.report.samples import SAMPLES_NAME, SampleReader, page_of, whole_of
from rlmux.report.step_rows import read_step_rows
from rlmux.runtime import folders
from rlmux.runtime.control_socket import NotRunningError, ask
from rlmux.runtime.run_status import StatusReader


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
        answer: list[dict[str, Any]] = ask(self._folder, "submit", text=spec.resolved, source=source)["pipelines"]
        return answer

    def tell(self, request: str, name: str, **fields: Any) -> dict[str, Any]:
        return self._asked(request, name=name, **fields)

    def usage(self) -> dict[str, Any]:
        try:
            return self._asked("usage")
        except NotRunningError:
            with LogReader(self._folder) as log:
                return log.state().accounts or {"accounts": []}

    def set_shares(self, text: str, source: str) -> dict[str, Any]:
        return self._asked("set_shares", text=text, source=source)

    def _asked(self, request: str, **fields: Any) -> dict[str, Any]:
        answer = ask(self._folder, request, **fields)
        del answer["ok"]
        return answer

    def status(self) -> dict[str, Any]:
        self._reader = self._reader or StatusReader(self._folder)
        return self._reader.read()

    def queue(self) -> dict[str, Any]:
        answer = ask(self._folder, "queue")
        del answer["ok"]
        return answer

    def alerts(self) -> list[dict[str, Any]]:
        firing: list[dict[str, Any]] = self.status()["alerts"]
        return firing

    def acknowledge(self, rule: str, pipeline: str | None) -> list[dict[str, Any]]:
        return acknowledge(self._folder, self.alerts(), rule=rule, pipeline=pipeline, by=getpass.getuser())

    def samples(self, name: str, asked: Mapping[str, Any], *, sort: str, at: int, limit: int) -> dict[str, Any]:
        with self._samples_of(name) as reader:
            return page_of(reader, asked, sort=sort, at=at, limit=limit)

    def sample(self, name: str, step: int, prompt: int, sample: int) -> dict[str, Any]:
        with self._samples_of(name) as reader:
            found = whole_of(reader, step, prompt, sample)
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

    def header(self) -> dict[str, Any]:
        with LogReader(self._folder) as log:
            return {key: log.header.get(key) for key in ("run_id", "created")}

    def _samples_of(self, name: str) -> SampleReader:
        known = self.status()["pipelines"]
        if name not in known:
            raise UserError(f"no pipeline {name!r}; accepted: {', '.join(known) or 'none yet'}")
        path = self._folder / name / SAMPLES_NAME
        if not path.is_file():
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

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

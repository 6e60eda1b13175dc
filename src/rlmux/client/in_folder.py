"""A run in a folder of this machine: its control socket, its log, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlmux.config import Spec
from rlmux.runtime import folders
from rlmux.runtime.control_socket import ask
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
        answer = ask(self._folder, request, name=name, **fields)
        del answer["ok"]
        return answer

    def status(self) -> dict[str, Any]:
        self._reader = self._reader or StatusReader(self._folder)
        return self._reader.read()

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

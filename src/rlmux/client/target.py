"""The interface of a running run, local or remote.

target_of("runs/demo")                       ─▶ InFolder    its control socket and its log
target_of("http://127.0.0.1:7460/lanes/cpu") ─▶ OnServer    the API of `rlmux serve`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlmux.config import Spec


class RunTarget(Protocol):
    """A run. No call is cached. Raises UserError, one line, for a refused or unreachable one."""

    def spec(self) -> Spec:
        """The run's original file: its cluster applies to every submission."""

    def submit(self, spec: Spec, source: str) -> list[dict[str, Any]]:
        """Submit the file's pipelines; returns the outcome of each."""

    def send_command(self, request: str, name: str, **fields: Any) -> dict[str, Any]:
        """`cancel`, `retry`, `remove`, `hold`, `release`, `rank`, `park`, `unpark` or `why` of one pipeline."""

    def usage(self) -> dict[str, Any]:
        """What `rlmux usage --json` prints."""

    def set_shares(self, text: str, source: str) -> dict[str, Any]:
        """Apply the section `shares` of a file."""

    def status(self) -> dict[str, Any]:
        """What `rlmux status --json` prints."""

    def queue(self) -> dict[str, Any]:
        """Waiting pipelines in the order of offers (`items`), and scheduled ones (`upcoming`)."""

    def alerts(self) -> list[dict[str, Any]]:
        """The firing alerts, by rule."""

    def acknowledge(self, rule: str, pipeline: str | None) -> list[dict[str, Any]]:
        """Acknowledge a rule's alerts, of one pipeline or of all; returns them."""

    def samples(self, name: str, filters: Mapping[str, Any], *, sort: str, at: int, limit: int) -> dict[str, Any]:
        """A page of a pipeline's trajectories that match the filters, at most 200."""

    def sample(self, name: str, step: int, prompt: int, sample: int, *, special_tokens: bool) -> dict[str, Any]:
        """One of them, with its text."""

    def steps(self, name: str | None) -> dict[str, list[dict[str, Any]]]:
        """The table of a pipeline's steps, or those of all, by name."""

    def step_causes(self, name: str) -> dict[str, Any] | None:
        """Where the seconds of the pipeline's steps went, as `rlmux why --json` prints it; None before a step."""

    def header(self) -> dict[str, Any]:
        """`run_id` and `created` (RFC 3339) of the run."""

    def log(self, name: str, position: int) -> tuple[str, int]:
        """(what the pipeline's workers printed from this byte on, the byte behind it)."""

    def page(self, names: Sequence[str]) -> str | None:
        """Address of the page that shows these pipelines; None where no server has the run."""

    def close(self) -> None: ...


def is_url(place: str | Path) -> bool:
    return "://" in str(place)


def target_of(
    place: str | Path, on_notice: Callable[[str], None] = lambda text: None, *, patience_s: float = 0.0
) -> RunTarget:
    """The run in a folder, or the lane of a URL. Raises UserError for any other place.

    `on_notice`: receives progress lines. `patience_s`: seconds of retries of a server that cannot be reached.
    """
    if is_url(place):
        from rlmux.client.on_server import OnServer

        return OnServer(str(place), on_notice, patience_s)
    from rlmux.client.in_folder import InFolder

    return InFolder(Path(place))

"""The commands and endpoints of one kind of server. Each dialect is a small file: vllm.py, sglang.py.

A dialect makes requests and reads responses. It has no state and no trajectories. Capabilities are measured
(measuring.py), since a 200 proves only that an endpoint returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rlmux.engines.servers.http_connection import ServerConnection
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings
from rlmux.engines.servers.transfer import WeightPiece

Part = Literal["weights", "kv_cache"]
"""What of a server's memory wakes."""


class Dialect(Protocol):
    """One kind of server."""

    name: str
    """The engine's name in the user's file."""

    def command(self, python: str, port: int, settings: ServerSettings) -> list[str]:
        """The command line of a server on this port of 127.0.0.1."""

    def environment(self, settings: ServerSettings) -> Mapping[str, str | None]:
        """Environment variables in addition to the worker's, or in place of them; None: unset."""

    def version(self, server: ServerConnection) -> str:
        """The server's reported version. Raises UserError for a server of another kind."""

    def generate_path(self) -> str:
        """Path that streams tokens."""

    def generate_body(self, sampling: Sampling) -> Any:
        """JSON of a request that streams tokens."""

    def generate_headers(self, sampling: Sampling) -> Mapping[str, str]:
        """Headers of the same request."""

    def read_events(self, events: Iterator[Any]) -> Iterator[Piece]:
        """The pieces of an answer."""

    def hold(self, server: ServerConnection) -> None:
        """Stop between two steps; requests stay."""

    def release(self, server: ServerConnection) -> None:
        """Continue after `hold`."""

    def abort(self, server: ServerConnection, request_ids: Sequence[str]) -> None:
        """End requests."""

    def sleep(self, server: ServerConnection, *, keeps_weights: bool) -> None:
        """Give device memory back; the KV cache is dropped. `keeps_weights`: they go to host memory; else they are
        dropped where the server can, and must be loaded after `wake`."""

    def wake(self, server: ServerConnection, part: Part) -> None:
        """Take device memory again, that of weights first."""

    def is_awake(self, server: ServerConnection) -> bool:
        """Whether the server reports itself awake."""

    def load_weights(self, server: ServerConnection, folder: Path, version: int) -> None:
        """Load the folder's weights, drop what was cached under the old ones, and name the version."""

    def take_weights(self, server: ServerConnection, pieces: Iterable[WeightPiece], version: int) -> None:
        """The same by handles of buffers on the server's GPUs. Raises ServerAnswerError where it takes none."""

    def load_adapter(self, server: ServerConnection, name: str, folder: Path) -> None:
        """Load an adapter that requests then name. Raises ServerAnswerError for one that the server does not take."""

    def unload_adapter(self, server: ServerConnection, name: str) -> None:
        """Forget an adapter."""

    def weight_version(self, server: ServerConnection) -> str:
        """The server's reported weight version; empty if it reports none."""

    def checksums(self, server: ServerConnection) -> Mapping[str, str]:
        """sha256 of parameters' bytes, by name; empty if the server reports none."""

"""The commands and endpoints of one kind of server. Each dialect is a small file: vllm.py, sglang.py.

A dialect makes requests and reads responses. It has no state and no trajectories. Capabilities are measured
(measuring.py), since a 200 proves only that an endpoint returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlmux.engines.servers.http_connection import ServerConnection
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings


class Dialect(Protocol):
    """One kind of server."""

    name: str
    """The engine's name in the user's file."""

    def command(self, python: str, port: int, settings: ServerSettings) -> list[str]:
        """The command line of a server on this port of 127.0.0.1."""

    def environment(self, settings: ServerSettings) -> Mapping[str, str]:
        """Environment variables in addition to the worker's."""

    def version(self, server: ServerConnection) -> str:
        """The server's reported version. Raises UserError for a server of another kind."""

    def generate_path(self) -> str:
        """Path that streams tokens."""

    def generate_body(self, sampling: Sampling) -> Any:
        """JSON of a request that streams tokens."""

    def read_events(self, events: Iterator[Any]) -> Iterator[Piece]:
        """The pieces of an answer."""

    def hold(self, server: ServerConnection) -> None:
        """Stop between two steps; requests stay."""

    def release(self, server: ServerConnection) -> None:
        """Continue after `hold`."""

    def abort(self, server: ServerConnection, request_ids: Sequence[str]) -> None:
        """End requests."""

    def sleep(self, server: ServerConnection) -> None:
        """Give device memory back: weights to host memory, KV cache dropped."""

    def wake(self, server: ServerConnection) -> None:
        """Take device memory again."""

    def is_awake(self, server: ServerConnection) -> bool:
        """Whether the server reports itself awake."""

    def load_weights(self, server: ServerConnection, folder: Path, version: int) -> None:
        """Load the folder's weights, drop what was cached under the old ones, and name the version."""

    def weight_version(self, server: ServerConnection) -> str:
        """The server's reported weight version."""

    def checksums(self, server: ServerConnection) -> Mapping[str, str]:
        """sha256 of parameters' bytes, by name; empty if the server reports none."""

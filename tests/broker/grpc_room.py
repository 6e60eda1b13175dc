"""A broker with its gRPC door, and clients of that door; all are ended with the test."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.broker.room import HERE, Room, until

NO_LIMIT = {"gpu0": {"phase": "both"}}
SERVICES = {
    "timeslice": ("timeslice_orchestrator.v1alpha1", "TimeSliceOrchestratorService"),
    "accelerator": ("accelerator_orchestrator.v1alpha1", "AcceleratorOrchestratorService"),
}


def make_stubs(folder: Path, package: str, service: str) -> Path:
    """What a client's author generates, from field numbers alone."""
    folder.mkdir()
    text = (
        (HERE / "orchestrator.proto")
        .read_text()
        .replace("PACKAGE;", f"{package};")
        .replace("SERVICE {", f"{service} {{")
    )
    (folder / "orchestrator.proto").write_text(text)
    outs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", *outs, str(folder / "orchestrator.proto")]
    subprocess.run(command, check=True)
    return folder


class OrchestratorClient:
    """One process with a channel."""

    def __init__(self, stubs: Path, service: str, address: str, job: str, group: str, uid: str = "") -> None:
        words = [sys.executable, str(HERE / "orchestrator_client.py"), str(stubs), service, address, job, group, uid]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self.answer()

    def leave(self) -> None:
        """End as a program that is done."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


class GrpcRoom(Room):
    """A room whose broker has the door."""

    def __init__(self, folder: Path, stubs: dict[str, Path], pools: dict[str, Any] | None = None, **keys: Any) -> None:
        super().__init__(folder, pools or NO_LIMIT, **keys)
        self._stubs = stubs
        self._clients: list[OrchestratorClient] = []
        self.grpc_address = "127.0.0.1:0"

    def start(self, policy: str = "fifo") -> None:
        """At the address that it had before."""
        _, self.grpc_address = self.start_broker(policy, "", "--grpc", self.grpc_address)

    def client(self, job: str, group: str = "gpu0", kind: str = "timeslice", uid: str = "") -> OrchestratorClient:
        self._clients.append(
            OrchestratorClient(self._stubs[kind], SERVICES[kind][1], self.grpc_address, job, group, uid)
        )
        return self._clients[-1]

    def waits(self, number: int, group: str = "gpu0") -> None:
        """Wait until so many wait for the group."""
        watcher = self.client("watcher", group)
        until(lambda: watcher.ask("status")["group"]["waiterQueueDepth"] == str(number))

    def end(self) -> None:
        for client in self._clients:
            client.end()
        super().end()

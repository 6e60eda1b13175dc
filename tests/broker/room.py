"""A broker in a process of its own, and little programs beside it, for tests: started, killed, asked what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from tests import waiting

from rlmux.core.errors import LogError
from rlmux.log.run_log import LogReader
from rlmux.runtime.control.run_status import StatusReader

T = TypeVar("T")
HERE = Path(__file__).parent
SHARE_FOLDER = HERE.parent.parent / "src" / "rlmux"
SIZE = 1000
ONE_POOL = {"gpu0": {"phase": "both", "device_memory_gb": 1.5 * SIZE / 1e9}}
"""A device on which the weights of one little program have room, and not those of two."""
PATIENCE_S = waiting.LIMIT_S


class Room:
    """One folder with a broker's file, its log, and what the programs recorded."""

    def __init__(self, folder: Path, pools: dict[str, Any] | None = None, **keys: Any) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.record = folder / "record"
        self.socket = folder / "s"
        (folder / "broker.yaml").write_text(json.dumps({"cluster": {"pools": pools or ONE_POOL}, **keys}))
        self.address = f"unix:{self.socket}"
        """Address that programs are told."""
        self.broker: subprocess.Popen[str] | None = None
        self.programs: list[subprocess.Popen[str]] = []

    def start_broker(self, policy: str = "fifo", token: str = "", tls: tuple[Path, Path] | None = None) -> None:
        """As a user does; never forked from here, as a test's process may have threads that do not survive that. With
        a token it listens at a free port of the loopback, `tls` (certificate, key) encrypted; again at the same one."""
        kind = "tls" if tls else "tcp"
        free = f"{kind}://127.0.0.1:0" if token else f"unix:{self.socket}"
        address = self.address if self.address.startswith(f"{kind}:") else free
        options = ["--policy", policy, "--listen", address, "--out", str(self.out)]
        options += ["--tls-cert", str(tls[0]), "--tls-key", str(tls[1])] if tls else []
        self.broker = subprocess.Popen(
            [sys.executable, "-m", "rlmux", "broker", str(self.folder / "broker.yaml"), *options],
            env={**os.environ, "RLMUX_TOKEN": token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.broker.stdout is not None
        said, _, self.address = self.broker.stdout.readline().strip().partition("=")
        assert said == "export RLMUX_BROKER", self.broker.communicate()
        waiting.until(self._has_log, "the broker's log", process=self.broker, not_yet=(LogError,))

    def _has_log(self) -> bool:
        LogReader(self.out).close()
        return True

    def kill_broker(self) -> None:
        assert self.broker is not None
        self.broker.kill()
        self.broker.wait()  # its output is open for longer, in the process that ends what it left behind
        for stream in (self.broker.stdout, self.broker.stderr):
            assert stream is not None
            stream.close()

    def stop_broker(self) -> None:
        assert self.broker is not None
        self.broker.terminate()
        _, err = self.broker.communicate()
        assert self.broker.returncode == 0, err

    def program(
        self, name: str, steps: int, *words: str, is_shared: bool = True, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A little program on its way, without any of our packages on its path."""
        variables = {"SHARE_FOLDER": str(SHARE_FOLDER), "PATH": os.environ.get("PATH", ""), **(environ or {})}
        if is_shared:
            variables["RLMUX_BROKER"] = self.address
        started = subprocess.Popen(
            [sys.executable, "-S", "-E", str(HERE / "little_program.py"), name, str(steps), str(self.record), *words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.programs.append(started)
        return started

    def recorded(self) -> list[tuple[float, str, str, int]]:
        """Lines of the programs, in the order of time: (time, NAME@POOL, what, bytes on the device)."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return sorted((float(at_s), name, what, size) for at_s, name, what, size in map(json.loads, lines))

    def has_recorded(self, name: str, what: str, times: int = 1) -> bool:
        return sum((one.partition("@")[0], said) == (name, what) for _, one, said, _ in self.recorded()) >= times

    def recorded_by(self, name: str) -> list[tuple[float, str, str, int]]:
        return [line for line in self.recorded() if line[1].partition("@")[0] == name]

    def notes(self, what: str) -> list[dict[str, Any]]:
        """Notes of the log about permits."""
        with LogReader(self.out) as log:
            notes = [entry.value for entry in log.entries() if entry.kind == "note" and entry.type == "permit"]
        return [fields for fields in notes if fields["what"] == what]

    def status(self) -> dict[str, Any]:
        """What `rlmux status` shows of each program."""
        with closing(StatusReader(self.out)) as reader:
            pipelines: dict[str, Any] = reader.read()["pipelines"]
        return pipelines

    def until(self, is_so: Callable[[], T], what: str) -> T:
        """Wait for something that the broker and the programs bring about."""
        return waiting.until(is_so, what, seen=self._told, process=self.broker)

    def until_noted(self, what: str, times: int | None = None, *, by: str | None = None) -> list[dict[str, Any]]:
        """Wait for notes about permits, so many (any number by default), of one program (of all by default)."""

        def found() -> list[dict[str, Any]]:
            notes = [note for note in self.notes(what) if by in (None, note["pipeline"])]
            return notes if times is None or len(notes) == times else []

        return self.until(found, f"{'some' if times is None else times} {what!r} of {by or 'all'}")

    def until_recorded(self, name: str, what: str, times: int = 1) -> None:
        self.until(lambda: self.has_recorded(name, what, times), f"{times} {what!r} that {name} records")

    def until_status(self, **wanted: str) -> None:
        self.until(
            lambda: all(self.status()[name]["status"] == status for name, status in wanted.items()),
            f"the status {wanted}",
        )

    def _told(self) -> str:
        """How things stand, for a wait that fails."""
        with LogReader(self.out) as log:
            notes = [entry.value for entry in log.entries() if entry.kind == "note" and entry.type == "permit"]
        noted = [f"{note['pipeline']} {note['what']}" for note in notes[-20:]]
        recorded = [f"{name} {what}" for _, name, what, _ in self.recorded()[-20:]]
        codes = [program.poll() for program in self.programs]
        return f"notes {noted}, records {recorded}, exit codes {codes}, status {self.status()}"

    def end(self) -> None:
        for program in self.programs:
            if program.poll() is None:
                program.kill()
            program.wait()
            for stream in (program.stdout, program.stderr):
                if stream is not None:
                    stream.close()
        if self.broker is not None and self.broker.poll() is None:
            self.kill_broker()


def result(program: subprocess.Popen[str]) -> dict[str, Any]:
    """What a program printed at its end."""
    out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def check_never_both(recorded: list[tuple[float, str, str, int]], room_for: int = SIZE) -> None:
    """At no time more on any pool than there is room for, and no two compute there at once."""
    resident: dict[str, dict[str, int]] = {}
    computing: dict[str, set[str]] = {}
    for _, name, what, size in recorded:
        pool = name.partition("@")[2]
        resident.setdefault(pool, {})[name] = size
        assert sum(resident[pool].values()) <= room_for, (name, what, resident)
        if what == "begins":
            computing.setdefault(pool, set()).add(name)
            assert computing[pool] == {name}
        elif what == "ends":
            computing[pool].discard(name)

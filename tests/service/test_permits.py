"""Programs with permits beside a client of models: one device, one ledger, turns; each ends as it does alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.broker.room import HERE, SHARE_FOLDER, Room, result
from tests.certificates import make_certificate, needs_openssl
from tests.command_line import command
from tests.service.conftest import FILE
from tests.service.test_lane_apis import program
from tests.waiting import until

from rlmux.cli.main import run_command_line
from rlmux.core.actions import RunStage
from rlmux.core.events import StageFinished
from rlmux.log.run_log import LogReader

SHARED = (
    FILE.replace(
        "{rollout: {devices: 1}, train: {devices: 1}}", "{gpu0: {phase: both, devices: 1, device_memory_gb: 0.5}}"
    )
    + "      permits: {}\n"
)
STEPS = 12


class Trainer:
    """A little program on its way, as in tests/broker."""

    def __init__(self, folder: Path, name: str, served=None, *words: str, steps: int = STEPS) -> None:
        self.record = folder / "record"
        environ = {"SHARE_FOLDER": str(SHARE_FOLDER), "PATH": os.environ.get("PATH", "")}
        if served is not None:
            environ["RLMUX_BROKER"] = f"unix:{served.folder / 'broker.sock'}"
        command = [sys.executable, "-S", "-E", str(HERE / "little_program.py"), name, str(steps), str(self.record)]
        pools = 'pools={"rollout": "gpu0", "train": "gpu0"}'
        self.process = subprocess.Popen([*command, pools, *words], env=environ, stdout=subprocess.PIPE, text=True)

    def weights(self) -> list[str]:
        """Hashes of the weights that it ended with."""
        said, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0
        return json.loads(said)["sha256"]

    def wrote(self, what: str) -> int:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return sum(json.loads(line)[2] == what for line in lines)


def orders(served) -> list[tuple[float, float, str]]:
    """(begin, end, pipeline) of every order that ended, by the log."""
    with LogReader(served.folder) as log:
        entries = list(log.entries())
    begun = {entry.value.order: entry for entry in entries if isinstance(entry.value, RunStage)}
    ended = [entry for entry in entries if isinstance(entry.value, StageFinished)]
    return [
        (begun[each.value.order].time_s, each.time_s, begun[each.value.order].value.pipeline)
        for each in ended
        if each.value.order in begun
    ]


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Start a program; it is ended with the test."""
    running: list[Trainer] = []

    def start(*given, **options) -> Trainer:
        folder = tmp_path / f"program{len(running)}"
        folder.mkdir()
        running.append(Trainer(folder, "t", *given, **options))
        return running[-1]

    yield start
    for each in running:
        each.process.kill()
        each.process.communicate()


@pytest.mark.slow  # beside the same of a pipeline and a client in test_hosted_lane.py
def test_a_program_and_a_client_take_turns_on_one_device_and_end_as_each_does_alone(serve, connect, trainer_of):
    alone = trainer_of().weights()
    served = serve(text=SHARED)
    expected = program(connect(served), "a", served)
    trainer = trainer_of(served, "sleep=0.02")
    until(lambda: trainer.wrote("loads"), "weights on the device", process=trainer.process)
    assert program(connect(served), "a", served) == expected
    assert trainer.weights() == alone
    assert trainer.wrote("leaves") >= 1, "it left for the client"
    taken = sorted(orders(served))
    assert {"t"} < {name for _, _, name in taken}
    assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(taken)), "one at a time"
    assert served.stop() == 0


@pytest.mark.slow
def test_a_killed_server_waits_for_no_program_between_two_permits_where_there_is_room(
    serve, connect, trainer_of, tmp_path
):
    alone = trainer_of(steps=1).weights()
    served = serve(text=SHARED.replace(", device_memory_gb: 0.5", ""), has_own_fork_server=True)
    trainer = trainer_of(served, f"between={tmp_path / 'go'}", steps=1)
    until(lambda: orders(served), "an order")
    served.kill()
    resumed = serve(served)
    assert program(connect(resumed), "a", resumed)["weights"]
    (tmp_path / "go").touch()
    assert trainer.weights() == alone
    assert trainer.wrote("leaves") == 0
    assert resumed.stop() == 0


@pytest.mark.slow
def test_a_killed_server_gives_no_device_away_while_a_program_still_computes_there(serve, connect, trainer_of):
    served = serve(text=SHARED, has_own_fork_server=True)
    trainer = trainer_of(served, "sleep=3", steps=2)
    until(lambda: trainer.wrote("loads"), "weights on the device", process=trainer.process)
    served.kill()
    resumed = serve(served)
    found = program(connect(resumed), "a", resumed)
    assert found["weights"]
    assert trainer.process.wait(120) == 0
    assert trainer.wrote("leaves") >= 1
    first = min(begin for begin, _, name in orders(resumed) if name != "t")
    with LogReader(resumed.folder) as log:
        left = [entry for entry in log.entries() if entry.kind == "note" and entry.value.get("what") == "left"]
    begun = [each for each in orders(resumed) if each[2] != "t"]
    assert left
    assert begun[0][1] > left[0].time_s > first, "the client's first batch was held until it had left"


def test_a_server_that_does_not_start_gives_the_address_of_its_permits_back(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    permits = f"permits: {{listen: 'unix:{tmp_path / 's'}'}}"
    (tmp_path / "serve.yaml").write_text(SHARED.replace("permits: {}", permits))
    assert run_command_line(["serve", str(tmp_path / "serve.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FILE.replace("train: {devices: 1}", "train: {devices: 2}") + "      permits: {}\n", "has several devices"),
        (
            SHARED.replace("permits: {}", "permits: {listen: 'tcp://127.0.0.1:0'}"),
            "needs a token, or any program could join; accepted: RLMUX_TOKEN=... set",
        ),
        (
            SHARED.replace("permits: {}", "permits: {listen: 'tls://127.0.0.1:0'}"),
            "serve.permits.listen tls://127.0.0.1:0: needs a token, or any program could join",
        ),
        (
            SHARED.replace("permits: {}", "permits: {lease: 3}"),
            "lease is 3: unknown key; nearest: lease_s",
        ),
    ],
    ids=["several devices", "no token", "no token with TLS", "unknown key"],
)
def test_permits_that_cannot_be_given_are_refused_before_anything_is_made(tmp_path, capsys, text, told):
    (tmp_path / "serve.yaml").write_text(text)
    assert run_command_line(["serve", str(tmp_path / "serve.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


PERMITS_ALONE = """
lanes:
  a:
    cluster: {pools: {gpu0: {phase: both, devices: 1, device_memory_gb: 0.001}}}
    serve: {permits: {listen: 'tls://127.0.0.1:0'}}
"""


@needs_openssl
def test_permits_of_a_lane_are_encrypted_with_the_certificate_of_its_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RLMUX_TOKEN", "s3cret")
    file = tmp_path / "serve.yaml"
    file.write_text(PERMITS_ALONE)
    assert run_command_line(["serve", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "tls://127.0.0.1:0: needs a certificate; accepted: --tls-cert FILE --tls-key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    cert, key = make_certificate(tmp_path)
    words = ["serve", str(file), "--out", str(tmp_path / "out"), "--listen", "127.0.0.1:0"]
    served = command(*words, "--tls-cert", str(cert), "--tls-key", str(key))
    room = Room(tmp_path)
    with subprocess.Popen(served, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said, _, room.address = server.stdout.readline().strip().partition("=")
            assert said == "export RLMUX_BROKER"
            assert room.address.startswith("tls://127.0.0.1:")
            program = room.program("t", 2, environ={"RLMUX_TOKEN": "s3cret", "RLMUX_CA": str(cert)})
            assert result(program)["is_shared"]
        finally:
            server.terminate()
            room.end()

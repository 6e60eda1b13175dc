"""A broker behind TLS: programs take turns and find it again, and each mistake of either end is a line."""

from __future__ import annotations

import fcntl
import json
import math
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker.room import ONE_POOL, PATIENCE_S, Room, check_never_both, result
from tests.certificates import make_certificate, needs_openssl
from tests.waiting import until

from rlmux import share
from rlmux.broker import server as server_module
from rlmux.broker.certificate import Tls
from rlmux.broker.server import PermitServer
from rlmux.cli.main import run_command_line
from rlmux.core.errors import UserError

pytestmark = needs_openssl
TOKEN = "s3cret"
MB = 1 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key)"""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


class Serving:
    """A server whose thread receives what comes; `lines` has it."""

    def __init__(self, address: str, pair: tuple[Path, Path] | None) -> None:
        self.server = PermitServer(address, Tls(cert=pair[0], key=pair[1]) if pair else None)
        self.address = self.server.address
        self.lines: list[bytes | None] = []
        self.connections: list[server_module.ProgramConnection] = []
        self.calls: list[Callable[[], None]] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            for connection, line in self.server.receive(0.02):
                self.lines.append(line)
                if connection not in self.connections:
                    self.connections.append(connection)
            while self.calls:
                self.calls.pop()()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self.server.close()

    def connect(self) -> socket.socket:
        """A connection that says nothing yet."""
        host, _, port = self.address.partition("://")[2].rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@pytest.fixture
def serving(pair: tuple[Path, Path]) -> Iterator[Callable[..., Serving]]:
    begun: list[Serving] = []

    def begin(kind: str = "tls", pair: tuple[Path, Path] = pair) -> Serving:
        begun.append(Serving(f"{kind}://127.0.0.1:0", pair if kind == "tls" else None))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def encrypted(connection: socket.socket, cert: Path) -> ssl.SSLSocket:
    return ssl.create_default_context(cafile=cert).wrap_socket(connection, server_hostname="127.0.0.1")


# ---------------------------------------------------------------------- programs


def environ(cert: Path) -> dict[str, str]:
    return {"RLMUX_TOKEN": TOKEN, "RLMUX_CA": str(cert)}


@pytest.fixture
def make_room(tmp_path: Path) -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []

    def make(**keys) -> Room:
        rooms.append(Room(tmp_path, ONE_POOL, **keys))
        return rooms[-1]

    yield make
    for room in rooms:
        room.end()


def alone(room: Room, name: str, steps: int) -> list[str]:
    sha256 = result(room.program(name, steps, is_shared=False))["sha256"]
    room.record.unlink()
    return sha256


def test_under_tls_programs_take_turns_and_end_with_the_weights_they_have_alone(make_room, pair):
    room = make_room(lease_s=0.3)
    expected = {name: alone(room, name, 12) for name in "ab"}
    room.start_broker(token=TOKEN, tls=pair)
    assert room.address.startswith("tls://127.0.0.1:")
    stranger = room.program("stranger", 1, environ={"RLMUX_CA": str(pair[0])})
    _, err = stranger.communicate(timeout=PATIENCE_S)
    assert "the token is not this broker's; accepted: RLMUX_TOKEN as the broker has it" in err
    programs = {name: room.program(name, 12, environ=environ(pair[0])) for name in "ab"}
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    room.until_status(a="finished", b="finished")


def test_programs_find_an_encrypted_broker_again_that_was_killed_and_started_again(make_room, pair):
    room = make_room()
    expected = {name: alone(room, name, 24) for name in "ab"}
    room.start_broker(token=TOKEN, tls=pair)
    end = room.folder / "end"  # one that ends while no broker runs cannot say that it did
    programs = {name: room.program(name, 24, f"end={end}", environ=environ(pair[0])) for name in "ab"}
    room.until_recorded("b", "begins", 3)
    address = room.address
    room.kill_broker()
    room.start_broker(token=TOKEN, tls=pair)
    assert room.address == address
    room.until_recorded("b", "begins", 20)
    end.touch()
    assert {name: result(program)["sha256"] for name, program in programs.items()} == expected
    check_never_both(room.recorded())
    room.until_status(a="finished", b="finished")


def test_a_program_waits_for_a_broker_whose_new_certificate_it_does_not_accept_yet(make_room, pair, tmp_path):
    room = make_room()
    expected = alone(room, "a", 4)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(pair[0].read_bytes())
    room.start_broker(token=TOKEN, tls=pair)
    go_on = tmp_path / "go on"
    program = room.program("a", 4, f"between={go_on}", environ=environ(ca))
    room.until_recorded("a", "ends")
    new = make_certificate(tmp_path, "new")
    room.kill_broker()
    room.start_broker(token=TOKEN, tls=new)
    assert program.stderr is not None
    told = program.stderr.readline()
    assert told.startswith(f"rlmux: RLMUX_BROKER={room.address}: its certificate: "), told
    ca.write_bytes(new[0].read_bytes())
    go_on.touch()
    assert result(program)["sha256"] == expected


# ---------------------------------------------------------------------- mistakes of a program


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`join(address, ca)` is the line that the program gets. One that waits for a broker does so for ever here."""
    for name in ("RLMUX_JOB", "RLMUX_SLO", "RLMUX_WEIGHT", "RLMUX_OFFLOAD", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(share, "CONNECT_LIMIT_S", math.inf)
    monkeypatch.setenv("RLMUX_TOKEN", TOKEN)

    def call(address: str, ca: Path | str = "") -> str:
        monkeypatch.setenv("RLMUX_BROKER", address)
        monkeypatch.setenv("RLMUX_CA", str(ca))
        threads = threading.active_count()
        with pytest.raises(share.ShareError) as caught:
            share.join("a", {"train": "gpu0"})
        assert threading.active_count() == threads
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return call


def test_a_certificate_that_does_not_verify_is_refused_with_what_is_accepted(serving, join, pair, tmp_path):
    address = serving().address
    told = join(address)
    assert told.startswith(f"RLMUX_BROKER={address}: its certificate: self")
    assert told.endswith("; accepted: one for 127.0.0.1, signed by a CA of this system or of RLMUX_CA=FILE")
    other, _ = make_certificate(tmp_path, "other")
    assert join(address, other).endswith(f"; accepted: one for 127.0.0.1, signed by RLMUX_CA={other}")


def test_a_certificate_for_another_name_is_refused_with_the_name(serving, join, tmp_path):
    elsewhere = make_certificate(tmp_path, names="DNS:elsewhere")
    told = join(serving(pair=elsewhere).address, elsewhere[0])
    assert "certificate is not valid for '127.0.0.1'; accepted: one for 127.0.0.1, signed by" in told


def test_an_encrypted_address_of_a_plain_broker_is_refused_with_the_plain_one(serving, join, pair):
    plain = serving("tcp").address
    told = join(plain.replace("tcp:", "tls:"), pair[0])
    assert told.endswith(f": it does not speak TLS; accepted: a broker with --tls-cert, or {plain} for one without")


def test_a_plain_address_of_an_encrypted_broker_is_refused_with_the_encrypted_one(serving, join, monkeypatch):
    monkeypatch.setattr(server_module, "_HANDSHAKE_LIMIT_S", 0.1)
    address = serving().address
    told = join(address.replace("tls:", "tcp:"))
    assert told.endswith(f"this broker encrypts its connections; accepted: RLMUX_BROKER={address}")


def test_a_file_of_certificates_that_is_none_is_refused_by_its_name(join, tmp_path):
    text = tmp_path / "text"
    text.write_text("none")
    for path, why in (
        (tmp_path / "missing", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (text, "no certificate in it"),
    ):
        assert join("tls://127.0.0.1:1", path) == f"RLMUX_CA={path}: {why}; accepted: a PEM file of certificates"


# ---------------------------------------------------------------------- mistakes of a broker


def test_wrong_options_of_a_broker_are_a_line_and_nothing_is_made(tmp_path, pair, capsys, monkeypatch):
    file = tmp_path / "broker.yaml"
    file.write_text(json.dumps({"cluster": {"pools": ONE_POOL}}))
    cert, key = map(str, pair)
    both = ["--tls-cert", cert, "--tls-key", key]
    missing = str(tmp_path / "missing.pem")
    for listen, token, options, told in (
        ("tls", TOKEN, [], "tls://127.0.0.1:0: needs a certificate; accepted: --tls-cert FILE --tls-key FILE"),
        ("tls", TOKEN, ["--tls-cert", cert], "--tls-cert: needs --tls-key FILE too"),
        ("tls", TOKEN, ["--tls-key", key], "--tls-key: needs --tls-cert FILE too"),
        ("tls", TOKEN, ["--tls-cert", missing, "--tls-key", key], f"--tls-cert {missing}: No such file or directory"),
        ("tls", "", both, "tls://127.0.0.1:0: needs a token, or any program could join; accepted: RLMUX_TOKEN=... set"),
        ("tcp", TOKEN, both, "tcp://127.0.0.1:0 is not encrypted; accepted: --listen tls://HOST:PORT"),
        ("http", TOKEN, both, "is not encrypted; accepted: --listen tls://HOST:PORT"),
        ("http", TOKEN, [], "accepted: unix:PATH, tcp://HOST:PORT or tls://HOST:PORT"),
    ):
        monkeypatch.setenv("RLMUX_TOKEN", token)
        words = ["broker", str(file), "--listen", f"{listen}://127.0.0.1:0", "--out", str(tmp_path / "out"), *options]
        assert run_command_line(words) == 2
        err = capsys.readouterr().err
        assert (err.count("\n"), told in err) == (1, True), err
        assert not (tmp_path / "out").exists()


def test_a_broker_for_every_address_prints_a_name_that_a_certificate_can_have(pair):
    server = PermitServer("tls://0.0.0.0:0", Tls(cert=pair[0], key=pair[1]))
    assert server.address.startswith(f"tls://{socket.gethostname()}:")
    server.close()


def test_a_taken_port_is_refused_and_no_socket_is_left_open(serving, pair):
    with pytest.raises(UserError, match="cannot listen there"):
        PermitServer(serving().address, Tls(cert=pair[0], key=pair[1]))


# ---------------------------------------------------------------------- the server's connections


def test_a_client_without_a_handshake_keeps_no_other_waiting_and_is_dropped(serving, pair, monkeypatch):
    monkeypatch.setattr(server_module, "_HANDSHAKE_LIMIT_S", math.inf)
    served = serving()
    with served.connect() as silent, served.connect() as half:
        half.sendall(b"\x16\x03\x01")  # a record's first bytes
        with encrypted(served.connect(), pair[0]) as client:
            assert json.loads(client.recv(1 << 16))["t"] == "challenge"
            client.sendall(b"line\n")
            until(lambda: b"line" in served.lines, "a line")
        until(lambda: served.lines.count(None) == 1, "its end")
        late = [each for each in served.server._connections if each.handshake_end_s is not None]
        assert [each.is_silent for each in late] == [True, False]
        for each in late:
            each.handshake_end_s = 0.0
        assert json.loads(silent.recv(1 << 16))["t"] == "refused"
        assert silent.recv(1) == b""
        assert half.recv(1 << 16) == b"", "one that speaks TLS receives no plain text"


def test_a_client_that_speaks_no_tls_or_does_not_accept_the_certificate_is_dropped(serving):
    served = serving()
    with served.connect() as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: served.lines.count(None) == 1, "its end")
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(served.connect(), server_hostname="127.0.0.1")
    until(lambda: served.lines == [None, None], "the end of the other")


def test_tls_below_1_2_is_not_accepted(serving, pair):
    context = ssl.create_default_context(cafile=pair[0])
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError), serving().connect() as connection:
        context.wrap_socket(connection, server_hostname="127.0.0.1")


def test_records_that_come_at_once_are_all_read(pair):
    server = PermitServer("tls://127.0.0.1:0", Tls(cert=pair[0], key=pair[1]))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=pair[0])
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), PATIENCE_S) as connection:
        is_done = False
        while not is_done:
            try:
                client.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                connection.setblocking(False)
                while True:
                    server.receive(0.02)
                    try:
                        incoming.write(connection.recv(1 << 16))
                        break
                    except BlockingIOError:
                        continue
                connection.settimeout(PATIENCE_S)
        lines = [b"%d" % number * (number + 1) for number in range(200)]
        for line in lines:
            client.write(line + b"\n")  # a record for each
        connection.sendall(outgoing.read())
        arrived: list[bytes | None] = []
        until(lambda: arrived.extend(line for _, line in server.receive(0.02)) or len(arrived) == 200, "all lines")
        assert arrived == lines
    server.close()


def test_a_client_that_reads_late_receives_all_in_order(serving, pair):
    served = serving()
    lines = [b"%d" % number * 500 + b"\n" for number in range(300)]
    with encrypted(served.connect(), pair[0]) as client:
        client.sendall(b"hello\n")
        until(lambda: served.connections, "its connection")
        [connection] = served.connections
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        served.calls.append(lambda: [served.server.send(connection, line) for line in lines])
        until(lambda: connection.unsent, "bytes that the system does not take")
        received = b""
        while received.count(b"\n") < 1 + len(lines):
            received += client.recv(1 << 16)
        assert received.partition(b"\n")[2] == b"".join(lines)


# ---------------------------------------------------------------------- the client's socket


@pytest.fixture
def ends(pair) -> Iterator[tuple[share._EncryptedSocket, ssl.SSLSocket]]:
    """The client's socket, above descriptor 1023, and a blocking one at the other end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    near, far = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 1100))
    near.close()
    context = Tls(cert=pair[0], key=pair[1]).server_context()
    accepted: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: accepted.append(context.wrap_socket(far, server_side=True)))
    thread.start()
    client = share._EncryptedSocket(encrypted(high, pair[0]))
    thread.join()
    yield client, accepted[0]
    client.close()
    accepted[0].close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_thread_reads_while_another_writes(ends):
    client, far = ends
    sent, received, echoed = bytes(range(256)) * (8 * MB // 256), bytearray(), bytearray()

    def echo() -> None:
        while len(echoed) < len(sent):
            data = far.recv(1 << 16)
            echoed.extend(data)
            far.sendall(data)

    def read() -> None:
        while len(received) < len(sent):
            received.extend(client.recv(1 << 16))

    threads = [threading.Thread(target=echo), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    client.sendall(sent)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert received == sent


def test_a_reader_that_waits_lets_another_thread_write_and_is_woken_by_the_end(ends):
    client, far = ends
    ended: list[bytes] = []
    reader = threading.Thread(target=lambda: ended.append(client.recv(1)))
    reader.start()
    client.sendall(b"while the other waits")
    assert far.recv(1 << 10) == b"while the other waits"
    client.shutdown(socket.SHUT_RDWR)
    reader.join(PATIENCE_S)
    assert ended == [b""]


def test_a_connection_without_a_word_is_a_timeout(ends, monkeypatch):
    monkeypatch.setattr(share, "PING_S", 0.01)
    with pytest.raises(socket.timeout):
        ends[0].recv(1)

"""The broker's end of the socket: connections in, whole lines out; it never waits for any one of them.

    listen ── accept ─▶ Connection ── receive(timeout) ─▶ [(connection, line or None)]     None: the connection ended
                            ▲──────── send(bytes) ──────   what does not go out at once is kept, up to a bound

A unix socket is private to its owner (0600), and the system reports the process at the other end. Over TCP a program
proves the token with a nonce; the token itself is never sent. At tls:// a connection first completes its handshake,
step by step as its bytes come, within a time limit.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlmux.broker.certificate import Tls
from rlmux.broker.wire import MAX_LINE_BYTES, write_message
from rlmux.core.errors import UserError

_MAX_CONNECTIONS = 256
_MAX_UNSENT_BYTES = 1 << 20
_MAX_PATH_BYTES = 100
_HANDSHAKE_LIMIT_S = 5.0
"""Seconds for a TLS handshake, below those after which a client without TLS gives the connection up (PING_S)."""
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a socket raises that has to wait."""


@dataclass(eq=False, slots=True)
class ProgramConnection:
    """One process at the other end."""

    socket: socket.socket
    pid: int | None
    """Process at the other end of a unix socket, from the system; None over TCP or if invisible."""
    nonce: str = ""
    """Nonce to prove the token with; empty on a unix socket."""
    num_errors: int = 0
    """Lines of it that were answered with an error."""
    received: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    is_gone: bool = False
    handshake_end_s: float | None = None
    """Deadline of its TLS handshake; None once that is complete, and without TLS."""
    is_silent: bool = True
    """Whether nothing of the handshake has come."""


class PermitServer:
    """Every connection of one address; see the module. Raises UserError where it cannot listen there."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        """`address`: "unix:PATH", "tcp://HOST:PORT" or, with `tls`, "tls://HOST:PORT"; port 0 takes a free one."""
        self._selector = selectors.DefaultSelector()
        self._connections: list[ProgramConnection] = []
        self._path: Path | None = None
        self._context = tls.server_context() if tls is not None and address.startswith("tls:") else None
        if address.startswith("unix:"):
            self._path = Path(address.removeprefix("unix:"))
            self._socket = _listen_at_path(self._path)
            self._inode = self._path.stat().st_ino
            self.address = f"unix:{self._path.absolute()}"
        else:
            self._socket = _listen_at_port(address)
            host, port = self._socket.getsockname()[:2]
            if self._context is not None:  # a certificate has names, and none is valid for 0.0.0.0
                host = address.removeprefix("tls://").rpartition(":")[0].replace("0.0.0.0", socket.gethostname())
            self.address = f"{address[:3]}://{host}:{port}"
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._socket.setblocking(False)
        self._socket.listen(64)
        self._selector.register(self._socket, selectors.EVENT_READ, None)

    @property
    def is_tcp(self) -> bool:
        return self._path is None

    def receive(self, timeout_s: float) -> list[tuple[ProgramConnection, bytes | None]]:
        """What has come in `timeout_s` seconds at most: whole lines, and None for a connection that has ended."""
        arrived: list[tuple[ProgramConnection, bytes | None]] = []
        for key, ready in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                self._woken.recv(1 << 10)
            elif key.data is None:
                self._accept()
            elif key.data.handshake_end_s is not None:
                key.data.is_silent = key.data.is_silent and not ready & selectors.EVENT_READ
                self._shake_hands(key.data)
            elif ready & selectors.EVENT_WRITE:
                self._flush(key.data)
            if key.data is not None and key.data.handshake_end_s is None and ready & selectors.EVENT_READ:
                arrived += [(key.data, line) for line in _read(key.data)]
        self._end_late_handshakes()
        for connection in [connection for connection in self._connections if connection.is_gone]:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()
            arrived.append((connection, None))
        return arrived

    def wake(self) -> None:
        """Make a `receive` that waits, or the next one, return soon. May be called from any thread."""
        with contextlib.suppress(OSError):  # full: it wakes all the same; closed: nothing waits
            self._waker.send(b"x")

    def send(self, connection: ProgramConnection, line: bytes) -> None:
        """Send a line; a connection that takes none for too long is dropped."""
        if connection.is_gone:
            return
        connection.unsent += line
        if len(connection.unsent) > _MAX_UNSENT_BYTES:
            connection.is_gone = True
        self._flush(connection)

    def close(self) -> None:
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()
        for each in (self._waker, self._woken, self._socket):
            each.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path is not None and self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._socket.accept()
            if len(self._connections) >= _MAX_CONNECTIONS:
                accepted.close()
                return
            accepted.setblocking(False)
            if self._context is not None:
                accepted = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
            connection = ProgramConnection(accepted, None if self.is_tcp else _peer_pid(accepted))
            if self.is_tcp:
                connection.nonce = os.urandom(16).hex()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            if self._context is not None:
                connection.handshake_end_s = time.monotonic() + _HANDSHAKE_LIMIT_S
            else:
                self._challenge(connection)

    def _challenge(self, connection: ProgramConnection) -> None:
        if connection.nonce:
            self.send(connection, write_message("challenge", nonce=connection.nonce))

    def _shake_hands(self, connection: ProgramConnection) -> None:
        """Take the next step of the TLS handshake; after the last one, send the challenge."""
        assert isinstance(connection.socket, ssl.SSLSocket)
        try:
            connection.socket.do_handshake()
        except ssl.SSLWantWriteError:
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        except ssl.SSLWantReadError:
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
        except (OSError, ValueError):  # it speaks no TLS, or does not accept the certificate
            connection.is_gone = True
        else:
            connection.handshake_end_s = None
            self._challenge(connection)

    def _end_late_handshakes(self) -> None:
        """Drop connections whose handshake takes too long. One that has sent nothing may be a program without TLS,
        which waits for the challenge: it receives the reason."""
        for connection in self._connections if self._context is not None else ():
            if connection.handshake_end_s is not None and connection.handshake_end_s < time.monotonic():
                connection.is_gone = True
                if connection.is_silent:
                    reason = f"this broker encrypts its connections; accepted: RLMUX_BROKER={self.address}"
                    with contextlib.suppress(OSError):  # past TLS
                        socket.socket.send(connection.socket, write_message("refused", reason=reason))

    def _flush(self, connection: ProgramConnection) -> None:
        try:
            sent = connection.socket.send(connection.unsent) if connection.unsent else 0
            del connection.unsent[:sent]
        except _NOT_YET:
            pass
        except OSError:
            connection.is_gone = True
        if connection in self._connections:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.socket, wanted, connection)


def _read(connection: ProgramConnection) -> list[bytes]:
    """Whole lines that have come. A line without an end is cut where it is too long, and the rest goes with it."""
    data = b""
    try:
        while more := connection.socket.recv(1 << 16):
            data += more
            # TLS gives one record at a time, and no event announces those that OpenSSL holds: read them all, up to a
            # bound for what the system holds, which it announces again.
            if not isinstance(connection.socket, ssl.SSLSocket) or (
                len(data) > MAX_LINE_BYTES and not connection.socket.pending()
            ):
                break
        else:
            connection.is_gone = True
    except _NOT_YET:
        pass
    except OSError:
        connection.is_gone = True
    *lines, connection.received = (connection.received + data).split(b"\n")
    if len(connection.received) > MAX_LINE_BYTES:
        lines.append(connection.received)  # refused as too long
        connection.received, connection.is_gone = b"", True
    return lines


def _peer_pid(accepted: socket.socket) -> int | None:
    pid, _, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid if pid > 0 else None


def _listen_at_path(path: Path) -> socket.socket:
    if len(os.fsencode(path.absolute())) > _MAX_PATH_BYTES:
        raise UserError(f"--listen unix:{path}: longer than {_MAX_PATH_BYTES} bytes, which sockets do not take")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            _check_left_over(path)
            path.unlink()
        previous = os.umask(0o177)
        try:
            listening.bind(str(path.absolute()))
        finally:
            os.umask(previous)
    except OSError as error:
        listening.close()
        raise UserError(f"--listen unix:{path}: cannot be made: {error.strerror}") from None
    return listening


def _check_left_over(path: Path) -> None:
    """Raises UserError for a path that is no socket, or at which a broker answers."""
    if not path.is_socket():
        raise UserError(f"--listen unix:{path}: there is a file of that name; accepted: a new path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(str(path))
        except OSError:
            return
    raise UserError(f"--listen unix:{path}: a broker answers there already; accepted: another path")


def _listen_at_port(address: str) -> socket.socket:
    host, _, port = address[len("tcp://") :].rpartition(":")
    if not address.startswith(("tcp://", "tls://")) or not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"--listen {address}: accepted: unix:PATH, tcp://HOST:PORT or tls://HOST:PORT")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, int(port)))
    except OSError as error:
        listening.close()
        raise UserError(f"--listen {address}: cannot listen there: {error.strerror}") from None
    return listening

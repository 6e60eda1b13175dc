"""The process at the other end of a TCP connection inside this machine, and its user, as /proc knows them.

    (address, port) of the other end ── /proc/net/tcp ─▶ user, inode ── /proc/PID/fd ─▶ process

A process that was forked since has the same connection: the oldest one that has it made it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from rlmux.broker.processes import Process, process_of

_ESTABLISHED = "01"


class Socket(NamedTuple):
    """One end of a connection."""

    uid: int
    """Number of the user whose it is."""
    inode: str


def find_socket(host: str, port: int, to_port: int) -> Socket | None:
    """The end at HOST:PORT of a connection to `to_port`; None where it is not of this machine. `host`: IPv4."""
    local = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"
    remote = f":{to_port:04X}"
    for table in ("tcp", "tcp6"):  # an IPv4 address is the end of a longer one there
        path = Path("/proc/net") / table
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[1].endswith(local) and fields[2].endswith(remote) and fields[3] == _ESTABLISHED:
                return Socket(int(fields[7]), fields[9])
    return None


def find_process(inode: str) -> Process | None:
    """The process that has the socket; None where there is none that may be seen."""
    found = [process for pid in os.listdir("/proc") if pid.isdigit() and (process := _holder(int(pid), inode))]
    return min(found, key=lambda one: (one.start, one.pid), default=None)


def _holder(pid: int, inode: str) -> Process | None:
    folder, name = f"/proc/{pid}/fd", f"socket:[{inode}]"
    try:
        has_it = any(os.readlink(f"{folder}/{fd}") == name for fd in os.listdir(folder))
    except OSError:  # of another user, or gone meanwhile
        return None
    return process_of(pid) if has_it else None

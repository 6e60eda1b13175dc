"""The process above each program of a sandbox. Run as a script: standard library alone, and nothing of rlmux.

    without namespaces                    with namespaces
    guard                                 guard                       forwards 127.0.0.1:port to the unix socket outside
    └── program                           └── first                   process 1; makes the root, then forks
        └── ...                               └── program
                                                  └── ...

Without: orphans are adopted by the guard, a subreaper, so all that descends from the program is found below it. With:
the end of process 1 ends the PID namespace. The guard is in the program's network but keeps its own view of the files,
so the socket of the gateway is never seen inside.

A program inside keeps the user's id, shown as root's, without any capability: it cannot mount, so what is read-only
stays so. For rlmux run by root, /proc is read-only, too: root may write to /proc/sys without a capability.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Collection
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_NEW = "/tmp"
"""Where the new root is made: a folder that is not taken over from the machine."""
_NOT_TAKEN = {"tmp", "proc", "dev", "run"}
"""/run has sockets that lead out, such as Docker's; /dev has the disks."""
_BUFFER_BYTES = 65536
_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""By the guard, which ends when the program or the pipe does: before that it would leave processes behind."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> int:
    return int(_libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [word if word is None else word.encode() for word in (source, target, kind)]
    _call(f"mount of {target}", _libc.mount(*words, ctypes.c_ulong(flags), data.encode()))


def main() -> NoReturn:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(_line_of(0))
    namespaces = order["namespaces"]
    status_in, status_out = os.pipe()
    listener = None
    try:
        if namespaces is None:
            _call("prctl", _prctl(_PR_SET_CHILD_SUBREAPER, 1))
        else:
            listener = _unshare(namespaces)
        child = os.fork()
    except OSError as error:
        _answer(str(error))
        os._exit(1)
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if namespaces is not None:
            _be_first(order, status_out)
        _answer("ready")
        _execute(order)
    os.close(status_out)
    for file in (1, 2):  # the output is the program's
        os.dup2(os.open("/dev/null", os.O_WRONLY), file)
    handle = os.pidfd_open(child)
    if listener is None:
        select.select([0, handle], [], [])
    else:
        _forward(listener, namespaces["socket"], [0, handle])
    if not select.select([handle], [], [], 0)[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if namespaces is not None:
        text = os.read(status_in, 16)
        code = int(text) if text else -signal.SIGKILL
    _end_descendants()
    _leave(code)


def _line_of(file: int) -> bytes:
    """Read a line, and no byte after it."""
    parts = []
    while (part := os.read(file, _BUFFER_BYTES)) and not part.endswith(b"\n"):
        parts.append(part)
    return b"".join((*parts, part))


def _answer(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, " ".join(text.split()).encode() + b"\n")


def _leave(code: int) -> NoReturn:
    """End as the program did: with its code, or by its signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_descendants() -> None:
    """Kill and wait until none is left. A child that is adopted after a look had a parent that this look killed, so a
    wait follows that ends, and another look."""
    while True:
        parents: dict[int, list[int]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                parents.setdefault(int(stat.read().rpartition(")")[2].split()[1]), []).append(int(name))
        found = [os.getpid()]
        for parent in found:
            found += parents.get(parent, [])
        for pid in found[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _execute(order: dict[str, Any]) -> NoReturn:
    """Become the program."""
    try:
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.closerange(3, 1 << 20)
        for number in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        os.chdir(order["cwd"])
        limits = order["limits"]
        asked = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            # Without namespaces it would count whatever else the user runs.
            (resource.RLIMIT_NPROC, limits["num_processes"] if order["namespaces"] else None),
        ]
        for kind, most in asked:
            hard = resource.getrlimit(kind)[1]
            if most is not None and (hard == resource.RLIM_INFINITY or most < hard):
                resource.setrlimit(kind, (most, most))
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except (OSError, ValueError) as error:
        os.write(2, f"{order['argv'][0]}: {error}\n".encode())
    os._exit(127)


def _unshare(namespaces: dict[str, Any]) -> socket.socket | None:
    """Enter the namespaces, but for that of mounts. Returns what listens at the gateway's port."""
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNET
    _call("unshare of user, PID, IPC and network namespaces", _libc.unshare(flags))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    with socket.socket() as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        now = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", now | _IFF_UP))
    if namespaces["port"] is None:
        return None
    return socket.create_server(("127.0.0.1", namespaces["port"]), backlog=128)


def _forward(listener: socket.socket, path: str, files: Collection[int]) -> None:
    """Pass the bytes of each connection to the unix socket and back, until one of `files` has something to read.

    Without threads: the system refuses them to a process whose children are in another PID namespace.
    """
    import asyncio  # here: half of the time that a start takes, and most have no gateway

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(_BUFFER_BYTES):
            writer.write(part)
            await writer.drain()
        writer.write_eof()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with contextlib.suppress(OSError):
                outer_reader, outer_writer = await asyncio.open_unix_connection(path)
                writers.append(outer_writer)
                await asyncio.gather(pump(reader, outer_writer), pump(outer_reader, writer))
        finally:
            for each in writers:
                each.close()

    async def serve() -> None:
        is_over = asyncio.Event()
        for file in files:
            asyncio.get_running_loop().add_reader(file, is_over.set)
        async with await asyncio.start_server(connect, sock=listener):
            await is_over.wait()

    asyncio.run(serve())


def _be_first(order: dict[str, Any], status_out: int) -> NoReturn:
    """Process 1: make the root, start the program, reap what ends, and say how the program ended."""
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # the pipe is the guard's
        _make_root(order["namespaces"])
        program = os.fork()
    except OSError as error:
        _answer(str(error))
        os._exit(1)
    if program == 0:
        for capability in range(64):  # an exec gives those of this set alone: none
            _prctl(_PR_CAPBSET_DROP, capability)
        _answer("ready")
        _execute(order)
    os.dup2(2, 1)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            os.write(status_out, str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)


def _make_root(namespaces: dict[str, Any]) -> None:
    """The machine's root, read-only and without what is hidden, and the sandbox's own folders in it."""
    _call("unshare of the mount namespace", _libc.unshare(_CLONE_NEWNS))
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # They may lie below the place of the new root, so they are held open; paths would lead into it.
    own = {name: os.open(path, os.O_PATH) for name, path in namespaces["folders"].items()}
    shown = {path: os.open(path, os.O_PATH) for path in namespaces["shown"]}
    _mount("tmpfs", _NEW, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for name in {*_NOT_TAKEN, *own}:
        os.mkdir(f"{_NEW}/{name}")
    for name in sorted(set(os.listdir("/")) - _NOT_TAKEN - set(own)):
        _take(name)
    _make_read_only(_NEW)
    for name, file in own.items():
        _mount(f"/proc/self/fd/{file}", f"{_NEW}/{name}", None, _MS_BIND)
        os.close(file)
    _make_devices()
    _mount("tmpfs", f"{_NEW}/run", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=16m")
    for path, file in shown.items():
        os.makedirs(_NEW + path, exist_ok=True)
        _mount(f"/proc/self/fd/{file}", _NEW + path, None, _MS_BIND | _MS_REC)
        _make_read_only(_NEW + path)
        os.close(file)
    for path in namespaces["hidden"]:
        if os.path.isdir(_NEW + path):
            _mount("tmpfs", _NEW + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    _mount("proc", f"{_NEW}/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    os.chdir(_NEW)
    _call("pivot_root", _libc.pivot_root(b".", b"."))  # the old root is then on top of the new one
    _call("umount of the old root", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def _make_read_only(path: str) -> None:
    """A mount and all below it."""
    attributes = struct.pack("QQQQ", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, 0, 0, 0)
    pointer = ctypes.c_char_p(attributes)
    numbers = (ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_uint(_AT_RECURSIVE))
    _call("mount_setattr (Linux 5.12)", _libc.syscall(*numbers, pointer, ctypes.c_size_t(len(attributes))))


def _take(name: str) -> None:
    """An entry of the machine's root, for the new one."""
    source, target = f"/{name}", f"{_NEW}/{name}"
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _make_devices() -> None:
    folder = f"{_NEW}/dev"
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID, "mode=755,size=64k")
    for name in filter(lambda name: os.path.exists(f"/dev/{name}"), _DEVICES):
        os.close(os.open(f"{folder}/{name}", os.O_CREAT))
        _mount(f"/dev/{name}", f"{folder}/{name}", None, _MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{folder}/{name}")
    os.symlink("pts/ptmx", f"{folder}/ptmx")
    for name, kind, data in (
        ("shm", "tmpfs", "mode=1777,size=64m"),
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"),
    ):
        os.mkdir(f"{folder}/{name}")
        _mount(kind, f"{folder}/{name}", kind, _MS_NOSUID | _MS_NOEXEC, data)


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else sys.exit("guard.py is started by rlmux alone")

"""Files of versions of weights, whose memory the next one takes. Imports nothing heavy: the controller retires them.

    retire(N) ─▶ spare ─▶ locked by the trainer, written over as N + k ─rename─▶ read by rollout workers, which lock it

Memory that is new to the system costs more than the copy: a page fault for each 4 kB. So a version that is no longer
needed is not removed but becomes its folder's spare. A reader holds a lock for as long as anything of the file is
mapped; a spare that is still read is left to its reader, and the next version gets new memory. A file system without
locks has no spares.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_SPARE = "spare.safetensors"


def retire(path: Path) -> None:
    """Give up a version's file: it becomes its folder's spare, in place of an older one. It may be absent."""
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_name(_SPARE))


def opened_over_spare(aside: Path) -> int:
    """A descriptor of the folder's spare under this name, locked; of a new file where there is none."""
    with contextlib.suppress(OSError):
        aside.with_name(_SPARE).rename(aside)
        descriptor = os.open(aside, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is read, or the file system has no locks
            os.close(descriptor)
        else:
            return descriptor
    aside.unlink(missing_ok=True)
    return os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def opened_to_read(path: Path) -> int:
    """A descriptor of a version's file, which is not written over before it and its mappings are closed.

    Raises FileNotFoundError also for a file that was given up meanwhile.
    """
    with contextlib.ExitStack() as undo:
        descriptor = os.open(path, os.O_RDONLY)
        undo.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without locks has no spares either
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(f"{path} was replaced while it was opened")
        undo.pop_all()
    return descriptor


def unlock(descriptor: int) -> None:
    """Let others read the file. Closing is not enough: a mapping has a descriptor of its own, which keeps the lock."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)

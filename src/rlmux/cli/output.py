"""Whether anything reads what a command prints: a run whose reader has gone ends like one that was interrupted."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO


def check_is_read() -> None:
    """Raises BrokenPipeError where the reader of stdout or stderr has ended, or their terminal was closed."""
    poll = select.poll()
    for descriptor in _descriptors(sys.stdout, sys.stderr):
        poll.register(descriptor, 0)  # errors and hang-ups are always reported
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def abandon(*streams: TextIO | None) -> None:
    """Send what is still to be printed nowhere, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _descriptors(*streams):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _descriptors(*streams: TextIO | None) -> Iterator[int]:
    """Those of the process's own streams; none for a stream that was closed at the start, or that a caller replaced."""
    for stream in streams:
        try:
            if stream is not None:
                yield stream.fileno()
        except (OSError, ValueError):
            continue

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


def open_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr (`2>&-`) ones that lead nowhere.

    Otherwise the first files that it opens take their numbers, and what is printed lands in them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def complaint_about_stdout(*, has_failed: bool = False) -> str | None:
    """What keeps stdout from being written, where it cannot be; it leads nowhere from then on.

    `has_failed`: whether something could not be written, which a failed flush has dropped.
    """
    try:
        sys.stdout.flush()
        for descriptor in _descriptors(sys.stdout) if has_failed else ():
            os.write(descriptor, b"\n")
    except OSError as error:
        abandon(sys.stdout)
        return None if error.errno == errno.EPIPE else f"stdout cannot be written: {error.strerror}"
    return None


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

"""Signals that end a program end those that tests start, however the tests were started themselves.

Under `nohup`, or behind `&` in a script, a process inherits that SIGHUP or SIGINT is ignored, and so would all that it
starts: a test that interrupts a run would wait for an end that never comes.
"""

from __future__ import annotations

import signal


def hear() -> None:
    """Programs that this process starts from now on do not ignore SIGHUP and SIGINT because it does.

    A handler of a process is the default one in a program that it starts. This process still outlives its terminal.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

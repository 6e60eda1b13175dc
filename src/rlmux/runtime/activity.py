"""What a process of this machine is doing, as the system tells it. Linux only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_EXITING = 0x4
"""The kernel's flag of a process that ends (PF_EXITING, linux/sched.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """A process at one moment."""

    state: str
    """State of its main thread, a letter as in `ps`: R runs or could, S waits, D waits for the disk, T is stopped."""
    cpu_s: float
    """Seconds of processor time of all its threads so far."""
    is_ending: bool = False
    """Whether it was told to end, and is in the system's hands until it has."""

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def is_runnable(self) -> bool:
        return self.state == "R"


def activity_of(pid: int | None) -> Activity | None:
    """None where that cannot be told: no such process, or no Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Activity(
            state=fields[0],
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
            is_ending=bool(int(fields[6]) & _EXITING),
        )
    except (OSError, IndexError, ValueError):
        return None

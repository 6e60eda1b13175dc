"""Device fractions: parts of one device, prepared before orders use them.

    probe(device) ──▶ DeviceFractions: which fractions there are here, how they are made, and what is missing
    fraction_setter(device) ──▶ set(device_fraction), in the process that computes, between two calls of its engine

    cpu    two worker processes on one core; their niceness splits its time:   fraction f beside 1 - f
               the larger one stays at nice 0, the smaller goes to where the scheduler's weights are f : 1 - f
    cuda   green contexts: a process keeps its kernels to some of the multiprocessors
           MPS: kernels of two processes run at once at all; its percentage is fixed when a process starts

A device fraction is that of the process that sets it; 1.0 is the whole device. Nothing here starts a thread or a
daemon.
Invariant: fractions change when work is done, never what it computes. Where a fraction cannot be made, setting it does
nothing, and `DeviceFractions` reports that, so that no plan relies on it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any, Protocol

import torch

WHOLE = 1.0
"""The device fraction at which a process is not held back."""
_NICE_STEP = 1.25
"""Ratio of the Linux scheduler's weights of two neighbouring nice values."""
_MAX_NICE = 19
_NICE_UNITS = 20
"""Twentieths of a core's time: the finest fractions that nice values can make."""
_NICE_FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9)
_GREEN_FRACTIONS = (0.2, 0.4, 0.6, 0.8)
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")
_NICE_PROBE = "import os; n = os.getpriority(0, 0); os.setpriority(0, 0, n + 1); os.setpriority(0, 0, n)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFractions:
    """The fractions of one kind of device that can be made here."""

    device: str
    """Name of the hardware: what a profile file belongs to."""
    how: str
    """What makes the fractions; empty where nothing does."""
    prepared: tuple[float, ...] = ()
    """Device fractions below 1.0, ascending; a worker takes one with a call."""
    num_units: int = 1
    """Parts that a device is counted in: multiprocessors of a GPU, twentieths of a core's time."""
    unit_step: int = 1
    """Units that a fraction can grow by."""
    min_units: int = 1
    """Units of the smallest fraction."""
    missing: str = ""
    """What cannot be done here, and why."""


class FractionSetter(Protocol):
    """Lives in the process that computes."""

    @property
    def device_fraction(self) -> float:
        """The fraction in force: the last one that the system did not refuse."""

    def set(self, device_fraction: float) -> None:
        """Hold this process back to `device_fraction` from now on; cheap when it is in force already."""


def probe(device: str = "cpu") -> DeviceFractions:
    """What this machine can do for a device (`cpu` or `cuda`); leaves everything as it was."""
    return _probe_cuda() if device.startswith("cuda") else _probe_cpu()


def num_gpus() -> int:
    """GPUs that this process may use; starts nothing on them."""
    return torch.cuda.device_count()


def fraction_setter(device: str = "cpu") -> FractionSetter:
    """The setter of this process. What can be done is found out when a fraction below 1.0 is first set."""
    return GreenContextFraction() if device.startswith("cuda") else NiceFraction()


# --- CPU ----------------------------------------------------------------------------------------------------


class NiceFraction:
    """A fraction of a core by niceness.

    Linux may group processes by session before it looks at niceness; a worker is a session of its own, so the
    niceness of its group is set as well.
    """

    def __init__(self) -> None:
        self._fraction = WHOLE

    @property
    def device_fraction(self) -> float:
        return self._fraction

    @cached_property
    def _base(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    @cached_property
    def _can_raise(self) -> bool:
        return _can_raise_priority()

    @cached_property
    def _has_group(self) -> bool:
        return _has_autogroups() and os.getsid(0) == os.getpid()

    @cached_property
    def _group_base(self) -> int:
        """Initial niceness of the group: 0, independent of its process. Raises OSError."""
        return int(_AUTOGROUP.read_text().rpartition(" ")[2])

    def set(self, device_fraction: float) -> None:
        if device_fraction == self._fraction:
            return
        nice = nice_of(device_fraction)
        if self._can_raise:  # else it could not be undone
            os.setpriority(os.PRIO_PROCESS, 0, min(_MAX_NICE, self._base + nice))
        if self._has_group:
            try:
                _AUTOGROUP.write_text(str(min(_MAX_NICE, self._group_base + nice)))
            except OSError:  # ten changes a second are allowed; the next call tries again
                return
        self._fraction = device_fraction


def nice_of(device_fraction: float) -> int:
    """Niceness of a process with this fraction beside one with the rest; 0 from a half on."""
    if device_fraction >= 0.5:
        return 0
    return min(_MAX_NICE, round(log((1.0 - device_fraction) / max(device_fraction, 1e-3)) / log(_NICE_STEP)))


def cpu_name() -> str:
    """Name of the processor, as the system reports it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return "cpu: " + " ".join(line.partition(":")[2].split())
    return f"cpu: {platform.processor() or platform.machine()}"


def _probe_cpu() -> DeviceFractions:
    ways = ["nice"] if _can_raise_priority() else []
    if _has_autogroups():
        ways.append("niceness of sessions")
    if not ways:
        return DeviceFractions(
            device=cpu_name(),
            how="",
            missing="a process that has lowered its priority may not raise it again (RLIMIT_NICE, CAP_SYS_NICE)",
        )
    return DeviceFractions(device=cpu_name(), how=" and ".join(ways), prepared=_NICE_FRACTIONS, num_units=_NICE_UNITS)


def _can_raise_priority() -> bool:
    """A process may raise its priority again; tried in one of its own, which would stay low if it may not."""
    command = [sys.executable, "-I", "-S", "-c", _NICE_PROBE]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _has_autogroups() -> bool:
    try:
        return _AUTOGROUP_SWITCH.read_text().strip() == "1" and os.access(_AUTOGROUP, os.W_OK)
    except OSError:
        return False


# --- CUDA ---------------------------------------------------------------------------------------------------


class GreenContextFraction:
    """A fraction of a GPU's multiprocessors by a green context, made when a fraction is first set and kept.

    Entering a context lets the kernels that are queued end first, so a change belongs between two calls. A context
    covers the default stream alone: what runs on another one asks `side_stream`.
    """

    def __init__(self) -> None:
        self._contexts: dict[int, Any] = {}
        self._current: Any = None
        self._fraction = WHOLE

    @property
    def device_fraction(self) -> float:
        return self._fraction

    @cached_property
    def _sizes(self) -> dict[float, int]:
        return _green_sizes()

    def set(self, device_fraction: float) -> None:
        if device_fraction == self._fraction or not self._sizes:
            return
        torch.cuda.synchronize()
        _SIDE_STREAMS.now()  # torch makes its streams at once, in the context of the first: that of the whole device
        if self._current is not None:
            self._current.pop_context()
            self._current = None
        if device_fraction < WHOLE:
            nearest = min(self._sizes, key=lambda size: abs(size - device_fraction))
            self._current = self._context(self._sizes[nearest])
            self._current.set_context()
        self._fraction = device_fraction
        _SIDE_STREAMS.enter(device_fraction, self._current)

    def _context(self, num_sms: int) -> Any:
        if num_sms not in self._contexts:
            from torch.cuda.green_contexts import GreenContext

            self._contexts[num_sms] = GreenContext.create(num_sms=num_sms, device_id=torch.cuda.current_device())
        return self._contexts[num_sms]


class _SideStreams:
    """A stream beside the default one for each fraction that was in force in this process."""

    def __init__(self) -> None:
        self._device_fraction, self._context = WHOLE, None
        self._streams: dict[float, torch.cuda.Stream] = {}

    def enter(self, device_fraction: float, context: Any) -> None:
        """`context`: green; None for the whole device."""
        self._device_fraction, self._context = device_fraction, context

    def now(self) -> tuple[float, torch.cuda.Stream]:
        """The fraction in force and its stream."""
        if self._device_fraction not in self._streams:
            made: Any = torch.cuda.Stream if self._context is None else self._context.Stream
            self._streams[self._device_fraction] = made()
        return self._device_fraction, self._streams[self._device_fraction]


_SIDE_STREAMS = _SideStreams()


def side_stream() -> tuple[float, torch.cuda.Stream]:
    """The device fraction in force in this process, and a stream beside the default one whose kernels keep to it."""
    return _SIDE_STREAMS.now()


def green_unit(compute_major: int) -> tuple[int, int]:
    """(step, least): multiprocessors of a green context come in multiples of `step`, `least` or more."""
    return (8, 8) if compute_major >= 9 else (2, 4)


def green_sizes(num_sms: int, compute_major: int) -> dict[float, int]:
    """Multiprocessors by prepared fraction. Rounded down: a splitter that rounds up must not run out."""
    step, least = green_unit(compute_major)
    sizes: dict[float, int] = {}
    for fraction in _GREEN_FRACTIONS:
        units = max(least, int(num_sms * fraction) // step * step)
        if units <= num_sms - least:
            sizes[units / num_sms] = units
    return sizes


def mps_problem() -> str:
    """Why processes cannot compute on one GPU at the same time; empty if they can."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (pipe / "control").exists():
        return ""
    return f"no MPS daemon listens in {pipe}, so kernels of different processes take turns"


def _probe_cuda() -> DeviceFractions:
    if not torch.cuda.is_available():
        return DeviceFractions(device="cuda", how="", missing="torch sees no CUDA device")
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    step, least = green_unit(gpu.major)
    problem = _green_problem(least)
    sizes = {} if problem else green_sizes(gpu.multi_processor_count, gpu.major)
    missing = [f"green contexts: {problem}"] if problem else []
    if mps_problem():
        missing.append(mps_problem())
    ways = [] if problem else ["green contexts"]
    if not mps_problem():
        percent = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        ways.append("MPS" + (f" at {percent} % of this process" if percent else ""))
    return DeviceFractions(
        device=gpu.name,
        how=" and ".join(ways),
        prepared=tuple(sizes),
        num_units=gpu.multi_processor_count,
        unit_step=step,
        min_units=least,
        missing="; ".join(missing),
    )


def _green_sizes() -> dict[float, int]:
    if not torch.cuda.is_available():
        return {}
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    _, least = green_unit(gpu.major)
    return {} if _green_problem(least) else green_sizes(gpu.multi_processor_count, gpu.major)


def _green_problem(num_sms: int) -> str:
    """Why green contexts are unusable; empty if they are usable."""
    try:
        from torch.cuda.green_contexts import GreenContext

        context: Any = GreenContext.create(num_sms=num_sms, device_id=torch.cuda.current_device())
        context.set_context()
        try:
            torch.ones(8, device="cuda").sum().item()
        finally:
            context.pop_context()
    except Exception as error:  # drivers and builds fail in different ways, all of which mean no support
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""

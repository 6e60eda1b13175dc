"""What the machine itself says of a run's devices, four times a minute: use, memory, power, temperature, host memory.

    NVML, psutil ── a thread of its own reads ──▶ reading ── HardwareNotes.update ──▶ note `hardware` in the log

A counter may take long to answer, so the thread that gives devices their orders never reads one. A counter that a
machine does not have is left out; without NVML, GPUs have none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import psutil

from rlmux.core.actions import Action
from rlmux.core.events import Event
from rlmux.core.model import DeviceId
from rlmux.log.notes import HardwareNote, Note
from rlmux.log.run_log import RunLog
from rlmux.runtime.backend import DeviceParts

EVERY_S = 15.0
_MILLI = 1e-3

_JOINS: Mapping[str, Callable[[Sequence[float]], float]] = {"use": fmean, "temperature_c": max}
"""How counters of several GPUs make those of a device; all others are added."""
Reading = Mapping[str, float | None]
"""Counters of one device: the keys of `HardwareNote.devices`."""


class HardwareNotes:
    """A listener that writes the notes. Close it at the end."""

    def __init__(self, log: RunLog, parts: Mapping[DeviceId, DeviceParts], every_s: float = EVERY_S) -> None:
        """`parts`: what of this machine each device is; without devices nothing is read."""
        self._log = log
        self._parts = parts
        self._every_s = every_s
        self._reading: HardwareNote | None = None
        """The newest reading that is not in the log."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="hardware", daemon=True)
        if parts:
            self._thread.start()

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            self._log.append_note(now_s, reading)

    def close(self) -> None:
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _read(self) -> None:
        with nvml() as driver:
            psutil.cpu_percent(percpu=True)  # the first call begins what the next one measures
            while not self._is_closed.wait(self._every_s):
                self._reading = read_hardware(self._parts, driver)


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """The driver's counters; None on a machine that has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        yield None
        return
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_hardware(parts: Mapping[DeviceId, DeviceParts], driver: Any) -> HardwareNote:
    """One reading. `driver`: pynvml, or None. A core's use is that since the last reading."""
    memory = psutil.virtual_memory()
    use_by_core = psutil.cpu_percent(percpu=True)
    devices = {
        str(device): _of_gpus(its.gpus, driver) if its.gpus else _of_cores(its.cores, use_by_core)
        for device, its in parts.items()
    }
    return HardwareNote(
        devices={device: reading for device, reading in devices.items() if reading},
        host_memory_bytes=float(memory.total),
        host_memory_used_bytes=float(memory.total - memory.available),
    )


def _of_cores(cores: Sequence[int], use_by_core: Sequence[float]) -> Reading:
    known = [use_by_core[core] / 100.0 for core in cores if core < len(use_by_core)]
    return {"use": fmean(known)} if known else {}


def _of_gpus(gpus: Sequence[str], driver: Any) -> Reading:
    """Counters of a device of one or more GPUs: means of use, sums of memory and power, the highest temperature."""
    if driver is None:
        return {}
    counters: dict[str, list[float]] = {}
    for gpu in gpus:
        with contextlib.suppress(driver.NVMLError):
            handle = (
                driver.nvmlDeviceGetHandleByIndex(int(gpu))
                if gpu.isdecimal()
                else driver.nvmlDeviceGetHandleByUUID(gpu.encode())
            )
            for name, value in _counters_of(handle, driver):
                counters.setdefault(name, []).append(value)
    return {name: _JOINS.get(name, sum)(values) for name, values in counters.items()}


def _counters_of(handle: Any, driver: Any) -> Iterator[tuple[str, float]]:
    """Those that this GPU has: a MIG instance has no use of its own, some boards no power."""
    with contextlib.suppress(driver.NVMLError):
        memory = driver.nvmlDeviceGetMemoryInfo(handle)
        yield "memory_bytes", float(memory.total)
        yield "memory_used_bytes", float(memory.used)
    with contextlib.suppress(driver.NVMLError):
        yield "use", driver.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
    with contextlib.suppress(driver.NVMLError):
        yield "power_w", driver.nvmlDeviceGetPowerUsage(handle) * _MILLI
    with contextlib.suppress(driver.NVMLError):
        yield "temperature_c", float(driver.nvmlDeviceGetTemperature(handle, driver.NVML_TEMPERATURE_GPU))

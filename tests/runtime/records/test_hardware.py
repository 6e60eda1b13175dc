"""What the machine's counters say of a device is read beside the run, and what a machine does not have is left out."""

# ruff: noqa: N802  the names are those of NVML

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests import waiting

from rlmux.core.model import DeviceId
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.runtime.backend import DeviceParts
from rlmux.runtime.records.hardware import HardwareNotes, nvml, read_hardware

CORE, GPU, PAIR, MIG = (DeviceId("train", 0, index) for index in range(4))


class Missing(Exception):
    """Raised for a counter that a board does not have."""


class FakeDriver:
    """NVML with two GPUs and a MIG instance, which has no use of its own and no power."""

    NVMLError = Missing
    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        if uuid != b"MIG-1":
            raise Missing
        return 7

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=80e9, used=20e9 + gpu)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        if gpu == 7:
            raise Missing
        return SimpleNamespace(gpu=20 + 60 * gpu, memory=1)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 7:
            raise Missing
        return 300_000

    def nvmlDeviceGetTemperature(self, gpu: int, which: int) -> int:
        return 40 + gpu


def test_a_gpu_has_all_counters_and_a_device_of_two_has_them_joined():
    parts = {GPU: DeviceParts(gpus=("0",)), PAIR: DeviceParts(gpus=("0", "1")), MIG: DeviceParts(gpus=("MIG-1",))}
    found = read_hardware(parts, FakeDriver()).devices
    assert found[str(GPU)] == {
        "memory_bytes": 80e9, "memory_used_bytes": 20e9, "use": 0.2, "power_w": 300.0, "temperature_c": 40.0,
    }  # fmt: skip
    assert found[str(PAIR)] == {
        "memory_bytes": 160e9, "memory_used_bytes": 40e9 + 1, "use": 0.5, "power_w": 600.0, "temperature_c": 41.0,
    }  # fmt: skip
    assert set(found[str(MIG)]) == {"memory_bytes", "memory_used_bytes", "temperature_c"}


@pytest.mark.parametrize("parts", [DeviceParts(gpus=("0",)), DeviceParts(gpus=("GPU-gone",)), DeviceParts()])
def test_what_has_no_counter_is_left_out(parts):
    driver = FakeDriver() if parts.gpus == ("GPU-gone",) else None
    found = read_hardware({GPU: parts}, driver)
    assert found.devices == {}
    assert found.host_memory_bytes == psutil.virtual_memory().total


def test_readings_reach_the_log_until_it_is_closed(tmp_path: Path):
    with RunLog.create(tmp_path / "run", run_header(policy="solo", backend="local")) as log:
        notes = HardwareNotes(log, {CORE: DeviceParts(cores=(0,))}, every_s=0.01)

        def is_in_log() -> bool:
            notes.update(1.0, (), (), ())
            log.commit()
            with LogReader(log.folder) as reader:
                return any(entry.type == "hardware" for entry in reader.entries())

        waiting.until(is_in_log, "a reading in the log")
        notes.close()
    with LogReader(tmp_path / "run") as reader:
        reading = next(entry.note for entry in reader.entries() if entry.type == "hardware")
    assert 0.0 <= reading.devices[str(CORE)]["use"] <= 1.0
    assert 0.0 < reading.host_memory_used_bytes < reading.host_memory_bytes


def test_a_machine_without_a_driver_has_no_counters_of_gpus():
    with nvml() as driver:
        if driver is not None:
            pytest.skip("this machine has GPUs")
        assert driver is None

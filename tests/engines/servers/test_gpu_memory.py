"""Memory of a server's processes on a GPU, with a driver and a GPU that are made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmux.engines.servers.gpu_memory import GpuMemory


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two GPUs, with what is free of each and the memory of processes on each; the driver can be taken away."""
    made = SimpleNamespace(free=[70e9, 80e9], processes=[{11: 5e9, 12: 4e9}, {11: 6e9}], is_there=True)

    def processes(handle: bytes) -> list[Any]:
        if not made.is_there:
            raise NVMLError
        index = int(handle.decode().removeprefix("GPU-gpu"))
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in made.processes[index].items()]

    class NVMLError(Exception):
        pass

    driver = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=processes,
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (made.free[index], 80e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu{index}"))
    return made


def test_only_the_servers_own_processes_count_whatever_else_is_on_its_gpus(gpus):
    memory = GpuMemory()
    assert (memory.count, memory.device_bytes, memory.free_bytes()) == (2, 160e9, 150e9)
    gpus.free = [10e9, 20e9]
    assert memory.used_by({11}) == 11e9
    assert memory.used_by({11, 12}) == 15e9


def test_what_is_gone_counts_where_the_driver_knows_none_of_them(gpus):
    memory = GpuMemory()
    gpus.free = [60e9, 77e9]
    assert memory.used_by({99}) == 13e9
    gpus.is_there = False
    assert memory.used_by({11}) == 13e9

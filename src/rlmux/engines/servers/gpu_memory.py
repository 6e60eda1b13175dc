"""Device memory of a server's processes, by the driver's own count (NVML).

What is gone of a GPU is not the server's alone: another pipeline may load there meanwhile. In a container that has a
numbering of processes of its own the driver's numbers are others; what is gone counts there. Not run on a GPU.

A module of its own: it alone asks the driver, and tests take another in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch


class GpuMemory:
    """The GPUs that this process sees."""

    def __init__(self) -> None:
        self.count = torch.cuda.device_count()
        self._free_before = self.free_bytes()

    @property
    def device_bytes(self) -> float:
        """Memory of all of them."""
        return float(sum(torch.cuda.mem_get_info(index)[1] for index in range(self.count)))

    def free_bytes(self) -> float:
        """Free memory of all of them."""
        return float(sum(torch.cuda.mem_get_info(index)[0] for index in range(self.count)))

    def used_by(self, pids: Collection[int]) -> float:
        """Bytes that these processes hold; what is gone since this object was made where the driver knows none."""
        counted = self._counted(pids)
        return max(0.0, self._free_before - self.free_bytes()) if counted is None else counted

    def _counted(self, pids: Collection[int]) -> float | None:
        found: list[int] = []
        with contextlib.suppress(ImportError):
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                for index in range(self.count):
                    uuid = torch.cuda.get_device_properties(index).uuid
                    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
                    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                        if process.pid in pids and process.usedGpuMemory is not None:
                            found.append(process.usedGpuMemory)
        return float(sum(found)) if found else None

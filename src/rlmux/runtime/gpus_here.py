"""The GPUs of this machine, found without torch, which is slow to load, and without a call of their driver."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

_DRIVER = Path("/dev/nvidiactl")
_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> list[str]:
    """Every GPU that may be used, as CUDA_VISIBLE_DEVICES names it. Found without torch, which is slow to load."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        is_cpu_build = "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    if is_cpu_build or not _DRIVER.exists():
        return []
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(index) for index in range(len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 1)]


def name_of_gpu() -> str | None:
    """Name of this machine's first GPU, as its driver has it; None without one."""
    for information in sorted(_GPUS.glob("*/information")) if visible_gpus() else ():
        for line in information.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return None

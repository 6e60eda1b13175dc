"""The machine that a file is written for: a number of GPUs of one kind.

--gpus 8x80: by memory, 8xH100: by name ──┐
this machine's GPUs, by their driver ─────┴──▶ GpuMachine
"""

from __future__ import annotations

import re

from rlmux.core.errors import UserError
from rlmux.profiling.gpu_choice import GpuMachine
from rlmux.sim.models.hardware import GpuSpec, gpu_spec, gpu_specs

_MAX_GPUS = 16
"""GPUs of the largest machine that is sold as one."""
_HOST_GB_OF_GB = 2.75
"""Host memory beside a GB of GPU memory where none is known: 2 TB for eight of 80 GB, of which `run` takes 90 %."""
_USUAL = "H100-80GB-SXM"
"""The kind that is taken where several have the memory that was asked for."""


def known_gpus() -> list[str]:
    """Every GPU of the table by its shortest name: `H100`, and `A100-80GB` where one of 40 GB is there too."""
    return [_short_name(spec) for spec in gpu_specs().values()]


def with_as_much_memory(machine: GpuMachine) -> list[str]:
    """Names of the other kinds of GPU with as much memory."""
    return [name for name in known_gpus() if name != machine.gpu and gpu_spec(name).hbm_gb == machine.memory_gb]


def machine_of(text: str) -> GpuMachine:
    """The machine of `8x80` or `8xH100`. Raises UserError, with the GPUs that are known."""
    matched = re.fullmatch(r"(\d{1,4})x(\S+)", text.strip(), re.IGNORECASE)
    spec = None if matched is None else _spec_of(matched[2])
    if matched is None or spec is None or not 1 <= int(matched[1]) <= _MAX_GPUS:
        memories = ", ".join(f"{each:g}" for each in sorted({spec.hbm_gb for spec in gpu_specs().values()}))
        raise UserError(
            f"--gpus {text!r}: accepted: from 1 to {_MAX_GPUS} GPUs as NUMBERxGB, such as 8x80, with {memories} GB, or "
            f"as NUMBERxNAME with {', '.join(known_gpus())}"
        )
    host_gb = _rounded(spec.hbm_gb * _HOST_GB_OF_GB)
    return GpuMachine(num_gpus=int(matched[1]), gpu=_short_name(spec), memory_gb=spec.hbm_gb, host_gb=host_gb)


def machine_here() -> GpuMachine | None:
    """This machine; None without GPUs, and where no table has their kind."""
    from rlmux.runtime import gpus_here
    from rlmux.runtime.memory.memory_budget import USABLE_OF_HOST, MachineMemory

    gpus, name = gpus_here.visible_gpus(), gpus_here.name_of_gpu()
    if not gpus or name is None:
        return None
    try:
        spec = gpu_spec(name)
    except UserError:
        return None
    host_gb = _rounded(MachineMemory().host_bytes / 1e9 * USABLE_OF_HOST / len(gpus))
    return GpuMachine(
        num_gpus=len(gpus), gpu=_short_name(spec), memory_gb=spec.hbm_gb, host_gb=host_gb, is_host_known=True
    )


def _spec_of(word: str) -> GpuSpec | None:
    if re.fullmatch(r"\d+", word):
        found = [spec for spec in gpu_specs().values() if spec.hbm_gb == int(word)]
        return next((spec for spec in found if spec.name == _USUAL), found[0] if found else None)
    try:
        return gpu_spec(word)
    except UserError:
        return None


def _rounded(gigabytes: float) -> float:
    """Down to tens, as far as that leaves something."""
    return max(1.0, gigabytes // 10 * 10)


def _short_name(spec: GpuSpec) -> str:
    first, memory = spec.name.split("-")[:2]
    num_alike = sum(other.startswith(f"{first}-") for other in gpu_specs())
    return first if num_alike == 1 else f"{first}-{memory}"

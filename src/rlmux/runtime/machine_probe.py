"""The machine's host and GPU memory, read from the system and the GPU driver.

    describe_machine ──▶ a process that sees the GPUs as a worker does ── cudaMemGetInfo ──▶ driver

The controller itself never touches a GPU: a context there would take memory for the whole run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlmux.core.errors import RlmuxError, UserError
from rlmux.core.model import Cluster
from rlmux.runtime.gpus_here import visible_gpus
from rlmux.runtime.local import assign_gpus
from rlmux.runtime.memory.memory_budget import MachineMemory
from rlmux.runtime.workers.processes import WorkerProcess, warm_up

_ANSWER_LIMIT_S = 120.0
"""Seconds within which the driver must answer; the first call to CUDA on a large machine takes some ten."""


class GpuDriver:
    """Queries the driver about the GPUs visible to its process; lives in a process of its own."""

    def free_bytes(self) -> list[int]:
        """Free memory of each GPU, in the order of CUDA_VISIBLE_DEVICES.

        Raises UserError where torch cannot use the GPUs.
        """
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                "this machine has GPUs that torch cannot use; install a torch build for their driver, or set "
                "CUDA_VISIBLE_DEVICES to nothing to train on CPU cores"
            )
        return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]


def describe_machine(
    cluster: Cluster, *, gpus: Sequence[str] | None = None, make_driver: Callable[[], GpuDriver] = GpuDriver
) -> MachineMemory:
    """The memory of this machine and of the GPUs that the cluster's devices stand for.

    `gpus` are the names of those that may be used, by default all that are visible. Raises UserError where their
    driver does not answer.
    """
    gpus = visible_gpus() if gpus is None else gpus
    if not gpus:
        return MachineMemory()
    free_bytes = _read_free_bytes(make_driver, gpus)
    if len(free_bytes) != len(gpus):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(gpus)}: names {len(gpus)} GPUs, of which the driver has "
            f"{len(free_bytes)}; accepted: GPUs that nvidia-smi lists"
        )
    return MachineMemory(
        gpu_by_device=assign_gpus(cluster, gpus), free_bytes_by_gpu=dict(zip(gpus, map(float, free_bytes), strict=True))
    )


def _read_free_bytes(make_driver: Callable[[], GpuDriver], gpus: Sequence[str]) -> list[int]:
    warm_up()
    process = WorkerProcess(
        "driver",
        make_driver,
        (),
        cores=(),
        gpu=",".join(gpus),
        log_path=Path(os.devnull),
        call_limit_s=_ANSWER_LIMIT_S,
    )
    answers: list[list[int]] = []
    try:
        process.call(time.monotonic(), "free_bytes", (), answers.append)
        if process.connection.poll(_ANSWER_LIMIT_S):
            process.receive(time.monotonic())
    except UserError:
        raise
    except RlmuxError as error:
        raise UserError(f"the memory of GPUs {', '.join(gpus)} is not known: {error}") from error
    finally:
        process.end()
    if not answers:
        raise UserError(f"the memory of GPUs {', '.join(gpus)} is not known: no answer in {_ANSWER_LIMIT_S:.0f} s")
    return answers[0]

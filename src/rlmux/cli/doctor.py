"""What this machine can do, what is missing, what that means, and what to do about it.

    examine() ──▶ [Finding]        each check looks at one thing and never raises
                                   torch is looked at from a process of its own: it is slow, and may be broken

A finding that is not ok names the missing feature and the command that fixes it.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from rlmux.hidden_main import hidden_main

_GB = 1e9
_PROBE_LIMIT_S = 120
_FIRST_WITH_ACTIONS = 570
"""First driver, and tool, whose lock of a process can time out (github.com/NVIDIA/cuda-checkpoint)."""
_FIRST_WITH_IPC = 610
"""First driver that moves processes that share memory of a GPU."""
_DRIVER_VERSION = re.compile(r"\b(\d{3,4})\.\d+(?:\.\d+)*\b")
_TRAINING = ("torch", "transformers", "safetensors", "tokenizers")
_EXTRAS = {
    "tensorboard": ("train", "no TensorBoard events; metrics.jsonl is written all the same"),
    "reasoning-gym": ("envs", "no reasoning-gym:NAME tasks"),
    "gymnasium": ("envs", "no gymnasium environments"),
    "pyarrow": ("parquet", "no parquet files of prompts; JSONL works"),
    "ortools": ("solver", "no policy 'gavel'"),
    "ray": ("ray", "one machine only: no backend over many"),
}
"""(extra that brings the package, what cannot be done without it), by package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one question."""

    name: str
    is_ok: bool
    value: str
    """What was found."""
    meaning: str = ""
    """What cannot be done; empty where all is well."""
    remedy: str = ""
    """Command or change that mends it; empty where there is none."""


def examine() -> list[Finding]:
    """All checks, in the order in which a newcomer meets them."""
    torch = probe_torch()
    return [
        check_python(),
        check_cores(),
        check_memory(),
        check_shared_memory(),
        check_runs_folder(),
        check_fork_server(),
        *(check_package(name, "train", "no training: run and compare do not work") for name in _TRAINING),
        check_torch_import(torch),
        check_gpus(torch),
        check_green_contexts(torch),
        check_mps(torch),
        check_fractions(torch),
        check_cuda_checkpoint(),
        *(check_package(name, extra, meaning) for name, (extra, meaning) in _EXTRAS.items()),
    ]


def show(findings: list[Finding], *, as_json: bool) -> None:
    """One line per finding; what to do stands below it."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{'ok     ' if finding.is_ok else 'missing'}  {finding.name.ljust(width)}  {finding.value}")
        if finding.meaning:
            print(f"{' ' * (width + 11)}{finding.meaning}")
        if finding.remedy:
            print(f"{' ' * (width + 11)}do: {finding.remedy}")


def check_python() -> Finding:
    value = f"{platform.python_version()} ({sys.executable})"
    return Finding(name="python", is_ok=True, value=value)


def check_cores() -> Finding:
    mine = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota()
    value = f"{len(mine)} of {os.cpu_count()} cores may be used ({core_ranges(mine)})"
    if quota is not None and quota < len(mine):
        return Finding(
            name="cores",
            is_ok=False,
            value=f"{value}, limited to {quota:g} cores' worth of time",
            meaning="devices of CPU pools share that time, so they slow each other down",
            remedy="give the container more CPU, or lend the pools no more devices than that",
        )
    if len(mine) < 2:
        return Finding(
            name="cores",
            is_ok=False,
            value=value,
            meaning="a rollout and a training device share one core: all works, nothing is gained by sharing",
            remedy="use a machine with two cores or more",
        )
    return Finding(name="cores", is_ok=True, value=value)


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    limit = _number_in(Path("/sys/fs/cgroup/memory.max"))
    value = f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB are free"
    if limit is not None and limit < memory.total:
        value += f"; the container is limited to {limit / _GB:.1f} GB"
    return Finding(name="memory", is_ok=True, value=value)


def check_shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(
            name="/dev/shm",
            is_ok=False,
            value="absent or not writable",
            meaning="weights go from trainer to rollout workers through ordinary files, which is slower",
            remedy="mount a tmpfs there (docker: --shm-size)",
        )
    free = shutil.disk_usage(folder).free
    if free < _GB:
        return Finding(
            name="/dev/shm",
            is_ok=False,
            value=f"{free / _GB:.2f} GB are free",
            meaning="weights of all pipelines together must fit there",
            remedy="enlarge it (docker: --shm-size 8g)",
        )
    return Finding(name="/dev/shm", is_ok=True, value=f"{free / _GB:.1f} GB are free")


def check_runs_folder() -> Finding:
    folder = Path("runs").absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding(
            name="runs folder",
            is_ok=False,
            value=f"{nearest} cannot be written to: {error.strerror}",
            meaning="runs have nowhere to go by default",
            remedy="change to a folder of your own, or give --out",
        )
    free = shutil.disk_usage(nearest).free
    return Finding(name="runs folder", is_ok=True, value=f"{folder} is writable, {free / _GB:.0f} GB free")


def check_fork_server() -> Finding:
    """Starts a process the way workers are started."""
    started_s = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    try:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs,), daemon=True)
        with hidden_main():
            process.start()
        answered = ours.poll(_PROBE_LIMIT_S) and ours.recv() == process.pid
        process.join()
    except (OSError, EOFError) as error:
        return _no_fork_server(str(error))
    if not answered:
        return _no_fork_server("a process was started and did not answer")
    seconds = time.perf_counter() - started_s
    return Finding(name="forkserver", is_ok=True, value=f"works: server and a first process in {seconds:.2f} s")


def _no_fork_server(problem: str) -> Finding:
    return Finding(
        name="forkserver",
        is_ok=False,
        value=problem,
        meaning="worker processes cannot be started: run and compare do not work",
        remedy="allow Unix sockets in the temporary folder (TMPDIR)",
    )


def _answer(connection: Connection) -> None:
    connection.send(os.getpid())


def check_package(name: str, extra: str, meaning: str) -> Finding:
    try:
        return Finding(name=name, is_ok=True, value=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install torch" if name == "torch" else f"pip install 'rlmux[{extra}]'"
        return Finding(name=name, is_ok=False, value="not installed", meaning=meaning, remedy=remedy)


_TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch
found = {"import_s": time.perf_counter() - start, "cuda": torch.version.cuda, "gpus": [], "green": None}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found["gpus"].append([gpu.name, f"{gpu.major}.{gpu.minor}", gpu.multi_processor_count, free, total])
    try:
        from torch.cuda.green_contexts import GreenContext
        context = GreenContext.create(num_sms=8, device_id=0)
        context.set_context()
        torch.ones(8, device="cuda").sum().item()
        context.pop_context()
        found["green"] = ""
    except Exception as error:  # whatever the driver raises is the finding
        found["green"] = f"{type(error).__name__}: {error}"
from dataclasses import asdict
from rlmux.engines.device_fraction import probe
found["fractions"] = [asdict(probe(device)) for device in (["cpu", "cuda"] if found["gpus"] else ["cpu"])]
print(json.dumps(found))
"""


def probe_torch() -> dict[str, Any] | None:
    """What a process of its own finds out about torch; None without it; `error` if it cannot be imported."""
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_PROBE_LIMIT_S} s"}
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {probe.returncode}"}
    found: dict[str, Any] = json.loads(probe.stdout.strip().splitlines()[-1])
    return found


def check_torch_import(torch: dict[str, Any] | None) -> Finding:
    name = "import torch"
    if torch is None:
        return Finding(name=name, is_ok=False, value="not installed")
    if "error" in torch:
        return Finding(
            name=name,
            is_ok=False,
            value=torch["error"],
            meaning="torch is installed but cannot be imported: no training",
            remedy="pip install --force-reinstall torch",
        )
    build = f"CUDA {torch['cuda']} build" if torch["cuda"] else "CPU build"
    return Finding(name=name, is_ok=True, value=f"{torch['import_s']:.1f} s, once per run; {build}")


def check_gpus(torch: dict[str, Any] | None) -> Finding:
    gpus = (torch or {}).get("gpus", [])
    if gpus:
        shown = [
            f"{index}: {name}, compute {compute}, {sms} SMs, {free / _GB:.0f} of {total / _GB:.0f} GB free"
            for index, (name, compute, sms, free, total) in enumerate(gpus)
        ]
        return Finding(name="GPUs", is_ok=True, value="; ".join(shown))
    if not Path("/dev/nvidiactl").exists():
        meaning, remedy = "pools are made of CPU cores: tiny models only", ""
    elif torch and "error" not in torch and not torch["cuda"]:
        meaning = "there is an NVIDIA driver, but this torch is a CPU build"
        remedy = "pip install torch, from the index at https://pytorch.org that fits the driver"
    else:
        meaning = "there is an NVIDIA driver, but torch sees no GPU"
        remedy = "see nvidia-smi, CUDA_VISIBLE_DEVICES, and whether driver and torch fit"
    return Finding(name="GPUs", is_ok=False, value="none that torch sees", meaning=meaning, remedy=remedy)


def check_green_contexts(torch: dict[str, Any] | None) -> Finding:
    name = "green contexts"
    problem = (torch or {}).get("green")
    if problem == "":
        return Finding(name=name, is_ok=True, value="one with 8 SMs was made and used")
    return Finding(
        name=name,
        is_ok=False,
        value=problem or "no GPU",
        meaning="pipelines use one GPU one after another; a process cannot be held to a part of its SMs",
        remedy="a GPU, CUDA 12.4 or newer, and torch 2.10 or newer" if problem else "",
    )


def check_mps(torch: dict[str, Any] | None) -> Finding:
    name = "MPS"
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    control = shutil.which("nvidia-cuda-mps-control")
    if control is not None and (pipe / "control").exists():
        return Finding(name=name, is_ok=True, value=f"its daemon listens in {pipe}")
    return Finding(
        name=name,
        is_ok=False,
        value="its daemon is not running" if control else "not installed" if (torch or {}).get("gpus") else "no GPU",
        meaning="processes of different pipelines never compute on one GPU at the same time",
        remedy="nvidia-cuda-mps-control -d" if control else "",
    )


def check_fractions(torch: dict[str, Any] | None) -> Finding:
    """Device fractions that two pipelines can be given at once; `rlmux profile` measures what they are worth."""
    name = "device fractions"
    found = (torch or {}).get("fractions", [])
    if not found:
        return Finding(name=name, is_ok=False, value="unknown", meaning="every order has its devices alone")
    parts = []
    for device in found:
        fractions = ", ".join(f"{fraction:.0%}" for fraction in device["prepared"])
        parts.append(
            f"{device['device']}: " + (f"{fractions} by {device['how']}" if fractions else f"none: {device['missing']}")
        )
    is_ok = any(device["prepared"] for device in found)
    return Finding(
        name=name,
        is_ok=is_ok,
        value="; ".join(parts),
        meaning="" if is_ok else "one device cannot be divided between two pipelines: each order has it alone",
    )


def check_cuda_checkpoint(tool: str = "cuda-checkpoint", driver: Path = Path("/proc/driver/nvidia")) -> Finding:
    """Whether `RLMUX_OFFLOAD=cuda-checkpoint` would work: driver, tool, devices that are whole."""
    name, meaning = "cuda-checkpoint", "programs under permits leave a device by hooks of their own alone"
    if not driver.is_dir():
        return Finding(name=name, is_ok=False, value="no GPU", meaning=meaning)
    of_driver = _DRIVER_VERSION.search(_text_in(driver / "version") or "")
    value, remedy = "", ""
    found = shutil.which(tool)
    if of_driver is None:
        value = f"no version in {driver / 'version'}"
    elif int(of_driver[1]) < _FIRST_WITH_ACTIONS:
        value, remedy = f"driver {of_driver[0]}", f"a driver of version {_FIRST_WITH_ACTIONS} or newer"
    elif found is None:
        value = f"driver {of_driver[0]}, and no {tool} on PATH"
        remedy = "the program of https://github.com/NVIDIA/cuda-checkpoint, in a folder of PATH"
    elif any(driver.glob("capabilities/gpu*/mig/gi*")):
        value, remedy = "MIG devices, which it does not move", "GPUs without MIG"
    if value or found is None or of_driver is None:
        return Finding(name=name, is_ok=False, value=value, meaning=meaning, remedy=remedy)
    version, problem = _version_of_tool(found)
    if problem:
        remedy = f"a {tool} of version {_FIRST_WITH_ACTIONS} or newer"
        return Finding(name=name, is_ok=False, value=f"{found}: {problem}", meaning=meaning, remedy=remedy)
    of_one = "" if int(of_driver[1]) >= _FIRST_WITH_IPC else "; not for processes that share GPU memory, as NCCL's do"
    return Finding(name=name, is_ok=True, value=f"{version} ({found}), driver {of_driver[0]}{of_one}")


def _version_of_tool(path: str) -> tuple[str, str]:
    """(its version; its problem, or empty)"""
    try:
        process = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=_PROBE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"cannot be run: {error}"
    text = process.stdout + process.stderr
    version = re.search(r"Version (\d[\d.]*\d)", text)
    label = version[1] if version else "unknown version"
    return label, "" if "--action" in text else f"{label} has no --action"


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container may use; None for no limit."""
    text = _text_in(Path("/sys/fs/cgroup/cpu.max"))
    quota, _, period = (text or "max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _number_in(path: Path) -> int | None:
    text = _text_in(path)
    return int(text) if text is not None and text.isdecimal() else None


def _text_in(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def core_ranges(cores: list[int]) -> str:
    """0-3,6 for 0 1 2 3 6."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][-1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

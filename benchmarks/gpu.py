"""One device, everything that sharing it depends on, in one command.

    python benchmarks/gpu.py [--device cuda|cpu] [--quick] [--parts switches,promise,...] [--policies LIST]
                             [--interference FILE] [--runs DIR] [--vllm-python PATH] [--out FILE]

    switches       seconds from host to device and back of a rollout and of a train engine
    promise        what the probe finds that engines promise in float32 and in bfloat16, with the slots of `pipelines`:
                   ours, and vLLM where `--vllm-python` names an environment that has it
    offload        seconds in which `cuda-checkpoint` takes 1 GB of another program off the GPU and back, GB freed
    publishing     `publishing.py`: seconds in which a version reaches a rollout worker, of 0.6B and 8B
    engines        sampled tokens per second of a full batch, and what the engine promises: ours, and vLLM as above
    curves         units per second of prefill, dense and tail decoding, log-probs and updates alone, by fraction
    interference   each pair side by side, by device fraction: the table of `rlmux profile`
    memory         `memory.py`: bytes counted and measured of train and rollout workers
    fractions      seconds a step of two real pipelines at once: on the whole device, and at one fraction of it by MPS
                   and by green contexts
    pipelines      two real pipelines on the one device under each of six policies; those that share sub-stages
                   place them side by side at the fractions that the interference table found to help: the
                   one measured in this command, or in an earlier one on such a device (`--interference FILE`).
                   `--runs DIR` keeps the folders of the runs, without their checkpoints

The pipelines' model has the depth and width of Qwen3-0.6B (28 layers of 1024, 8 heads of 128) and the built-in
vocabulary, with random weights: nothing is downloaded.

The machine is checked first: what it lacks is printed, with what is left out for it, before anything is measured. Parts
run in the order above. Each is printed and written as it ends; one that breaks is named, leaves the others their turn
and makes the exit code 1. Without a running MPS daemon one is started for this command's own
processes where NVIDIA's control program is installed (`--no-mps` leaves that out): without it, processes on one GPU
take turns, so that side by side is no different. Results go to benchmarks/results/DEVICE.json.

The same code runs on a CPU core with `--device cpu`, and with `--quick` where there is no GPU, which is how it is
tested; there fractions are those of one core's time, so nothing can be gained by them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from memory import TOLERANCE, measure
from publishing import publishing
from substages import from_log

from rlmux.cli.doctor import check_cuda_checkpoint
from rlmux.core.actions import RunStage
from rlmux.core.decision.policy import Policy
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.events import StageFinished, StagePaused
from rlmux.core.model import Cluster, Phase, Pipeline, PipelineId, Pool, Stage, SubStage
from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.device_fraction import WHOLE, DeviceFractions, mps_problem, probe
from rlmux.engines.rollout.protocol import RolloutEngine
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.servers.factory import make_server_engine
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.profiling.interference_probe import QUICK, measure_interference
from rlmux.profiling.micro_benchmarks import (
    BENCHMARK_SUB_STAGES,
    BenchmarkSizes,
    benchmark_processes,
    rates,
    usual_sizes,
)
from rlmux.profiling.profile_file import load_sharing
from rlmux.rl.config import (
    AlgorithmConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TaskConfig,
    TrainingConfig,
)
from rlmux.rl.determinism_class import determinism_class_of
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import load_vocabulary
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.run import RunOptions, run_pipelines
from rlmux.share import cuda_checkpoint

PARTS = (
    *("switches", "promise", "offload", "publishing", "engines", "curves", "interference", "memory", "fractions"),
    "pipelines",
)
POLICIES = ("colocated", "solo", "fifo", "rollmux", "jigsaw", "rlmux")
"""The first is what the others are compared with."""
OURS: Mapping[str, Mapping[str, Any]] = {
    "rlmux": {},
    "rlmux, no graphs": {"uses_graphs": False},
    "rlmux, no graphs, a look after each step": {"uses_graphs": False, "steps_at_once": 1},
}
"""Our engine as it is used, and what each of its means on a GPU is worth; all give the same answers."""
RESULTS = Path(__file__).parent / "results"
QUICK_SIZES = BenchmarkSizes(
    model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64),
    num_slots=8,
    num_tail=2,
    prompt_tokens=16,
    new_tokens=32,
    num_prompts=4,
    micro_batch_size=4,
    train_tokens=16,
)
PAIR = ("sort", "reverse")
"""The two pipelines, with seeds 1 and 2."""
MEMORY_SHAPES = ("weights", "activations", "kv", "bfloat16", "rounded", "folder", "sum", "eightbit")
PUBLISHED_GB = {"0.6B": (4, 3), "8B": (40, 36)}
"""Free memory that publishing a model of this size takes: of the GPU, and of /dev/shm for two versions."""
HELD = """
import torch
held = torch.arange(2**28, dtype=torch.int32, device="cuda")
print(held.sum().item(), flush=True)
input()
print(held.sum().item())
"""
"""A program that knows nothing of rlmux and holds 1.07 GB on the GPU."""
STAGES = (Stage.GENERATE, Stage.REWARD, Stage.OLD_LOGPROBS, Stage.UPDATE, Stage.PUBLISH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda; a core with --quick where there is none")
    parser.add_argument("--quick", action="store_true", help="tiny models, short windows: to see that it works")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        help="the first is what others are compared with",
    )
    parser.add_argument("--interference", type=Path, metavar="FILE", help="an earlier result with such a part")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keeps the runs of the pipelines part, for a look")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--vllm-python", metavar="PATH", help="python of an environment that has vLLM")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts {unknown[0]}; accepted: {', '.join(PARTS)}")
    policies = args.policies.split(",")
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        parser.error(f"--policies {unknown[0]}; accepted: {', '.join(POLICIES)}")
    device = chosen_device(args.device, is_quick=args.quick)
    torch.set_num_threads(1)
    with mps_daemon(is_wanted=device == "cuda" and not args.no_mps) as mps:
        fractions = probe(device)
        about = machine(device, fractions, mps)
        path = args.out or RESULTS / f"{slug(about['device'])}{'-quick' if args.quick else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        num_repeats = 1 if args.quick else args.repeats
        absent = left_out(device, fractions, args.vllm_python, is_quick=args.quick)
        absent = {name: why for name, why in absent.items() if name.partition(":")[0] in parts}
        result: dict[str, Any] = {"machine": about, "is_quick": args.quick, "left_out": absent}
        say("\n".join(machine_lines(result)))
        table = None if args.interference is None else json.loads(args.interference.read_text())["interference"]
        runs = args.runs.absolute() if args.runs is not None else None
        of_pipelines = partial(pipelines, policies=policies, table=table, runs=runs)
        for name, part in parts_of(
            device,
            fractions,
            of_pipelines,
            is_quick=args.quick,
            num_repeats=num_repeats,
            vllm_python=args.vllm_python,
        ).items():
            if name not in parts or name in absent:
                continue
            say(name)
            start = time.perf_counter()
            try:
                result[name] = part(result)
            except (Exception, SystemExit) as error:  # a part that breaks leaves the others their turn
                traceback.print_exc()
                result.setdefault("broken", {})[name] = f"{type(error).__name__}: {error}"
            result.setdefault("seconds", {})[name] = round(time.perf_counter() - start, 1)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()  # the next part's processes need it
            say("\n".join(lines_of({key: result[key] for key in (name,) if key in result})))
            say(f"{name}: {result['seconds'][name]} s, written: {path}")
    print("\n".join([*machine_lines(result), *lines_of(result)]))
    print(f"written: {path}")
    sys.exit(1 if "broken" in result else 0)


def chosen_device(asked: str | None, *, is_quick: bool) -> str:
    """Ends the command where a GPU is needed and there is none."""
    if asked == "cpu" or torch.cuda.is_available():
        return asked or "cuda"
    if asked is None and is_quick:
        say("torch sees no CUDA device: --quick runs on a core")
        return "cpu"
    sys.exit("torch sees no CUDA device (rlmux doctor says more); --device cpu runs the same code on a core")


def parts_of(
    device: str,
    fractions: DeviceFractions,
    of_pipelines: Callable[..., dict[str, Any]],
    *,
    is_quick: bool,
    num_repeats: int,
    vllm_python: str | None,
) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """Each part, in order: what was found before in, what it finds out."""
    sizes = QUICK_SIZES if is_quick else usual_sizes(device)
    window: Mapping[str, Any] = QUICK if is_quick else {"window_s": 0.5, "num_rounds": num_repeats}
    sub_stages: Sequence[SubStage] = (SubStage.TAIL_DECODE, SubStage.UPDATE) if is_quick else BENCHMARK_SUB_STAGES

    def interference(result: dict[str, Any]) -> dict[str, Any]:
        return measure_interference(device, sub_stages=sub_stages, sizes=sizes, **window).to_json()

    return {
        "switches": lambda result: switches(device, sizes, num_repeats=1 if is_quick else 5),
        "promise": lambda result: promise(device, vllm_python, is_quick=is_quick),
        "offload": lambda result: offload(num_repeats),
        "publishing": lambda result: {
            size: publishing(size, device, 1 if size == "8B" else num_repeats)
            for size in published_sizes(device, is_quick=is_quick)
            if f"publishing: {size}" not in result["left_out"]
        },
        "engines": lambda result: engines(device, vllm_python, is_quick=is_quick),
        "curves": lambda result: curves(device, fractions, sizes, is_quick=is_quick, **window),
        "interference": interference,
        "memory": lambda result: memory(device, is_quick=is_quick),
        "fractions": lambda result: side_by_side(device, fractions, result["left_out"], is_quick=is_quick),
        "pipelines": lambda result: of_pipelines(
            device, fractions, measured=result.get("interference"), is_quick=is_quick, num_repeats=num_repeats
        ),
    }


# --- the machine --------------------------------------------------------------------------------------------


def machine(device: str, fractions: DeviceFractions, mps: str) -> dict[str, Any]:
    return {
        "device": fractions.device,
        "num_units": fractions.num_units,
        "driver": driver() if device == "cuda" else None,
        "free_gb": free_gb() if device == "cuda" else None,
        "cuda_checkpoint": check_cuda_checkpoint().value,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "levels": fractions.prepared,
        "levels_by": fractions.how,
        "missing": fractions.missing,
        "mps": mps,
    }


def left_out(device: str, fractions: DeviceFractions, vllm_python: str | None, *, is_quick: bool) -> dict[str, str]:
    """Why this machine cannot measure something, by its name: "PART", or "PART: WHAT" for one figure of a part."""
    found = {}
    checkpoint = check_cuda_checkpoint()
    if device == "cpu":
        found["offload"] = "a core has no memory of its own"
        found["fractions: MPS"] = "a core has no MPS"
    else:
        if not checkpoint.is_ok:
            found["offload"] = f"{checkpoint.value}; needed: {checkpoint.remedy or 'a GPU that it moves'}"
        if mps_problem():
            found["fractions: MPS"] = mps_problem()
    if not fractions.prepared:
        found["fractions: orders"] = fractions.missing
    for size in published_sizes(device, is_quick=is_quick):
        on_device, in_files = PUBLISHED_GB.get(size, (0, 0))
        shared = shutil.disk_usage("/dev/shm").free / 1e9
        if device == "cuda" and free_gb() < on_device:
            found[f"publishing: {size}"] = f"{free_gb():.0f} GB of the GPU are free; needed: {on_device}"
        elif shared < in_files:
            found[f"publishing: {size}"] = f"{shared:.0f} GB of /dev/shm are free; needed: {in_files}"
    if vllm_python is None:
        found |= {f"{part}: vllm": "needed: --vllm-python PATH" for part in ("promise", "engines")}
    return found


def published_sizes(device: str, *, is_quick: bool) -> Sequence[str]:
    return tuple(PUBLISHED_GB) if device == "cuda" and not is_quick else ("20MB",)


def free_gb() -> float:
    """GB of the GPU's memory that no process holds."""
    return torch.cuda.mem_get_info()[0] / 1e9


def driver() -> str:
    """Version of NVIDIA's driver, as its tool tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


@contextlib.contextmanager
def mps_daemon(*, is_wanted: bool) -> Iterator[str]:
    """A daemon for the processes of this command only; says what there is."""
    control = shutil.which("nvidia-cuda-mps-control")
    running = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control"
    if not is_wanted or running.exists() or control is None:
        yield "not wanted" if not is_wanted else "was running" if running.exists() else "not installed"
        return
    with tempfile.TemporaryDirectory(prefix="rlmux-mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run([control, "-d"], env={**os.environ, **own}, capture_output=True, text=True, timeout=60)
        if started.returncode != 0:
            yield f"could not be started: {started.stderr.strip()[:200]}"
            return
        os.environ.update(own)
        try:
            yield "started for this command"
        finally:
            # This process is a client itself, so the daemon is not to wait for its clients.
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit -t 1\n", text=True, timeout=20, capture_output=True)
            for name in own:
                del os.environ[name]


# --- the parts ----------------------------------------------------------------------------------------------


def curves(
    device: str, fractions: DeviceFractions, sizes: BenchmarkSizes, *, is_quick: bool, window_s: float, num_rounds: int
) -> dict[str, dict[str, float]]:
    """Median units per second of each sub-stage alone by device fraction, and of decoding by active sequences."""
    is_core = device == "cpu"
    core = min(os.sched_getaffinity(0)) if is_core else None
    sub_stages = ("dense", "update") if is_quick else BENCHMARK_SUB_STAGES
    found: dict[str, dict[str, list[float]]] = {sub_stage: {} for sub_stage in sub_stages}
    with benchmark_processes(sub_stages, sizes, device, core, num_each=1) as processes:
        for _ in range(num_rounds):
            for sub_stage in sub_stages:
                for fraction in (*fractions.prepared, WHOLE):
                    rate = rates([(processes[sub_stage][0], fraction)], window_s, is_core=is_core)[0]
                    found[sub_stage].setdefault(f"{fraction:.3g}", []).append(rate)
    by_active = found.setdefault("dense by active sequences", {})
    for num_active in (1,) if is_quick else sorted({1, 8, 32, sizes.num_slots}):
        few = replace(sizes, num_tail=num_active)
        with benchmark_processes(["tail"], few, device, core, num_each=1) as processes:
            for _ in range(num_rounds):
                rate = rates([(processes["tail"][0], WHOLE)], window_s, is_core=is_core)[0]
                by_active.setdefault(str(num_active), []).append(rate)
    return {sub_stage: {at: statistics.median(of) for at, of in rows.items()} for sub_stage, rows in found.items()}


def switches(device: str, sizes: BenchmarkSizes, *, num_repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of leaving the device and of coming back, and the bytes that move."""
    rollout = RolloutConfig(
        max_new_tokens=sizes.new_tokens, max_prompt_tokens=sizes.prompt_tokens, num_slots=sizes.num_slots
    )
    engines: dict[str, Any] = {
        "rollout": SlotRolloutEngine(sizes.model, rollout, vocab_size=sizes.vocab_size, seed=1, device=device),
        "train": TorchTrainEngine(TrainingConfig(name="switch", model=sizes.model), device=device),
    }
    found = {}
    for name, engine in engines.items():
        resident_bytes = engine.resident_bytes()
        seconds: dict[str, list[float]] = {"offload_s": [], "load_s": []}
        for _ in range(num_repeats + 1):
            for call in seconds:
                synchronize(device)
                start = time.perf_counter()
                engine.offload() if call == "offload_s" else engine.load()
                synchronize(device)
                seconds[call].append(time.perf_counter() - start)
        # The first round pins memory and maps it.
        found[name] = {
            "resident_bytes": resident_bytes,
            **{call: statistics.median(of[1:]) for call, of in seconds.items()},
            **{f"first_{call}": of[0] for call, of in seconds.items()},
        }
    return found


def promise(device: str, vllm_python: str | None, *, is_quick: bool) -> dict[str, dict[str, Any]]:
    """What each engine was found to promise, by its name and dtype, in batches that fill the slots of `pipelines`."""
    found = {}
    usual = submission(PAIR[0], 1, device, is_quick=is_quick).config
    vocab_size = load_vocabulary(usual.model).vocab_size
    for dtype in ("float32", "bfloat16"):
        config = replace(usual, rollout=replace(usual.rollout, dtype=dtype))
        ours = SlotRolloutEngine(config.model, config.rollout, vocab_size=vocab_size, seed=0, device=device)
        found[f"rlmux, {dtype}"] = promised(ours, config.rollout.num_slots)
        ours.offload()
        if vllm_python is not None:
            with vllm_engine(config, vllm_python, device) as theirs:
                found[f"vllm, {dtype}"] = promised(theirs, config.rollout.num_slots)
    return found


def promised(engine: RolloutEngine, num_trajectories: int) -> dict[str, Any]:
    report = probe_rollout(engine, num_trajectories=num_trajectories)
    return {
        "promise": determinism_class_of(report.checks).value,
        "checks": {check.name: check.is_equal for check in report.checks},
    }


@contextlib.contextmanager
def vllm_engine(config: TrainingConfig, python: str, device: str) -> Iterator[RolloutEngine]:
    """The pipeline's engine with a vLLM server of its own, which ends with it."""
    rollout = replace(config.rollout, engine=EngineConfig(name="vllm", python=python))
    vocab_size = load_vocabulary(config.model).vocab_size
    engine = make_server_engine(
        replace(config, rollout=rollout), vocab_size=vocab_size, is_single_turn=True, device=device
    )
    try:
        yield engine
    finally:
        engine.close()


def offload(num_repeats: int) -> dict[str, Any]:
    """Seconds and GB of each time that `cuda-checkpoint` takes another program off the GPU and brings it back.

    The program is no client of MPS: the folder that it is given has no daemon.
    """
    rounds = []
    with tempfile.TemporaryDirectory() as no_daemon:
        program = subprocess.Popen(
            [sys.executable, "-c", HELD],
            env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": no_daemon},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert program.stdout is not None
            before = program.stdout.readline()
            hooks = cuda_checkpoint([program.pid])
            for _ in range(num_repeats):
                free, start = free_gb(), time.perf_counter()
                hooks.offload()
                freed, left = free_gb() - free, time.perf_counter()
                hooks.onload()
                rounds.append({"offload_s": left - start, "onload_s": time.perf_counter() - left, "freed_gb": freed})
            after, _ = program.communicate("\n", timeout=60)
        finally:
            program.kill()
            program.wait()
    medians = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    return {**medians, "is_memory_equal": before == after, "rounds": rounds}


def memory(device: str, *, is_quick: bool) -> dict[str, Any]:
    """Bytes of each shape's workers as counted and as measured, and which are further apart than `TOLERANCE`."""
    rows = []
    for shape in ("weights",) if is_quick else MEMORY_SHAPES:
        say(f"memory: {shape}")
        rows += measure(shape, device=device)
    off = [row for row in rows if abs(row["estimated_over_measured"] - 1.0) > TOLERANCE]
    return {"rows": rows, "off": [f"{row['shape']} {row['worker']}" for row in off]}


def side_by_side(
    device: str, fractions: DeviceFractions, left_out: Mapping[str, str], *, is_quick: bool
) -> dict[str, Any]:
    """Seconds a step of two pipelines at once, each way that there is.

    whole, MPS   each pipeline in a run of its own: a process has its MPS percentage from its start to its end
    orders       both in one run, one order at the fraction and the other at the rest of the device: by green contexts
                 on a GPU, by niceness on a core
    """
    fraction = min(fractions.prepared, key=lambda one: abs(one - 0.5), default=0.5)
    found = {}
    for way in ("whole", "MPS", "orders"):
        if f"fractions: {way}" in left_out:
            continue
        say(f"fractions: {way}")
        with tempfile.TemporaryDirectory() as scratch:
            if way == "orders":
                policy = make_policy("jigsaw", sharing=shares_all_at(fraction))
                runs = [run_pair(device, policy, Path(scratch) / "run", is_quick=is_quick)]
            else:
                percent = str(round(100 * fraction)) if way == "MPS" else "100"
                alone = partial(run_alone, device, Path(scratch), is_quick)
                with (
                    patch.dict(os.environ, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=percent),
                    ProcessPoolExecutor(len(PAIR), mp_context=get_context("spawn")) as processes,
                ):
                    runs = list(processes.map(alone, PAIR))
        found[way] = {"fraction": 1.0 if way == "whole" else fraction} | {
            key: {name: value for run in runs if run is not None for name, value in run[key].items()}
            for key in ("step_s", "sha256")
        }
    hashes = {json.dumps(of["sha256"], sort_keys=True) for of in found.values()}
    return {"ways": found, "are_weights_equal": len(hashes) == 1}


def shares_all_at(fraction: float) -> SharingTable:
    """Any two sub-stages run side by side, one of them at this fraction. The slowdowns are no measurement."""
    return SharingTable.of(
        SharingEntry(sub_stage_a=a, sub_stage_b=b, device_fraction=fraction, slowdown_a=1.5, slowdown_b=1.5)
        for a, b in combinations_with_replacement(BENCHMARK_SUB_STAGES, 2)
    )


def run_alone(device: str, folder: Path, is_quick: bool, name: str) -> dict[str, Any] | None:
    """One of the two pipelines, in a process of its own."""
    torch.set_num_threads(1)
    return run_pair(device, make_policy("colocated"), folder / name, is_quick=is_quick, names=(name,))


def pipelines(
    device: str,
    fractions: DeviceFractions,
    *,
    policies: Sequence[str],
    table: Mapping[str, Any] | None,
    runs: Path | None,
    measured: Mapping[str, Any] | None,
    is_quick: bool,
    num_repeats: int,
) -> dict[str, Any]:
    """Tokens per second of two pipelines with long tails on the one device, under each policy in turn.

    Args:
        policies: names, the one that the others are compared with first.
        table: the interference of an earlier command, for where none was `measured` in this one.
        runs: where the runs' folders are kept; None keeps none.
    """
    table = measured or table
    sharing = SharingTable()
    notes = ["no interference was measured in this command"] if table is None else []
    if table is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            path.write_text(json.dumps(table), encoding="utf-8")
            sharing, warnings = load_sharing(path, fractions)
            warnings = [warning.replace(f"{path}: ", "") for warning in warnings]
            notes += [warning.replace(str(path), "the interference table") for warning in warnings]
    if device == "cuda":
        notes.append("a worker computes on the GPU that it is given, at its device_fraction; see machine.mps")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in policies}
    for number in range(num_repeats):
        for name in policies:
            say(f"pipelines: {name}")
            with tempfile.TemporaryDirectory() as scratch:
                run = (Path(scratch) if runs is None else runs) / f"{name}-{number + 1}"
                pair = run_pair(device, make_policy(name, sharing=sharing), run, is_quick=is_quick)
            if pair is not None:
                say(json.dumps(pair))
                found[name].append(pair)
    notes += [f"{name} refuses a pipeline: there is one device for both" for name, runs in found.items() if not runs]
    hashes = {json.dumps(run["sha256"], sort_keys=True) for runs in found.values() for run in runs}
    medians = {name: statistics.median(run["tokens_per_s"] for run in runs) for name, runs in found.items() if runs}
    return {
        "tokens_per_s": medians,
        "gain": {name: value / medians[policies[0]] for name, value in medians.items()},
        "are_weights_equal": len(hashes) == 1,
        "notes": notes,
        "runs": found,
    }


def engines(device: str, vllm_python: str | None, *, is_quick: bool) -> dict[str, dict[str, Any]]:
    """Sampled tokens per second of a batch that fills every slot, and what the engine was found to promise."""
    num_slots, max_new_tokens = (8, 8) if is_quick else (128, 256)
    config = TrainingConfig(
        name="engines",
        model=pair_model(device, is_quick=is_quick),
        rollout=RolloutConfig(max_prompt_tokens=32, num_slots=num_slots, max_new_tokens=max_new_tokens),
    )
    vocab_size = load_vocabulary(config.model).vocab_size
    found = {}
    for name, options in OURS.items():
        say(f"engines: {name}")
        ours = SlotRolloutEngine(config.model, config.rollout, vocab_size=vocab_size, seed=0, device=device, **options)
        found[name] = engine_figures(ours, vocab_size, num_slots)
        ours.offload()
    if vllm_python is not None:
        say("engines: vllm")
        with vllm_engine(config, vllm_python, device) as theirs:
            found["vllm"] = engine_figures(theirs, vocab_size, num_slots)
    return found


def engine_figures(engine: RolloutEngine, vocab_size: int, num_slots: int) -> dict[str, Any]:
    of_probe = promised(engine, 16)
    limits, draws = engine.limits, random.Random(1)
    seconds, answers = [], hashlib.sha256()
    for step in (1, 2, 3):
        requests = [
            TrajectoryRequest(
                id=TrajectoryId(step, number, 0),
                prompt_tokens=tuple(draws.randrange(vocab_size) for _ in range(limits.max_prompt_tokens)),
                max_new_tokens=limits.max_new_tokens,
                stop_tokens=(),
                seed=1,
            )
            for number in range(num_slots)
        ]
        start = time.perf_counter()
        engine.submit(requests)
        turns: list[FinishedTurn] = []
        while engine.num_unfinished:
            turns += engine.run_chunk(max_decode_steps=1_000_000, max_seconds=600.0).finished
        answers.update(repr(sorted((turn.id, turn.tokens, turn.logprobs) for turn in turns)).encode())
        seconds.append(time.perf_counter() - start)
    return {
        "tokens_per_s": num_slots * limits.max_new_tokens / min(seconds),
        "answers_sha256": answers.hexdigest(),
        **of_probe,
    }


def run_pair(
    device: str, policy: Policy, folder: Path, *, is_quick: bool, names: Sequence[str] = PAIR
) -> dict[str, Any] | None:
    """None where the policy refuses a pipeline: `solo` has one device for two."""
    cluster = Cluster(pools={"train": Pool(name="train", phase=Phase.TRAIN, num_nodes=1)})
    given = [submission(name, PAIR.index(name) + 1, device, is_quick=is_quick) for name in names]
    try:
        with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}):
            workers = WorkerOptions(chunk_s=0.05 if is_quick else 0.2)
            result = run_pipelines(cluster, given, policy, folder, RunOptions(workers=workers), spec={})
        in_steps_s, _, _ = from_log(folder)
    finally:
        for checkpoint in folder.glob("*/step_*"):
            shutil.rmtree(checkpoint)
    of_pipeline: Mapping[str, Any] = result.summary["pipelines"]
    if any(fields["status"] == "refused" for fields in of_pipeline.values()):
        return None
    failed = [name for name, fields in of_pipeline.items() if fields["status"] != "finished"]
    if failed:
        raise SystemExit(f"pipeline {failed[0]} ended as {of_pipeline[failed[0]]['status']}")
    return {
        "makespan_s": result.summary["makespan_s"],
        "tokens_per_s": sum(fields["tokens"] for fields in of_pipeline.values()) / in_steps_s,
        "sha256": {name: fields["weights_sha256"] for name, fields in of_pipeline.items()},
        "step_s": {name: fields["step_s_mean"] for name, fields in of_pipeline.items()},
        "step_slowdown": {name: fields["step_slowdown"] for name, fields in of_pipeline.items()},
        "seconds": seconds_by_stage(folder),
    }


def seconds_by_stage(folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of work and of switches, by stage, of all steps of a run; `checkpoint`: halts of training."""
    orders: dict[int, RunStage] = {}
    found: dict[str, dict[str, float]] = {}
    with LogReader(folder) as log:
        for entry in log.entries():
            if isinstance(entry.value, RunStage):
                orders[entry.value.order] = entry.value
            elif isinstance(entry.value, StageFinished | StagePaused):
                stage = orders[entry.value.order].stage.value
                row = found.setdefault(stage, {"work_s": 0.0, "switch_s": 0.0})
                row["work_s"] += entry.value.seconds
                row["switch_s"] += entry.value.switch_s
            elif isinstance(entry.value, Mapping) and "stall_s" in entry.value:
                row = found.setdefault("checkpoint", {"work_s": 0.0, "switch_s": 0.0})
                row["work_s"] += entry.value["stall_s"]
    return found


def submission(name: str, seed: int, device: str, *, is_quick: bool) -> Submission:
    """Most answers are short, a few are long."""
    symbols = "digits" if name == "sort" else "letters"
    longest = 24 if is_quick else 96
    mean = 4 if is_quick else 12
    num_steps = 3
    config = TrainingConfig(
        name=name,
        seed=seed,
        num_steps=num_steps,
        model=pair_model(device, is_quick=is_quick),
        task=TaskConfig(name=name, params={f"min_{symbols}": 2, f"mean_{symbols}": mean, f"max_{symbols}": longest}),
        sft_warmup=SftWarmupConfig(num_updates=4 if is_quick else 6, batch_size=32, learning_rate=1e-3),
        algorithm=AlgorithmConfig(
            prompts_per_step=4 if is_quick else 16, group_size=4 if is_quick else 8, micro_batch_size=8
        ),
        rollout=RolloutConfig(
            max_new_tokens=longest + 16, max_prompt_tokens=longest + 16, num_slots=8 if is_quick else 128
        ),
    )
    pipeline = Pipeline(id=PipelineId(name), num_steps=num_steps, stages=STAGES, has_sft_warmup=True)
    return Submission(pipeline=pipeline, config=config)


def pair_model(device: str, *, is_quick: bool) -> ModelConfig:
    if device == "cuda" and not is_quick:
        return ModelConfig(hidden_size=1024, num_layers=28, num_heads=8, num_kv_heads=8, intermediate_size=3072)
    return ModelConfig(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96)


# --- shown --------------------------------------------------------------------------------------------------


def machine_lines(result: Mapping[str, Any]) -> list[str]:
    """What was found before anything was measured."""
    about = result["machine"]
    return [
        f"{about['device']}; torch {about['torch']}"
        + (f", CUDA {about['cuda']}, driver {about['driver']}; MPS: {about['mps']}" if about["driver"] else "")
        + (f"; {about['free_gb']:.0f} GB free; cuda-checkpoint: {about['cuda_checkpoint']}" if about["driver"] else ""),
        f"device fractions: {', '.join(f'{each:.3g}' for each in about['levels']) or 'none'} "
        f"by {about['levels_by'] or 'nothing'}" + (f"; missing: {about['missing']}" if about["missing"] else ""),
        *(f"  left out: {name}: {why}" for name, why in result["left_out"].items()),
    ]


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """What was found by each part that the result has."""
    lines = []
    for name, row in result.get("switches", {}).items():
        lines.append(
            f"  {name} engine, {row['resident_bytes'] / 1e6:.3g} MB: offload {row['offload_s'] * 1e3:.1f} ms, "
            f"load {row['load_s'] * 1e3:.1f} ms"
        )
    for name, row in (*result.get("promise", {}).items(), *result.get("engines", {}).items()):
        other = [check for check, is_equal in row["checks"].items() if not is_equal]
        lines.append(
            f"  engine {name}: "
            + (f"{row['tokens_per_s']:.0f} tokens/s, " if "tokens_per_s" in row else "")
            + row["promise"]
            + (f" (other bits: {', '.join(other)})" if other else "")
        )
    if "offload" in result:
        row = result["offload"]
        lines.append(
            f"  cuda-checkpoint: {row['freed_gb']:.2f} GB off the GPU in {row['offload_s']:.2f} s, back in "
            f"{row['onload_s']:.2f} s; the same bits: {row['is_memory_equal']}"
        )
    for size, row in result.get("publishing", {}).items():
        for kind in ("whole", "sample"):
            lines.append(
                f"  publishing {size}, {row['bytes'] / 1e6:,.0f} MB, {kind}: write {row[kind]['write_s']:.3f} s, "
                f"read {row[kind]['read_s']:.3f} s"
            )
    for sub_stage, row in result.get("curves", {}).items():
        lines.append(f"  {sub_stage:<26}" + "  ".join(f"{at}: {rate:.4g}/s" for at, rate in row.items()))
    for entry in result.get("interference", {}).get("entries", []):
        lines.append(
            f"  {entry['a']} | {entry['b']} at {entry['level']:.3g}: {entry['slowdown_a']:.2f} "
            f"{entry['slowdown_b']:.2f} times as long, together {1 / entry['slowdown_a'] + 1 / entry['slowdown_b']:.2f}"
        )
    for row in result.get("memory", {}).get("rows", []):
        lines.append(
            f"  memory of {row['shape']}, {row['worker']}: counted {row['estimated_bytes'] / 1e6:.1f} MB, "
            f"measured {row['measured_bytes'] / 1e6:.1f} MB, ratio {row['estimated_over_measured']:.2f}"
        )
    if "memory" in result:
        lines.append(f"  memory off by more than {TOLERANCE:.0%}: {', '.join(result['memory']['off']) or 'none'}")
    for way, row in result.get("fractions", {}).get("ways", {}).items():
        seconds = ", ".join(f"{name} {step_s:.2f}" for name, step_s in row["step_s"].items())
        lines.append(f"  two at once, {way}, fraction {row['fraction']:.3g}: seconds a step: {seconds}")
    if "fractions" in result:
        lines.append(f"  weights equal each way: {result['fractions']['are_weights_equal']}")
    for way, gain in result.get("pipelines", {}).get("gain", {}).items():
        rate = result["pipelines"]["tokens_per_s"][way]
        lines.append(f"  two pipelines, {way}: {rate:.0f} tokens/s, {gain:.2f}x")
    if "pipelines" in result:
        lines.append(f"  weights equal under all policies: {result['pipelines']['are_weights_equal']}")
        lines += [f"  note: {note}" for note in result["pipelines"]["notes"]]
    return lines + [f"  {name} broke: {text}" for name, text in result.get("broken", {}).items()]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

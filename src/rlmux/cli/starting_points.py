"""The files that `rlmux init` writes: templates of a starting point, filled in for this machine.

START ── templates/START.yaml, companions ──▶ names checked ──▶ files written ──▶ commands to type next
           ▲
rollout engine: the one of --engine; on GPUs vLLM, of this environment or one on PATH; else rlmux's own
checkpoint on GPUs of a known kind, here or of --gpus: gpu_start/ chooses and checks
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from textwrap import indent
from typing import TYPE_CHECKING

from rlmux.cli import inputs
from rlmux.core.errors import UserError
from rlmux.rl.config import ENGINES, EngineConfig, ModelConfig

if TYPE_CHECKING:
    from rlmux.config.checkpoint_folder import CheckpointFolder
    from rlmux.profiling.gpu_choice import GpuMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """What is written beside the YAML file, and what is typed next."""

    companions: Mapping[str, str] = field(default_factory=dict)
    """Template by the name of the file."""
    commands: Sequence[str]
    """Shell commands; placeholders: the YAML `{file}`, its `{stem}`, and its `{folder}` with a slash."""


STARTING_POINTS: Mapping[str, StartingPoint] = {
    "tasks": StartingPoint(commands=("rlmux run {file}",)),
    "rows": StartingPoint(
        companions={"rows.jsonl": "rows.jsonl", "rewards.py": "rewards.py.txt"}, commands=("rlmux run {file}",)
    ),
    "checkpoint": StartingPoint(commands=("rlmux check {file}", "rlmux plan {file}", "rlmux run {file}")),
    "trl": StartingPoint(
        companions={"train_trl.py": "train_trl.py.txt"},
        commands=(
            "rlmux broker {file}",
            "export RLMUX_BROKER=unix:$PWD/runs/broker-{stem}/broker.sock  # in each further shell",
            "RLMUX_JOB=a python {folder}train_trl.py out/a",
            "RLMUX_JOB=b python {folder}train_trl.py out/b",
        ),
    ),
    "tinker": StartingPoint(
        companions={"train_tinker.py": "train_tinker.py.txt"},
        commands=(
            "rlmux serve {file} --out runs/served",
            "export TINKER_BASE_URL=http://127.0.0.1:7460/tinker TINKER_API_KEY=tml-anything  # in each further shell",
            "python {folder}train_tinker.py",
        ),
    ),
}
"""By the word on the command line."""
_POOLS = {
    1: "    all: {phase: both, devices: 1}   # samples answers and updates weights\n",
    2: "    rollout: {devices: 1}     # samples answers\n    train: {devices: 1}       # updates weights\n",
}
"""The pools of a file, by the number of their devices."""
_WITH_ENGINE = ("tasks", "rows", "checkpoint")
"""Starting points whose file has a rollout engine."""
_NO_VLLM = (
    "# engine: {name: vllm, python: PATH}   # vLLM, by the python of an environment that has it: docs/how-to/vllm.md",
    "# vLLM: throughput, other architectures. rlmux's own engine: exact weights, adapters that share a base.",
)
_TINY_MODELS = {
    "tasks": "{architecture: qwen3, hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, intermediate_size: 128}",
    "rows": "",
}
_TINY_MODELS_OF_SERVERS = {
    "tasks": "{architecture: qwen3, hidden_size: 128, layers: 2, heads: 4, kv_heads: 2, intermediate_size: 256}",
    "rows": "{hidden_size: 128, intermediate_size: 256}",
}
"""New models by starting point; servers take heads of 32 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `write` did."""

    files: Sequence[str]
    """Paths of the files, the YAML file first."""
    next: Sequence[str]
    """Shell commands to type next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForGpus:
    """What is asked of a checkpoint's file beside the checkpoint; None and False: not asked for."""

    gpus: str | None = None
    """`8x80` or `8xH100`; None: this machine's."""
    num_pipelines: int | None = None
    has_adapter: bool = False

    @property
    def options(self) -> list[str]:
        """The options that are given, as on the command line."""
        given = {
            f"--gpus {self.gpus}": self.gpus is not None,
            f"--pipelines {self.num_pipelines}": self.num_pipelines is not None,
            "--lora": self.has_adapter,
        }
        return [option for option, is_given in given.items() if is_given]


def write(
    start: str,
    out: Path,
    model: Path | None = None,
    *,
    engine: str | None = None,
    python: str | None = None,
    for_gpus: ForGpus = ForGpus(),
) -> Written:
    """Write the files of a starting point: `out`, and its companions beside it.

    `model`: checkpoint folder. `engine`: name of the rollout engine, of the environment of `python`; by default vLLM
    where it is found on a machine with GPUs, or else our own. Raises UserError, before anything is written, for an
    unknown starting point, a folder that is no checkpoint, an engine that is not there, a model that fits no split of
    the GPUs, and a file that exists.
    """
    inputs.check_choice("START", start, list(STARTING_POINTS))
    chosen, machine = STARTING_POINTS[start], _gpu_machine(start, for_gpus)
    is_here = for_gpus.gpus is None
    folder = _model(start, out, model, needs_weights=is_here)
    sampling = _sampling(start, ModelConfig(path=None if model is None else str(model)), engine, python, is_here)
    values = {"file": shlex.quote(str(out)), "model": folder}
    before: list[str] = []
    if machine is None:
        if model is not None and not sampling.is_server:
            _check_checkpoint(model, is_served=False)
        text = Template(_template(f"{start}.yaml")).substitute({**values, **_machine(), **sampling.values(start)})
    else:
        assert model is not None
        text, before = _text_for(machine, model, out, values, sampling, for_gpus)
    texts = {out: text} | {out.parent / name: _template(template) for name, template in chosen.companions.items()}
    _write_texts(texts, out)
    folder = "" if out.parent == Path() else shlex.quote(f"{out.parent}/")
    placeholders = {"file": shlex.quote(str(out)), "stem": shlex.quote(out.stem), "folder": folder}
    commands = [command.format_map(placeholders) for command in chosen.commands]
    return Written(files=list(map(str, texts)), next=[*before, *commands])


def _write_texts(texts: Mapping[Path, str], out: Path) -> None:
    there = [path for path in texts if os.path.lexists(path)]
    if there:
        raise UserError(f"{there[0]}: exists; accepted: --out FILE in a folder without {_listed(texts)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; accepted: --out FILE that can be written") from None


def _gpu_machine(start: str, for_gpus: ForGpus) -> GpuMachine | None:
    """The machine whose GPUs a checkpoint's file is written for; None: a small file, as for any other start."""
    from rlmux.cli.gpu_start.machine import machine_here, machine_of

    given = for_gpus.options
    if start != "checkpoint":
        if given:
            raise UserError(f"{given[0]}: does not go with {start}; accepted: rlmux init checkpoint --model DIR")
        return None
    machine = machine_here() if for_gpus.gpus is None else machine_of(for_gpus.gpus)
    if machine is None and given:
        raise UserError(f"{given[0]}: no GPU of a known kind is here; accepted with --gpus, such as --gpus 8x80")
    return machine


def _text_for(
    machine: GpuMachine, model: Path, out: Path, values: Mapping[str, str], sampling: _Sampling, for_gpus: ForGpus
) -> tuple[str, list[str]]:
    """(The file for these GPUs, what is to be done before the commands). Raises UserError where the model fits none."""
    from rlmux.cli.gpu_start import file_text
    from rlmux.cli.gpu_start.refusal import refusal
    from rlmux.profiling.gpu_choice import SERVER, Wanted, choose

    needs_weights = for_gpus.gpus is None
    checkpoint = _check_checkpoint(model, is_served=sampling.is_server, needs_weights=needs_weights)
    wanted = Wanted(
        model=Path(os.path.abspath(model)),
        model_type=checkpoint.model_type,
        max_positions=checkpoint.max_positions,
        machine=machine,
        num_pipelines=for_gpus.num_pipelines or 2,
        has_adapter=for_gpus.has_adapter,
        engine=sampling.engine,
        may_be_served=sampling.is_by_default,
    )
    choice = choose(wanted)
    if choice is None:
        raise refusal(wanted)
    filled = {**values, **file_text.values_of(wanted, choice, sampling.lines)}
    text = Template(_template("checkpoint_gpus.yaml")).substitute(filled)
    file_text.check_text(text, str(out), out.parent.absolute(), wanted, choice)
    before = []
    if not any(model.glob("*.safetensors")):
        before.append(f"# put the weights into {shlex.quote(str(model))}; plan needs none")
    if choice.pipeline.rollout.engine == SERVER:
        before.append(f"# write the python of an environment with vLLM over {SERVER.python}, in {values['file']}")
    return text, before


def show(written: Written, *, as_json: bool) -> None:
    """Print the commands to type next, one a line."""
    if as_json:
        print(json.dumps({"files": written.files, "next": written.next}))
        return
    inputs.print_notice(f"wrote {', '.join(written.files)}; next:")
    for command in written.next:
        print(command)


def _template(name: str) -> str:
    return files("rlmux.cli").joinpath("templates", name).read_text(encoding="utf-8")


def _machine() -> dict[str, str]:
    """A line about this machine, and pools of its devices, two at most, also for a lane."""
    from rlmux.runtime.gpus_here import visible_gpus

    num_gpus, num_cores = len(visible_gpus()), len(os.sched_getaffinity(0))
    cores = f"{num_cores} CPU core{'s' if num_cores > 1 else ''}"
    if num_gpus:
        line = f"A device is a GPU. This machine has {num_gpus}."
    else:
        line = f"A device is a GPU, or a CPU core on a machine without GPUs. This machine has {cores} and no GPU."
    pools = _POOLS[min(2, num_gpus or num_cores)].rstrip()
    return {"machine": line, "pools": pools, "lane_pools": indent(pools, "    ")}


def _model(start: str, out: Path, model: Path | None, *, needs_weights: bool) -> str:
    """The checkpoint folder as the file names it: relative to the file, unless it is absolute."""
    if start != "checkpoint":
        if model is not None:
            raise UserError(f"--model {model}: does not go with {start}; accepted: rlmux init checkpoint --model DIR")
        return ""
    if model is None:
        raise UserError("--model is missing; accepted: rlmux init checkpoint --model DIR, a Hugging Face checkpoint")
    _check_checkpoint(model, is_served=True, needs_weights=needs_weights)
    return json.dumps(str(model) if model.is_absolute() else os.path.relpath(model, out.parent))


def _check_checkpoint(model: Path, *, is_served: bool, needs_weights: bool = True) -> CheckpointFolder:
    from rlmux.config.checkpoint_folder import check_checkpoint

    try:
        return check_checkpoint(model, is_served=is_served, needs_weights=needs_weights)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling:
    """What samples the answers."""

    lines: Sequence[str] = ()
    """Lines of `rollout` about the engine: its key, and comments."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    is_by_default: bool = False
    """Whether our own engine samples because no other was asked for or found."""

    @property
    def is_server(self) -> bool:
        return self.engine.is_server

    def values(self, start: str) -> dict[str, str]:
        """Values of a template's placeholders."""
        model = (_TINY_MODELS_OF_SERVERS if self.is_server else _TINY_MODELS).get(start, "")
        return {
            "engine": "".join(f"\n    {line}" for line in self.lines),
            "tiny_model": model,
            "model_line": f"\n  model: {model}" if model else "",
            "model_remark": "A new tiny model" if model else "No model is named: a new tiny one",
            "seed_decides": "decides the weights that it starts with, and what is sampled"
            if self.is_server
            else "decides the weights: equal seeds train equal weights, alone or together",
        }


def _sampling(start: str, model: ModelConfig, name: str | None, python: str | None, is_here: bool) -> _Sampling:
    """Raises UserError for an engine that was asked for and is not there, or does not serve the model.

    `is_here`: the file is for this machine, where a server is looked for.
    """
    from rlmux.runtime.gpus_here import visible_gpus

    if python is not None and name is None:
        raise UserError(f"--python {python}: goes with --engine; accepted: --engine vllm or sglang")
    if name is not None:
        if start not in _WITH_ENGINE:
            raise UserError(f"--engine {name}: does not go with {start}; accepted with {', '.join(_WITH_ENGINE)}")
        return _sampling_by(name, python, model)
    if start not in _WITH_ENGINE or not (is_here and visible_gpus()):
        return _Sampling(is_by_default=True)
    reasons = []
    for found in _pythons_with("vllm"):
        try:
            return _served(EngineConfig(name="vllm", python=found), model)
        except UserError as error:
            reasons.append(str(error).partition(": ")[2].partition("; accepted:")[0])
    lines = [f"# rlmux's own engine samples: {reasons[0]}"] if reasons else _NO_VLLM
    return _Sampling(lines=lines, is_by_default=True)


def _sampling_by(name: str, python: str | None, model: ModelConfig) -> _Sampling:
    inputs.check_choice("--engine", name, ENGINES)
    if name == "rlmux":
        if python is not None:
            raise UserError(f"--python {python}: does not go with our own engine; accepted: --engine vllm or sglang")
        return _Sampling()
    path = next(_pythons_with(name), None) if python is None else str(Path(python).absolute())
    if path is None:
        raise UserError(f"--engine {name}: neither this environment nor one on PATH has it; accepted: --python PATH")
    return _served(EngineConfig(name=name, python=path), model)


def _served(engine: EngineConfig, model: ModelConfig) -> _Sampling:
    """Raises UserError for an engine that is not in its environment, or does not serve the model."""
    from rlmux.rl.user_code.engine_check import check_engine

    version = check_engine(engine, model)
    back = "# rlmux's own engine instead: remove the next line (docs/how-to/vllm.md)"
    key = f"engine: {{name: {engine.name}, python: {json.dumps(engine.python)}}}   # {engine.name} {version}"
    return _Sampling(lines=[back, key], engine=engine)


def _pythons_with(name: str) -> Iterator[str]:
    """Pythons of environments that have a package: ours, then those on PATH. It is neither imported nor started."""
    if find_spec(name) is not None:
        yield sys.executable
    paths = [Path(path) for path in map(shutil.which, ("python3", "python")) if path is not None]
    others = {path.parent: path for path in reversed(paths) if path.parent != Path(sys.executable).parent}
    for folder, path in reversed(others.items()):
        libraries = ("lib/python3*/*-packages", "local/lib/python3*/*-packages")
        if any(any(folder.parent.glob(f"{library}/{name}")) for library in libraries):
            yield str(path.absolute())


def _listed(paths: Mapping[Path, str]) -> str:
    *most, last = [path.name for path in paths]
    return f"{', '.join(most)} or {last}" if most else last

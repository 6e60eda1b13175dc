"""`rlmux init`: a file for this machine that the other commands take as it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoints import CONFIG, write_checkpoint
from tests.server_environments import make_environment, make_python

from rlmux.cli.starting_points import STARTING_POINTS
from rlmux.config import Purpose, load_spec
from rlmux.rl.config import EngineConfig
from rlmux.runtime import gpus_here

WITHOUT_MODEL = [start for start in STARTING_POINTS if start != "checkpoint"]


@pytest.mark.parametrize("start", WITHOUT_MODEL)
def test_every_file_is_without_mistakes_and_its_scripts_compile(rlmux, folder, start):
    code, out, err = rlmux("init", start)
    assert code == 0
    written = [name.rstrip(";") for name in err.removeprefix("rlmux: wrote ").removesuffix("; next:\n").split(", ")]
    assert {path.name for path in folder.iterdir()} == {*written, "small.yaml"}
    for script in folder.glob("*.py"):
        compile(script.read_text(encoding="utf-8"), script, "exec")
    assert "$" not in (folder / "rlmux.yaml").read_text(encoding="utf-8")
    assert rlmux("check", "rlmux.yaml").code == 0
    assert "rlmux.yaml" in out.splitlines()[0]


@pytest.mark.parametrize("start", WITHOUT_MODEL)
@pytest.mark.parametrize(
    ("gpus", "cores", "devices", "line"),
    [
        ([], {0}, {"all": 1}, "This machine has 1 CPU core and no GPU."),
        ([], {0, 1, 2, 3}, {"rollout": 1, "train": 1}, "This machine has 4 CPU cores and no GPU."),
        (["0"], {0, 1}, {"all": 1}, "A device is a GPU. This machine has 1."),
        (["0", "1", "2"], {0}, {"rollout": 1, "train": 1}, "A device is a GPU. This machine has 3."),
    ],
)
def test_the_pools_are_devices_of_this_machine_two_at_most(
    rlmux, folder, monkeypatch, start, gpus, cores, devices, line
):
    with monkeypatch.context() as machine:
        machine.setattr(gpus_here, "visible_gpus", lambda: gpus)
        machine.setattr(os, "sched_getaffinity", lambda _: cores)
        assert rlmux("init", start).code == 0
    assert line in (folder / "rlmux.yaml").read_text(encoding="utf-8")
    checked = json.loads(rlmux("check", "rlmux.yaml", "--json").out)
    assert checked["clusters"][0]["devices"] == ({"gpu0": 1} if start == "trl" else devices)


def test_rows_and_then_a_checkpoint_train_by_the_printed_command(rlmux, folder):
    pytest.importorskip("torch")
    few = [f"--set=defaults.{key}" for key in ("steps=1", "sft_warmup.updates=1", "algorithm.prompts_per_step=2")]
    command = rlmux("init", "rows").out.split()[1:]
    assert rlmux(*command, *few, "--out", "runs/rows").code == 0
    said = rlmux("init", "checkpoint", "--model", "runs/rows/mine/step_1", "--out", "own/trained.yaml")
    assert said.out.splitlines() == [f"rlmux {command} own/trained.yaml" for command in ("check", "plan", "run")]
    assert 'path: "../runs/rows/mine/step_1"' in (folder / "own" / "trained.yaml").read_text(encoding="utf-8")
    check, plan, run = (line.split()[1:] for line in said.out.splitlines())
    assert (rlmux(*check).code, rlmux(*plan).code) == (0, 0)
    assert rlmux(*run, *few, "--out", "runs/checkpoint").code == 0


WITH_ENGINE = ["tasks", "rows", "checkpoint"]
BACK = "    # rlmux's own engine instead: remove the next line (docs/how-to/vllm.md)"


@pytest.fixture
def set_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of the machine's GPUs; no environment on PATH has vLLM. `qwen3` in the folder is a checkpoint."""
    monkeypatch.setenv("PATH", str(folder / "nowhere"))
    write_checkpoint(folder / "qwen3")
    (folder / "qwen3" / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Qwen3ForCausalLM"]}))

    def set_gpus(number: int) -> None:
        monkeypatch.setattr(gpus_here, "visible_gpus", lambda: [str(index) for index in range(number)])

    return set_gpus


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with `bin/python` that has vLLM."""
    root = tmp_path_factory.mktemp("environment")
    make_environment(root / "bin", "vllm")
    (root / "lib" / "python3.11").mkdir(parents=True)
    (root / "lib" / "python3.11" / "site-packages").symlink_to(root / "bin" / "site")
    return root


def start_words(start: str) -> list[str]:
    return ["init", start, *(["--model", "qwen3"] if start == "checkpoint" else [])]


def engines_in(file: Path) -> list[EngineConfig]:
    """The engine of each pipeline, in a file without mistakes."""
    spec = load_spec(str(file), purpose=Purpose.RUN)
    return [each.training.rollout.engine for each in spec.pipelines if each.training is not None]


@pytest.mark.parametrize("start", WITH_ENGINE)
def test_on_gpus_a_vllm_on_path_samples(rlmux, folder, set_gpus, environment, monkeypatch, start):
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:/usr/bin:/bin")
    set_gpus(1)
    assert rlmux(*start_words(start)).code == 0
    python = str(environment / "bin" / "python")
    lines = (folder / "rlmux.yaml").read_text(encoding="utf-8").splitlines()
    key = f'    engine: {{name: vllm, python: "{python}"}}   # vllm 0.32.0'
    assert lines[lines.index(BACK) + 1] == key
    for engine in engines_in(folder / "rlmux.yaml"):
        assert (engine.name, engine.python) == ("vllm", python)
    set_gpus(0)
    assert rlmux("check", "rlmux.yaml").code == 0
    lines.remove(key)
    (folder / "rlmux.yaml").write_text("\n".join(lines), encoding="utf-8")
    assert {engine.name for engine in engines_in(folder / "rlmux.yaml")} == {"rlmux"}
    assert rlmux("check", "rlmux.yaml").code == 0


def test_the_vllm_of_this_environment_comes_first(rlmux, folder, set_gpus, environment, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("own")
    own = make_environment(other, "vllm", version="0.24.0")
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", own)
    monkeypatch.syspath_prepend(other / "site")
    set_gpus(1)
    assert rlmux("init").code == 0
    assert {engine.python for engine in engines_in(folder / "rlmux.yaml")} == {own}
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("start", WITH_ENGINE)
def test_on_gpus_without_vllm_the_file_says_how_to_add_it_and_what_for(rlmux, folder, set_gpus, start):
    set_gpus(2)
    assert rlmux(*start_words(start)).code == 0
    text = (folder / "rlmux.yaml").read_text(encoding="utf-8")
    assert "    # engine: {name: vllm, python: PATH}" in text
    assert "# vLLM: throughput, other architectures. rlmux's own engine: exact weights, adapters that share" in text
    assert rlmux("check", "rlmux.yaml").code == 0
    (folder / "rlmux.yaml").unlink()
    for companion in STARTING_POINTS[start].companions:
        (folder / companion).unlink()
    assert rlmux(*start_words(start), "--engine", "rlmux").code == 0
    assert "engine:" not in (folder / "rlmux.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("start", WITH_ENGINE)
def test_on_cores_a_vllm_samples_only_where_it_is_asked_for(rlmux, folder, set_gpus, environment, monkeypatch, start):
    monkeypatch.setenv("PATH", f"{environment / 'bin'}:/usr/bin:/bin")
    set_gpus(0)
    assert rlmux(*start_words(start), "--out", "own/rlmux.yaml").code == 0
    assert "vllm" not in (folder / "own" / "rlmux.yaml").read_text(encoding="utf-8")
    assert rlmux(*start_words(start), "--engine", "vllm").code == 0
    assert {engine.name for engine in engines_in(folder / "rlmux.yaml")} == {"vllm"}
    assert rlmux("check", "rlmux.yaml").code == 0


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_is_taken_from_the_environment_that_is_named(rlmux, folder, set_gpus, tmp_path_factory, name):
    python = make_environment(tmp_path_factory.mktemp("named"), name)
    set_gpus(1)
    given = os.path.relpath(python, folder)
    assert rlmux("init", "--engine", name, "--python", given, "--out", "own/rlmux.yaml").code == 0
    for engine in engines_in(folder / "own" / "rlmux.yaml"):
        assert engine.name == name
        assert os.path.samefile(str(engine.python), python)
    assert rlmux("check", "own/rlmux.yaml").code == 0


def test_a_checkpoint_that_a_found_vllm_does_not_serve_is_sampled_by_our_engine(
    rlmux, folder, set_gpus, tmp_path_factory, monkeypatch
):
    root = tmp_path_factory.mktemp("environment")
    python = make_environment(root / "bin", "vllm", serves="LlamaForCausalLM")
    (root / "lib" / "python3.11" / "site-packages" / "vllm").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{root / 'bin'}:/usr/bin:/bin")
    set_gpus(1)
    assert rlmux(*start_words("checkpoint")).code == 0
    reason = "    # rlmux's own engine samples: vllm 0.32.0 does not serve Qwen3ForCausalLM (nothing in "
    assert reason in (folder / "rlmux.yaml").read_text(encoding="utf-8")
    assert rlmux("check", "rlmux.yaml").code == 0
    asked = rlmux(*start_words("checkpoint"), "--out", "b.yaml", "--engine", "vllm", "--python", python)
    assert (asked.code, asked.out) == (2, "")
    assert asked.err.startswith("rlmux: rollout.engine: vllm 0.32.0 does not serve Qwen3ForCausalLM ")
    assert not (folder / "b.yaml").exists()


def test_a_checkpoint_that_our_engine_does_not_compute_starts_with_vllm(rlmux, folder, set_gpus, tmp_path_factory):
    other = CONFIG | {"model_type": "phi", "architectures": ["PhiForCausalLM"]}
    (folder / "qwen3" / "config.json").write_text(json.dumps(other))
    python = make_environment(tmp_path_factory.mktemp("named"), "vllm", serves="PhiForCausalLM")
    set_gpus(1)
    code, _, err = rlmux(*start_words("checkpoint"))
    assert code == 2
    assert "model_type 'phi', which our own rollout engine does not compute" in err
    assert rlmux(*start_words("checkpoint"), "--engine", "vllm", "--python", python).code == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--engine", "vlm"], "--engine 'vlm': nearest: vllm; accepted: rlmux, vllm, sglang"),
        (["--engine", "vllm"], "--engine vllm: neither this environment nor one on PATH has it; accepted: --python P"),
        (["--python", "x"], "--python x: goes with --engine; accepted: --engine vllm or sglang"),
        (["--engine", "rlmux", "--python", "x"], "--python x: does not go with our own engine; accepted: --engine v"),
        (["trl", "--engine", "vllm"], "--engine vllm: does not go with trl; accepted with tasks, rows, checkpoint"),
        (["--engine", "vllm", "--python", "x"], "rollout.engine.python: {folder}/x: no such file; accepted: the "),
        (
            ["--engine", "vllm", "--python", "small.yaml"],
            "rollout.engine.python: {folder}/small.yaml is no python that runs; accepted: one of an environment that ",
        ),
        (
            ["rows", "--engine", "vllm", "--python", "bare/python"],
            "rollout.engine.python: {folder}/bare/python: vllm is not installed in this environment; accepted: one ",
        ),
    ],
)
def test_an_engine_that_is_not_there_is_one_line_and_nothing_is_written(rlmux, folder, set_gpus, words, line):
    make_python(folder / "bare")
    set_gpus(1)
    code, out, err = rlmux("init", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rlmux: {line.format(folder=folder)}")
    assert {path.name for path in folder.iterdir()} == {"small.yaml", "qwen3", "bare"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["row"], "START 'row': nearest: rows; accepted: tasks, rows, checkpoint, trl, tinker"),
        (["checkpoint"], "--model is missing; accepted: rlmux init checkpoint --model DIR, "),
        (["checkpoint", "--model", "none"], "--model none: no such folder (none); accepted: a Hugging Face checkpoint"),
        (["checkpoint", "--model", "."], "--model .: the folder has no config.json (.); accepted: "),
        (["rows", "--model", "."], "--model .: does not go with rows; accepted: rlmux init checkpoint --model DIR"),
        (["--out", "small.yaml"], "small.yaml: exists; accepted: --out FILE in a folder without small.yaml"),
        (["--out", "."], ".: exists; accepted: "),
        (
            ["--out", "small.yaml/x.yaml"],
            "small.yaml/x.yaml: File exists; accepted: --out FILE that can be written",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(rlmux, folder, words, line):
    before = (folder / "small.yaml").read_bytes()
    code, out, err = rlmux("init", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rlmux: {line}")
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]
    assert (folder / "small.yaml").read_bytes() == before


def test_nothing_is_written_where_a_companion_exists(rlmux, folder):
    (folder / "rewards.py").write_text("mine", encoding="utf-8")
    code, out, err = rlmux("init", "rows")
    line = "rewards.py: exists; accepted: --out FILE in a folder without rlmux.yaml, rows.jsonl or rewards.py"
    assert (code, out, err) == (2, "", f"rlmux: {line}\n")
    assert {path.name for path in folder.iterdir()} == {"small.yaml", "rewards.py"}
    assert (folder / "rewards.py").read_text(encoding="utf-8") == "mine"


def test_json_has_the_files_and_the_commands_also_for_names_with_spaces(rlmux, folder):
    code, out, err = rlmux("init", "tinker", "--out", "my files/a b.yaml", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["files"] == ["my files/a b.yaml", "my files/train_tinker.py"]
    assert all(Path(each).is_file() for each in result["files"])
    assert result["next"][0] == "rlmux serve 'my files/a b.yaml' --out runs/served"
    assert result["next"][2] == "python 'my files/'train_tinker.py"

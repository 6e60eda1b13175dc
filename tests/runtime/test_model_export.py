"""Exported weights are a model that transformers and peft load, with the logits of the engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.small_files import small_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlmux.cli.main import run_command_line
from rlmux.core.errors import CheckpointError, PipelineError
from rlmux.engines.model.model_io import build_model
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.rl.config import TrainingConfig
from rlmux.runtime import model_export
from rlmux.runtime.checks.replay_verification import submissions_of
from rlmux.runtime.model_export import export_model
from rlmux.runtime.weights.checkpoints import CheckpointStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # in peft itself
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
TOKENS = torch.tensor([[5, 6, 7, 30, 31, 40, 22]])
ADAPTER = "adapter: {rank: 4, alpha: 8, targets: [q_proj, down_proj, lm_head]}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`first` has a whole model `a` and an adapter `new` of a base that the run made; `second` an adapter `own` of the
    exported `a`, in the folder `model`."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        first = small_file("{name: a, task: sort}", f"{{name: new, task: reverse, {ADAPTER}}}", steps=3)
        Path("first.yaml").write_text(first, encoding="utf-8")
        assert run_command_line(["run", "first.yaml", "--out", "first"]) == 0
        assert run_command_line(["export", "first", "a", "--to", "hf", "--out", "model"]) == 0
        own = f"{{name: own, task: sort, {ADAPTER}}}"
        second = small_file(own, steps=1).replace("model: {", "model: {path: model} #")
        Path("second.yaml").write_text(second, encoding="utf-8")
        assert run_command_line(["run", "second.yaml", "--out", "second"]) == 0
        yield root


def config_of(run: Path, name: str) -> TrainingConfig:
    return next(one.config for one in submissions_of(run) if one.config.name == name)


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def engine_logits(run: Path, name: str, step: int) -> torch.Tensor:
    """Logits of the train engine that has restored the checkpoint."""
    engine = TorchTrainEngine(config_of(run, name))
    engine.restore(CheckpointStore(run / name).path(step))
    with torch.no_grad():
        positions = torch.arange(TOKENS.shape[1])[None]
        runs = [(1, TOKENS.shape[1])]
        hidden = engine.model.model(input_ids=TOKENS, position_ids=positions, runs=runs, use_cache=False)
        return engine.model.lm_head(hidden.last_hidden_state)


def test_a_whole_model_is_loaded_by_transformers_with_its_tokenizer(runs: Path) -> None:
    assert {path.name for path in (runs / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(runs / "model")
    assert torch.allclose(logits_of(loaded), engine_logits(runs / "first", "a", 3), atol=1e-5)
    assert AutoTokenizer.from_pretrained(runs / "model").decode([5, 6, 7])


@pytest.mark.parametrize(("run", "name", "step"), [("first", "new", 3), ("second", "own", 1)])
def test_an_adapter_is_loaded_by_peft_over_the_base_that_it_names(
    runs: Path, tmp_path: Path, run: str, name: str, step: int
) -> None:
    assert export_model(runs / run, name, tmp_path / "adapter") == step
    path = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    assert Path(path) == (tmp_path / "adapter" / "base" if run == "first" else runs / "model")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter")
    found, plain = logits_of(loaded), logits_of(AutoModelForCausalLM.from_pretrained(path))
    assert torch.allclose(found, engine_logits(runs / run, name, step), atol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-4), "an adapter that does nothing would prove nothing"


@pytest.mark.parametrize(("run", "name", "step"), [("first", "new", 2), ("second", "own", 1)])
def test_a_merged_adapter_is_a_whole_model(runs: Path, tmp_path: Path, run: str, name: str, step: int) -> None:
    """Also if the adapter changes a head that is tied to the embedding."""
    export_model(runs / run, name, tmp_path / "merged", step=step, is_merged=True)
    assert not list((tmp_path / "merged").glob("adapter*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of(loaded), engine_logits(runs / run, name, step), atol=1e-4)
    base = build_model(config_of(runs / run, name).model, 98, config_of(runs / run, name).model_seed)
    assert torch.equal(loaded.get_input_embeddings().weight, base.get_input_embeddings().weight)


def test_a_checkpoint_that_is_pruned_during_the_copy_is_replaced_by_the_newest(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(runs / "first", tmp_path / "run")
    copy: Callable[..., None] = model_export._copy_files

    def pruned(checkpoint: Path, aside: Path, version: int) -> None:
        if version == 3:
            shutil.rmtree(checkpoint)
        copy(checkpoint, aside, version)

    monkeypatch.setattr(model_export, "_copy_files", pruned)
    assert export_model(run, "a", tmp_path / "model") == 2
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []


def test_damaged_weights_are_not_exported(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "first", tmp_path / "run")
    weights = run / "a" / "step_3" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(PipelineError, match="are damaged"):
        export_model(run, "a", tmp_path / "model")
    weights.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        export_model(run, "a", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nobody", "--out", "new"], "no pipeline 'nobody'; accepted: a, new"),
        (["a", "--out", "model"], "--out model: it is not empty; accepted: a folder that does not exist or is empty"),
        (["a", "--out", "first.yaml"], "--out first.yaml: it is not empty"),
        (["a", "--out", "new", "--step", "1"], "--step 1: a kept no checkpoint of it; accepted: 2, 3"),
        (["a", "--out", "new", "--merge"], "--merge: a trains a whole model; accepted: a pipeline with an adapter"),
        (["a"], "--to hf: accepted: with NAME of a pipeline and --out FOLDER"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    capsys.readouterr()
    assert run_command_line(["export", "first", *words, "--to", "hf"]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not (runs / "new").exists()


def test_a_pipeline_without_a_checkpoint_is_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(runs / "first", tmp_path / "run")
    shutil.rmtree(run / "a")
    capsys.readouterr()
    assert run_command_line(["export", str(run), "a", "--to", "hf", "--out", str(tmp_path / "model")]) == 2
    assert "a has no checkpoint" in capsys.readouterr().err


def test_options_of_weights_are_refused_with_the_step_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--merge"], ["--step", "2"]):
        assert run_command_line(["export", "first", "a", "--to", "csv", *option]) == 2
        assert f"{option[0]} with --to csv: accepted: --to hf, which exports weights" in capsys.readouterr().err

"""A model in parts begins, publishes and is checkpointed with the bits of a whole one, and no rank has all of it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.train.test_train_engine import batch, config, run_step

from rlmux.core.errors import CheckpointError
from rlmux.engines.model import model_io
from rlmux.engines.train.state import model_parts
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update.ranks import RankStore, join_ranks
from rlmux.rl.config import AdapterConfig, ModelConfig, TrainConfig, TrainingConfig
from rlmux.rl.vocabulary import CharVocabulary

MODELS = {
    "new": {},
    "adapter": {"adapter": AdapterConfig(rank=1, alpha=2.0)},
    "head": {"adapter": AdapterConfig(rank=2, alpha=2.0, targets=("q_proj", "lm_head"))},
    "bfloat16": {"train": TrainConfig(dtype="bfloat16")},
    "experts": {
        "model": ModelConfig(architecture="qwen3_moe", num_experts=3, num_experts_per_token=2, moe_intermediate_size=32)
    },
}


def in_parts(given: TrainingConfig) -> TrainingConfig:
    return replace(given, train=replace(given.train, num_workers=2, sharding="shard"))


def on_ranks(given: TrainingConfig, work: Callable[[TorchTrainEngine, int, Path], Any], folder: Path) -> list[Any]:
    """What `work` returns on each of two ranks that have parts of the model."""
    context = get_context("fork")
    ends = [context.Pipe() for _ in range(2)]
    store = RankStore("127.0.0.1")
    ranks = [
        context.Process(target=_rank, args=(given, work, rank, store.address, folder, end))
        for rank, (_, end) in enumerate(ends)
    ]
    for rank in ranks:
        rank.start()
    try:
        return [pickle.loads(mine.recv_bytes()) if mine.poll(40) else None for mine, _ in ends]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _rank(given: TrainingConfig, work: Any, rank: int, store: Any, folder: Path, end: Any) -> None:
    warnings.simplefilter("ignore")  # as in a worker
    torch.set_num_threads(1)
    engine = TorchTrainEngine(in_parts(given), vocabulary=CharVocabulary())
    engine.join_ranks(join_ranks(store, rank, 2, host="127.0.0.1"))
    end.send_bytes(pickle.dumps(work(engine, rank, folder)))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def save(engine: TorchTrainEngine, rank: int, folder: Path) -> str:
    engine.export_weights(folder / "published.safetensors" if rank == 0 else None)
    engine.snapshot(folder / "step_0").write(folder / "step_0") if rank == 0 else engine.snapshot()
    return engine.weights_sha256()


@pytest.mark.parametrize("name", MODELS)
def test_files_of_a_model_in_parts_have_the_bytes_of_a_whole_one(tmp_path: Path, name: str) -> None:
    given = replace(config(), **MODELS[name])
    whole = TorchTrainEngine(given)
    whole.export_weights(tmp_path / "published.safetensors")
    whole.save(tmp_path / "step_0")
    (tmp_path / "parts").mkdir()
    found = on_ranks(given, save, tmp_path / "parts")
    assert found == [whole.weights_sha256()] * 2
    for place in ("", "step_0"):
        assert files_of(tmp_path / "parts" / place) == files_of(tmp_path / place), place


def trained_on(engine: TorchTrainEngine, rank: int, folder: Path) -> tuple[str, str]:
    """Hashes of the weights after two steps, and after the second step again from the first one's checkpoint."""
    run_step(engine, batch(1))
    save_to = folder / "step_1"
    engine.snapshot(save_to).write(save_to) if rank == 0 else engine.snapshot()
    run_step(engine, batch(2))
    first = engine.weights_sha256()
    engine.restore(save_to)
    run_step(engine, batch(2))
    return first, engine.weights_sha256()


def test_moments_of_8_bits_in_parts_go_on_from_a_checkpoint_of_as_many_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs the 8bit extra: pip install 'rlmux[8bit]'")
    given = replace(config(), train=TrainConfig(optimizer_state="8bit"))
    (first, again), other = on_ranks(given, trained_on, tmp_path)
    assert (first, again) == other
    assert again == first
    with pytest.raises(CheckpointError, match=r"another train.optimizer_state, sharding or model"):
        TorchTrainEngine(given).restore(tmp_path / "step_1")

    def refused(engine: TorchTrainEngine, *_: Any) -> str:
        try:
            engine.restore(tmp_path / "step_1")
        except CheckpointError as error:
            return str(error)
        return ""

    assert "is of another train.optimizer_state" in on_ranks(config(), refused, tmp_path)[0]


def saved_model(folder: Path) -> TrainingConfig:
    """A pipeline that begins with a checkpoint of several files."""
    model_io.build_model(ModelConfig(), CharVocabulary().vocab_size, 3).save_pretrained(folder, max_shard_size="100kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return replace(config(), model=ModelConfig(path=str(folder)))


def test_ranks_read_their_own_rows_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = saved_model(tmp_path / "model")
    whole = TorchTrainEngine(given, vocabulary=CharVocabulary())
    monkeypatch.setattr(model_parts, "build_model", None)
    assert on_ranks(given, lambda engine, *_: engine.weights_sha256(), tmp_path) == [whole.weights_sha256()] * 2


def test_the_first_rank_alone_builds_a_model_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def build_model(*given: Any) -> Any:
        built.append(1)
        return model_io.build_model(*given)

    monkeypatch.setattr(model_parts, "build_model", build_model)
    assert on_ranks(config(), lambda *_: len(built), tmp_path) == [1, 0]


def test_a_checkpoint_that_cannot_be_written_fails_on_the_first_rank_alone(tmp_path: Path) -> None:
    def save_nowhere(engine: TorchTrainEngine, rank: int, folder: Path) -> str:
        try:
            engine.snapshot(folder / "removed" / "run" / "step_0" if rank == 0 else None)
        except OSError as error:
            return type(error).__name__
        return ""

    assert on_ranks(config(), save_nowhere, tmp_path) == ["FileNotFoundError", ""]

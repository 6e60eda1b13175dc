"""A model in parts begins, publishes and is checkpointed with the bits of a whole one, and no rank has all of it."""

from __future__ import annotations

import errno
import os
import pickle
import signal
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
from rlmux.engines.train.state import model_parts, row_files
from rlmux.engines.train.state.checkpoint import read_checkpoint
from rlmux.engines.train.state.snapshot import TrainSnapshot
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update.ranks import RankStore, join_ranks
from rlmux.rl.config import AdapterConfig, ModelConfig, TrainConfig, TrainingConfig
from rlmux.rl.vocabulary import CharVocabulary
from rlmux.runtime.weights.checkpoints import CheckpointStore

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
        for _, theirs in ends:
            theirs.close()  # so that a rank that dies ends its pipe
        return [_received(mine) for mine, _ in ends]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _received(end: Any) -> Any:
    """What a rank sends; None for one that is gone, or silent for 40 s."""
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(40) else None
    except EOFError:
        return None


def _rank(given: TrainingConfig, work: Any, rank: int, store: Any, folder: Path, end: Any) -> None:
    warnings.simplefilter("ignore")  # as in a worker
    torch.set_num_threads(1)
    engine = TorchTrainEngine(in_parts(given), vocabulary=CharVocabulary())
    engine.join_ranks(join_ranks(store, rank, 2, host="127.0.0.1"))
    end.send_bytes(pickle.dumps(work(engine, rank, folder)))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def save(engine: TorchTrainEngine, rank: int, folder: Path) -> tuple[str, str | None]:
    """Hash of the weights, and what writing the checkpoint returns."""
    engine.export_weights(folder / "published.safetensors" if rank == 0 else None)
    return engine.weights_sha256(), engine.snapshot(folder / "step_0").write(folder / "step_0")


@pytest.mark.parametrize("name", MODELS)
def test_files_of_a_model_in_parts_have_the_bytes_of_a_whole_one(tmp_path: Path, name: str) -> None:
    given = replace(config(), **MODELS[name])
    require_files_of_a_whole_model(given, tmp_path)


def require_files_of_a_whole_model(given: TrainingConfig, folder: Path) -> None:
    whole = TorchTrainEngine(given)
    whole.export_weights(folder / "published.safetensors")
    whole.save(folder / "step_0")
    (folder / "parts").mkdir()
    sha256 = whole.weights_sha256()
    assert on_ranks(given, save, folder / "parts") == [(sha256, sha256), (sha256, None)]
    for place in ("", "step_0"):
        assert files_of(folder / "parts" / place) == files_of(folder / place), place
    for each in ("step_0", "parts/step_0"):
        assert read_checkpoint(folder / each) == read_checkpoint(folder / "step_0"), each


def test_ranks_of_several_machines_gather_what_the_first_of_them_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_machine", lambda: str(os.getpid()))
    monkeypatch.setattr(row_files.RowFiles, "write", None)
    require_files_of_a_whole_model(config(), tmp_path)


def trained_on(engine: TorchTrainEngine, rank: int, folder: Path) -> tuple[str, str]:
    """Hashes of the weights after two steps, and after the second step again from the first one's checkpoint."""
    run_step(engine, batch(1))
    save_to = folder / "step_1"
    snapshot = engine.snapshot(save_to)
    run_step(engine, batch(2))  # before the first is written
    snapshot.write(save_to)
    first = engine.weights_sha256()  # the ranks meet: the first of them has ended the checkpoint
    engine.restore(save_to)
    run_step(engine, batch(2))
    return first, engine.weights_sha256()


def test_a_step_beside_the_writing_changes_nothing_of_what_is_written(tmp_path: Path) -> None:
    (first, again), other = on_ranks(config(), trained_on, tmp_path)
    assert (first, again) == other
    assert again == first


def test_the_host_memory_of_copies_is_that_of_the_checkpoint_before(tmp_path: Path) -> None:
    def addresses(engine: TorchTrainEngine, rank: int, folder: Path) -> list[list[int]]:
        found = []
        for step in (1, 2):
            run_step(engine, batch(step))
            snapshot = engine.snapshot(folder / f"step_{step}")
            snapshot.write(folder / f"step_{step}")
            assert snapshot.rows is not None
            found.append([each.content.data_ptr() for each in snapshot.rows.rows])
        return found

    for first, second in on_ranks(config(), addresses, tmp_path):
        assert first == second


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


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except OSError as error:
        return str(error)
    return ""


def test_a_checkpoint_that_cannot_be_begun_fails_on_all_ranks(tmp_path: Path) -> None:
    def save_nowhere(engine: TorchTrainEngine, rank: int, folder: Path) -> str:
        return error_of(lambda: engine.snapshot(folder / "removed" / "run" / "step_0"))

    for found in on_ranks(config(), save_nowhere, tmp_path):
        assert "No such file or directory" in found


def older_and_newer(engine: TorchTrainEngine, folder: Path, write: Callable[[TrainSnapshot], Any]) -> str:
    """A whole checkpoint, then `write` of the next one's snapshot; returns the error of that."""
    run_step(engine, batch(1))
    engine.snapshot(folder / "step_1").write(folder / "step_1")
    run_step(engine, batch(2))
    snapshot = engine.snapshot(folder / "step_2")
    return error_of(lambda: write(snapshot))


def require_the_older_alone(folder: Path) -> None:
    read_checkpoint(folder / "step_1")
    newest = CheckpointStore(folder).newest(before=9)
    assert newest is not None
    assert newest.path == folder / "step_1"


def test_a_rank_whose_disk_is_full_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    pwrite = os.pwrite

    def save_with_a_full_disk(engine: TorchTrainEngine, rank: int, folder: Path) -> str:
        def write(snapshot: TrainSnapshot) -> None:
            def fails(*given: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            os.pwrite = fails if rank == 1 else pwrite
            snapshot.write(folder / "step_2")

        return older_and_newer(engine, folder, write)

    first, second = on_ranks(config(), save_with_a_full_disk, tmp_path)
    assert first == "rank 1 did not write its rows: [Errno 28] No space left on device"
    assert second == "[Errno 28] No space left on device"
    require_the_older_alone(tmp_path)


def test_a_rank_that_is_killed_between_its_copy_and_its_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def save_and_die(engine: TorchTrainEngine, rank: int, folder: Path) -> str:
        def write(snapshot: TrainSnapshot) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            snapshot.write(folder / "step_2")

        return older_and_newer(engine, folder, write)

    first, second = on_ranks(config(), save_and_die, tmp_path)
    assert first == "rank 1 did not write its rows: it left no word"
    assert second is None, "it is gone"
    require_the_older_alone(tmp_path)
    CheckpointStore(tmp_path).remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]

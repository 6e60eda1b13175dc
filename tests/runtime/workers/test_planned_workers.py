"""What workers do with their calls, beside what their engines do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlmux.core.errors import PipelineError
from rlmux.core.model import Stage
from rlmux.rl.origin import Origin, plan_sha256
from rlmux.runtime.records.sample_archive import SampleKeeper
from rlmux.runtime.workers import planned_workers
from rlmux.runtime.workers.planned_workers import EnvWorker, RolloutWorker, TrainWorker
from rlmux.runtime.workers.worker_calls import HandOut, RolloutChunk, TrainCall


def test_env_workers_find_modules_of_one_name_each_in_its_own_pipelines_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlmux.rl.config import TaskConfig, TrainingConfig;"
        "from rlmux.runtime.workers.planned_workers import EnvWorker;"
        "config = TrainingConfig(name='a', task=TaskConfig(name='sort', reward='scores:score'));"
        "EnvWorker(config, code_folder=Path(sys.argv[1])); print(sys.modules['scores'].NAME)"
    )
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.py").write_text(
            f"NAME = {name!r}\ndef score(data_source, solution_str, ground_truth): return 1.0"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "there"), *sys.path])}
    words = [sys.executable, "-c", code, str(tmp_path / "here")]
    ran = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout == "here\n", ran.stderr


def test_newer_weights_come_before_the_state_whose_older_ones_then_stay_behind() -> None:
    calls: list[str] = []
    engine = Mock()
    engine.load_weights.side_effect = lambda path, version: calls.append("load_weights")
    engine.load.side_effect = lambda: calls.append("load")
    RolloutWorker.over(engine, None).take_inputs(
        RolloutChunk(
            weights=(Path("1.safetensors"), 1), requests=(), partials=(), replies=(), released=(), max_decode_steps=1,
            max_seconds=1.0, is_load_needed=True,
        )
    )  # fmt: skip
    assert calls == ["load_weights", "load"]


@pytest.mark.parametrize("given", [None, "max_split_size_mb:64"])
def test_a_gpu_worker_pins_what_it_copies_and_no_more_and_fills_no_memory_first(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", Mock())
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given or "")
    if given is None:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert planned_workers.device_in_use() == "cuda"
    assert os.environ["PYTORCH_ALLOC_CONF"] == (given or "pinned_max_round_threshold_mb:64")
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.fixture
def mine(real: Any) -> Origin:
    return Origin(run_id="mine", pipeline="a", plan_sha256=plan_sha256(real.submission("a").config))


def test_weights_of_another_run_plan_or_version_are_not_sampled_from(
    real: Any, one_thread: None, tmp_path: Any, mine: Origin
) -> None:
    config, path = real.submission("a").config, tmp_path / "0.safetensors"
    hand_out = HandOut(weights=path, writers=(0,), checkpoint=None, num_kept=1)
    warmup = TrainCall(stage=Stage.SFT_WARMUP, max_seconds=60.0, is_load_needed=False, hand_out=hand_out)
    trained = TrainWorker(config, None, mine).run_stage(warmup)
    assert trained.weights_checksum == trained.file_checksum
    chunk = RolloutChunk(
        weights=(path, 0), requests=(), partials=(), replies=(), released=(), max_decode_steps=1, max_seconds=1.0,
        is_load_needed=False,
    )  # fmt: skip
    published = replace(chunk, published=trained.file_checksum)
    assert RolloutWorker(config, mine).run_chunk(published).loaded == trained.file_checksum
    with pytest.raises(PipelineError, match=f"their checksum is {trained.file_checksum}, and the trainer published 0"):
        RolloutWorker(config, mine).run_chunk(replace(chunk, published="0"))
    with pytest.raises(PipelineError, match="of version 0"):
        RolloutWorker(config, mine).run_chunk(replace(chunk, weights=(path, 1)))
    with pytest.raises(PipelineError, match="of another run: mine, this is run theirs"):
        RolloutWorker(config, replace(mine, run_id="theirs")).run_chunk(chunk)
    with pytest.raises(PipelineError, match="of another plan, of pipeline a; this is b"):
        RolloutWorker(config, replace(mine, pipeline="b", plan_sha256="other")).run_chunk(chunk)


def test_samples_of_another_run_or_plan_are_not_trained_on_and_not_continued(
    real: Any, one_thread: None, mine: Origin
) -> None:
    config = real.submission("a").config
    env, rollout = EnvWorker(config, mine), RolloutWorker(config, mine)
    requests, _ = env.begin_step(1)
    chunk = RolloutChunk(
        weights=None, requests=requests, partials=(), replies=(), released=(), max_decode_steps=2, max_seconds=60.0,
        is_load_needed=False,
    )  # fmt: skip
    rollout.run_chunk(chunk)
    partials = rollout.take_partials(False)
    others = RolloutWorker(config, replace(mine, run_id="theirs"))
    with pytest.raises(PipelineError, match="samples of another run: mine"):
        others.run_chunk(replace(chunk, requests=(), partials=partials))
    rest = rollout.run_chunk(replace(chunk, requests=(), partials=partials, max_decode_steps=1000))
    env.on_turns([rest.turns], 1.0)
    payload = env.finish_step(1).payload
    call = TrainCall(stage=Stage.UPDATE, payload=payload, max_seconds=60.0, is_load_needed=False)
    with pytest.raises(PipelineError, match="samples of another run: mine"):
        TrainWorker(config, None, replace(mine, run_id="theirs")).run_stage(call)


def test_a_batch_is_ready_to_leave_before_its_trajectories_are_kept(
    real: Any, one_thread: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps them would take turns with the one that a device waits for."""
    config = real.submission("a").config
    env, rollout = EnvWorker(config, samples=tmp_path / "samples.db"), RolloutWorker(config)
    requests, _ = env.begin_step(1)
    chunk = RolloutChunk(
        weights=None, requests=requests, partials=(), replies=(), released=(), max_decode_steps=1000, max_seconds=60.0,
        is_load_needed=False,
    )  # fmt: skip
    env.on_turns([rollout.run_chunk(chunk).turns], 1.0)
    done: list[str] = []
    pack, measure, keep = pickle.dumps, planned_workers.batch_metrics, SampleKeeper.keep
    monkeypatch.setattr(pickle, "dumps", lambda *args, **named: done.append("packed") or pack(*args, **named))
    monkeypatch.setattr(planned_workers, "batch_metrics", lambda batch: done.append("measured") or measure(batch))
    monkeypatch.setattr(SampleKeeper, "keep", lambda self, batch: done.append("kept") or keep(self, batch))
    env.finish_step(1)
    assert done == ["packed", "measured", "kept"]


def test_a_plan_is_all_that_decides_the_weights_and_not_the_number_of_workers(real: Any) -> None:
    config = real.submission("a").config
    assert plan_sha256(replace(config, rollout=replace(config.rollout, num_workers=7))) == plan_sha256(config)
    changed = [replace(config, seed=2), replace(config, task=replace(config.task, params={"digits": 3}))]
    assert len({plan_sha256(each) for each in [config, *changed]}) == 3

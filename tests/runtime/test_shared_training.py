"""Pipelines with adapters of one base that train in one step in one process, for real."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.runtime.test_shared_rollouts import ADAPTERS, pids_of, run_together

from rlmux.core.events import PipelineRestarted, StageFinished, StagePaused
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.memory.memory_budget import with_footprint

SHORT_STAGES = WorkerOptions(chunk_s=1e-6)
"""A call does one micro-batch of each pipeline."""


@pytest.fixture(scope="module")
def tenants(real):
    """Both begin with an SFT warm-up; the second one's is longer."""
    made = []
    for seed, (name, adapter) in enumerate(ADAPTERS.items()):
        one = real.submission(name, seed=seed, num_steps=2)
        config = replace(one.config, model=replace(one.config.model, seed=5), adapter=adapter)
        warmup = replace(config.sft_warmup, num_updates=8 + 4 * seed, batch_size=8)
        algorithm = replace(config.algorithm, micro_batch_size=4, learning_rate=0.01 * (1 + seed))
        config = replace(config, sft_warmup=warmup, algorithm=algorithm)
        pipeline = replace(one.pipeline, has_sft_warmup=True)
        made.append(with_footprint(replace(one, config=config, pipeline=pipeline), real.cluster()))
    return made


@pytest.fixture(scope="module")
def alone(real, tenants, tmp_path_factory):
    found = {}
    for one in tenants:
        found |= real.run(tmp_path_factory.mktemp(one.config.name), [one]).sha256
    return found


def trained_together(real, folder, tenants, **options):
    return run_together(real, folder, tenants, method="run_stage", options=SHORT_STAGES, **options)


def test_tenants_of_one_base_train_in_one_step_to_the_weights_that_each_trains_alone(real, tenants, alone, tmp_path):
    run, serves = trained_together(real, tmp_path, tenants)
    assert run.sha256 == alone
    pids = pids_of(run.recorder, "train")
    assert pids["small"] == pids["usual"]
    assert 2 in serves.num_chunks, "both warm-ups begin at once"
    ended = [event for event in run.recorder.events if isinstance(event, StageFinished | StagePaused)]
    shares = [share for event in ended for share in event.batches]
    assert all(0.0 < share.charged_s < share.seconds for share in shares)


def test_a_killed_process_of_two_trainers_restarts_both_and_costs_time_only(real, tenants, alone, tmp_path):
    run, _ = trained_together(real, tmp_path, tenants, kills_at=2)
    assert run.sha256 == alone
    restarted = [event.pipeline for event in run.recorder.events if isinstance(event, PipelineRestarted)]
    assert sorted(restarted) == ["small", "usual"]

"""Training ranks that have parts of one model (FSDP2): equal at a fixed number of ranks, whatever happens to them."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmux.core.actions import RunStage, Switch
from rlmux.core.events import PipelineRestarted
from rlmux.core.model import Stage
from rlmux.engines.adapters.lora import ADAPTER_FILE
from rlmux.engines.model.weights import read_tensors, weights_sha256
from rlmux.policies import make_policy
from rlmux.rl.config import AdapterConfig
from rlmux.rl.memory.model_shape import shape_of
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines

TRAIN_STAGES = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE)


def sharded(real, count: int = 2, name: str = "sort", **changes: Any):
    """A tiny pipeline whose model is cut among `count` ranks, which have 3 micro-batches in an update: one each, then
    one rank without."""
    given = real.submission(name, num_steps=2, **changes)
    return cut(given, count)


def cut(given, count: int = 2):
    train = replace(given.config.train, num_workers=count, sharding="shard")
    return replace(
        given,
        config=replace(given.config, algorithm=replace(given.config.algorithm, micro_batch_size=3), train=train),
        pipeline=replace(given.pipeline, num_train_nodes=count),
    )


def whole(given):
    """The same where each rank has all of the model."""
    return replace(given, config=replace(given.config, train=replace(given.config.train, sharding="replicate")))


def with_adapter(real):
    """The pipeline with an adapter of more parts than some of its tensors have rows."""
    given = sharded(real)
    return replace(given, config=replace(given.config, adapter=AdapterConfig(rank=1, alpha=2.0)))


def with_experts(real):
    """The pipeline with three experts in each layer, two for a token, and the loss that keeps them balanced."""
    given = sharded(real)
    train = replace(given.config.train, router_aux_loss_coef=0.01)
    moe = {"architecture": "qwen3_moe", "num_experts": 3, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    return replace(given, config=replace(given.config, model=replace(given.config.model, **moe), train=train))


def steps(run) -> list[Any]:
    return [note for note in run.recorder.notes if note.type == "step"]


@pytest.fixture(scope="module")
def alone(real, tmp_path_factory):
    """The pipeline on two ranks, undisturbed."""
    run = real.run(tmp_path_factory.mktemp("alone"), [sharded(real)], on=real.cluster(train=2))
    assert run.status == {"sort": "finished"}
    return run


def test_a_sharded_model_learns_what_a_whole_one_does_but_for_rounding(real, alone, tmp_path) -> None:
    run = real.run(tmp_path, [whole(sharded(real))], on=real.cluster(train=2))
    require_same_learning(alone, run)
    assert steps(alone)[0].weights_checksum != steps(run)[0].weights_checksum, "sums have another order"


def require_same_learning(found, expected) -> None:
    found, expected = steps(found)[0].metrics, steps(expected)[0].metrics
    for name in ("reward_mean", "tokens", "kl", "entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2), name


@pytest.mark.slow
def test_a_sharded_pipeline_that_shares_its_devices_has_the_weights_of_alone(real, alone, tmp_path) -> None:
    other = real.submission("tool", seed=2, task="calculator")
    options = WorkerOptions(chunk_s=0.0)
    shared = real.run(tmp_path, [sharded(real), other], on=real.cluster(train=2), options=options)
    assert [one for one in steps(shared) if one.pipeline == "sort"] == steps(alone)
    orders = [action for action in shared.recorder.actions if isinstance(action, RunStage)]
    of_gang = [one for one in orders if one.pipeline == "sort" and one.stage in TRAIN_STAGES]
    assert {len(one.devices) for one in of_gang} == {2}
    assert Switch.WARM in {one.switch for one in of_gang}, "its parts left the devices and came back"


class KillsARank:
    """Kills the second rank while the update of a pipeline's step 2 is under way."""

    def __init__(self, pipeline: str = "sort") -> None:
        self.pipeline = pipeline
        self.killed: list[int] = []

    def __call__(self, backend, recorder) -> bool:
        is_due = any(
            isinstance(action, RunStage)
            and (action.pipeline, action.step, action.stage) == (self.pipeline, 2, Stage.UPDATE)
            for action in recorder.actions
        )
        if is_due and not self.killed:
            workers = backend.workers_by_pipeline[self.pipeline]
            self.killed.append(workers.trainers[1].pid)
            os.kill(self.killed[0], signal.SIGKILL)
        return False


@pytest.mark.slow
def test_a_rank_that_dies_takes_its_gang_back_to_the_checkpoint(real, alone, tmp_path) -> None:
    kills = KillsARank()
    run = real.run(tmp_path, [sharded(real)], on=real.cluster(train=2), watch=kills)
    assert run.status == {"sort": "finished"}
    assert kills.killed
    (restart,) = [event for event in run.recorder.events if isinstance(event, PipelineRestarted)]
    assert restart.restored_step == 1
    assert steps(run) == steps(alone)


def interrupted_after_a_step(real, folder) -> None:
    def interrupt(now_s, events, actions, notes) -> None:
        if any(note.type == "step" and note.step == 1 for note in notes):
            os.kill(os.getpid(), signal.SIGINT)

    listener = type("Interrupts", (), {"update": staticmethod(interrupt)})()
    given = [sharded(real)]
    options = RunOptions(listeners=[listener])
    stopped = run_pipelines(real.cluster(train=4), given, make_policy("rollmux"), folder, options, spec={})
    assert not stopped.is_complete


@pytest.mark.slow
def test_a_sharded_run_goes_on_from_its_checkpoint_at_this_and_another_number_of_ranks(real, alone, tmp_path) -> None:
    interrupted_after_a_step(real, tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "four")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "sort" / "step_1")
    assert sum(each.numel() for each in model.parameters()) == shape_of(sharded(real).config.model).num_parameters
    weights = {}
    for name, count in (("two", 2), ("four", 4)):
        given = [sharded(real, count)]
        result = resume_pipelines(real.cluster(train=4), given, make_policy("rollmux"), tmp_path / name)
        assert result.is_complete
        weights[name], _ = read_tensors(tmp_path / name / "sort" / "step_2" / "model.safetensors")
    assert weights_sha256(weights["two"]) == alone.sha256["sort"]
    for name, tensor in weights["two"].items():
        torch.testing.assert_close(weights["four"][name], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_adapter_of_a_base_in_parts_learns_as_one_of_a_whole_base_and_survives_a_rank(real, tmp_path) -> None:
    runs = {}
    for name, given in (("parts", with_adapter(real)), ("whole", whole(with_adapter(real)))):
        runs[name] = real.run(tmp_path / name, [given], on=real.cluster(train=2))
    require_same_learning(runs["parts"], runs["whole"])
    tensors = {name: read_tensors(tmp_path / name / "sort" / "step_2" / ADAPTER_FILE)[0] for name in runs}
    for name, tensor in tensors["whole"].items():
        torch.testing.assert_close(tensors["parts"][name], tensor, rtol=0, atol=1e-4)
    other = real.submission("tool", seed=2, task="calculator")
    options, kills = WorkerOptions(chunk_s=0.0), KillsARank("sort")
    given = [with_adapter(real), other]
    shared = real.run(tmp_path / "shared", given, on=real.cluster(train=2), options=options, watch=kills)
    assert kills.killed
    assert [one for one in steps(shared) if one.pipeline == "sort"] == steps(runs["parts"])


@pytest.mark.slow
def test_a_mixture_of_experts_in_parts_learns_as_a_whole_one_and_survives_a_rank(real, tmp_path) -> None:
    given = with_experts(real)
    run = real.run(tmp_path / "parts", [given], on=real.cluster(train=2))
    assert run.status == {"sort": "finished"}, run.recorder.notes
    require_same_learning(run, real.run(tmp_path / "whole", [whole(given)], on=real.cluster(train=2)))
    kills = KillsARank()
    again = real.run(tmp_path / "killed", [given], on=real.cluster(train=2), watch=kills)
    assert kills.killed
    assert steps(again) == steps(run)

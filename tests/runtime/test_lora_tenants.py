"""Pipelines that train adapters of one base: real runs, shared, killed and resumed, give what each gives alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.core.actions import RunStage
from rlmux.core.events import PipelineRestarted
from rlmux.core.model import Stage
from rlmux.engines.model.weights import read_tensors
from rlmux.policies import make_policy
from rlmux.rl.config import AdapterConfig
from rlmux.runtime.run import RunOptions, resume_pipelines, run_pipelines

ADAPTERS = {
    "small": AdapterConfig(rank=1, alpha=2.0, targets=("q_proj", "v_proj")),
    "usual": AdapterConfig(rank=8, alpha=16.0),
    "wide": AdapterConfig(rank=16, alpha=16.0, targets=("k_proj", "o_proj", "down_proj")),
    "late": AdapterConfig(rank=3, alpha=1.5, targets=("gate_proj", "up_proj")),
}
"""Tenants by name: ranks, scales and targets all differ."""
STEPS = 2


@pytest.fixture(scope="module")
def tenants(real):
    """Four pipelines over the base that `model.seed` 5 makes."""
    made = []
    for seed, (name, adapter) in enumerate(ADAPTERS.items()):
        one = real.submission(name, seed=seed, num_steps=STEPS, staleness=seed % 2)
        config = replace(one.config, model=replace(one.config.model, seed=5), adapter=adapter)
        made.append(replace(one, config=config))
    return made


@pytest.fixture(scope="module")
def alone(real, tenants, tmp_path_factory):
    """The hash of each tenant's adapter when nothing shares the devices."""
    found = {}
    for one in tenants:
        run = real.run(tmp_path_factory.mktemp(one.config.name), [one])
        found |= run.sha256
    assert len(set(found.values())) == len(tenants), "adapters that are alike would prove nothing"
    return found


class KillsATrainer:
    """Kills the trainer of a tenant in its second update, once."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        self.is_done = False

    def __call__(self, backend, recorder) -> bool:
        if self.is_done:
            return False
        is_due = any(
            isinstance(action, RunStage)
            and (action.pipeline, action.stage, action.step) == (self.pipeline, Stage.UPDATE, STEPS)
            for action in recorder.actions
        )
        pids = [
            note.pid
            for note in recorder.notes
            if note.type == "worker" and (note.pipeline, note.role) == (self.pipeline, "train")
        ]
        if is_due and pids:
            os.kill(pids[-1], signal.SIGKILL)
            self.is_done = True
        return False


@pytest.mark.slow
def test_four_tenants_of_one_base_train_together_to_the_adapters_that_each_trains_alone(real, tenants, alone, tmp_path):
    """One of their trainers is killed on the way."""
    kills = KillsATrainer("usual")
    run = real.run(tmp_path, tenants, policy="rlmux", watch=kills)
    assert set(run.status.values()) == {"finished"}
    assert kills.is_done
    assert any(isinstance(event, PipelineRestarted) for event in run.recorder.events)
    assert run.sha256 == alone


class InterruptsAt:
    """Ctrl-C as a step of a pipeline ends."""

    def __init__(self, pipeline: str, step: int) -> None:
        self.at = (pipeline, step)

    def update(self, now_s, events, actions, notes) -> None:
        if any(note.type == "step" and (note.pipeline, note.step) == self.at for note in notes):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_run_of_tenants_is_resumed_to_the_same_adapters(real, tenants, alone, tmp_path):
    two, folder = tenants[:2], tmp_path / "run"
    options = RunOptions(listeners=[InterruptsAt(two[1].config.name, 1)])
    stopped = run_pipelines(real.cluster(), two, make_policy("rollmux"), folder, options, spec={})
    assert not stopped.is_complete
    result = resume_pipelines(real.cluster(), two, make_policy("rollmux"), folder)
    assert {name: one["weights_sha256"] for name, one in result.summary["pipelines"].items()} == {
        one.config.name: alone[one.config.name] for one in two
    }
    for one in two:
        assert adapter_names(folder / one.config.name / f"step_{STEPS}") == targets_of(one.config.adapter)


def adapter_names(checkpoint: Path) -> set[str]:
    """The projections that a checkpoint's adapter stands beside."""
    tensors, _ = read_tensors(checkpoint / "adapter_model.safetensors")
    return {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}


def targets_of(adapter: AdapterConfig) -> set[str]:
    return set(adapter.targets)

"""One sampling worker of several adapters: the sequences of each are, to the bit, those that it samples alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlmux.engines.adapters.lora import inject_adapter, trained_parameters
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weights import SHA256, weights_sha256, write_tensors
from rlmux.rl.client_requests import SampleDone, SampleRequest
from rlmux.rl.config import AdapterConfig, ModelConfig, RolloutConfig, TrainingConfig
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import load_vocabulary
from rlmux.runtime.workers.request_workers import SampleWorker

MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32)
ADAPTERS = {
    "a": AdapterConfig(rank=4, alpha=32.0),
    "b": AdapterConfig(rank=2, alpha=8.0, targets=("q_proj", "down_proj")),
}
"""Tenants by name: ranks, scales and targets differ."""


def config(name: str) -> TrainingConfig:
    rollout = RolloutConfig(max_prompt_tokens=16, max_new_tokens=12, num_slots=4)
    return TrainingConfig(name=name, seed=1, model=MODEL, adapter=ADAPTERS[name], rollout=rollout)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, Path]:
    return random_adapters(tmp_path_factory.mktemp("weights"))


def random_adapters(folder: Path) -> dict[str, Path]:
    """A file of random numbers for each tenant's adapter."""
    found = {}
    for seed, name in enumerate(ADAPTERS):
        model = build_model(MODEL, load_vocabulary(MODEL).vocab_size, 0)
        inject_adapter(model, ADAPTERS[name], 0)
        generator = torch.Generator().manual_seed(seed)
        parameters = trained_parameters(model)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        found[name] = folder / f"{name}.safetensors"
        write_tensors(found[name], parameters, {SHA256: weights_sha256(parameters)})
    return found


def requests(name: str, count: int = 6) -> list[SampleRequest]:
    """More than there are slots; of `b` the prompts are longer."""
    prompts = [tuple(range(3, 6 + number % 6 + 4 * (name == "b"))) for number in range(count)]
    return [
        SampleRequest(
            id=f"r{number}",
            trajectories=[
                TrajectoryRequest(
                    id=TrajectoryId(0, number, sample), prompt_tokens=prompt, max_new_tokens=12, stop_tokens=(),
                    seed=number, temperature=1.0,
                )
                for sample in range(2)
            ],
            prompt_tokens=prompt,
            num_scored=2,
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


def sampled(
    tmp_path: Path, weights: dict[str, Path], names: str, count: int = 6
) -> tuple[dict[tuple[str, str], SampleDone], int]:
    """(answers by tenant and id, chunks in which more than one tenant had tokens) of a worker of these tenants."""
    worker = SampleWorker(config(names[0]), tmp_path)
    for name in names:
        worker.join(name, ADAPTERS[name])
        worker.load_weights(weights[name], name)
        assert worker.add(requests(name, count), name) == []
    return finish(worker)


def finish(worker: SampleWorker) -> tuple[dict[tuple[str, str], SampleDone], int]:
    found, num_shared, num_tokens = {}, 0, 0
    while (report := worker.run_chunk(0.0)).num_active or report.num_waiting or report.answers:
        found.update({(each.tenant, each.id): each.value for each in report.answers})
        num_shared += sum(count > 0 for count in report.tokens_by_tenant.values()) > 1
        assert sum(report.tokens_by_tenant.values()) == report.tokens
        num_tokens += report.tokens
    assert num_tokens == 12 * sum(len(one.sequences) for one in found.values())
    return found, num_shared


def test_two_adapters_in_one_batch_sample_what_each_samples_alone(tmp_path, weights):
    both, num_shared = sampled(tmp_path, weights, "ab")
    assert num_shared > 1, "they were in one batch"
    alone = {**sampled(tmp_path, weights, "a")[0], **sampled(tmp_path, weights, "b")[0]}
    assert both == alone
    assert len(both) == 12
    assert both["a", "r0"].sequences != both["b", "r0"].sequences


def test_a_tenant_that_leaves_changes_nothing_of_the_other_and_may_come_again(tmp_path, weights):
    worker = SampleWorker(config("a"), tmp_path)
    for name in "ab":
        worker.join(name, ADAPTERS[name])
        worker.load_weights(weights[name], name)
        worker.add(requests(name), name)
    worker.run_chunk(0.0)
    worker.offload()
    worker.leave("a")
    worker.load()
    assert answers(worker) == sampled(tmp_path, weights, "b")[0]
    worker.join("a", ADAPTERS["a"])
    worker.load_weights(weights["a"], "a")
    worker.add(requests("a"), "a")
    assert answers(worker) == sampled(tmp_path, weights, "a")[0]


def answers(worker: SampleWorker) -> dict[tuple[str, str], SampleDone]:
    found = {}
    while (report := worker.run_chunk(0.0)).num_active or report.num_waiting or report.answers:
        found.update({(each.tenant, each.id): each.value for each in report.answers})
    return found

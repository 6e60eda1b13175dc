"""LoRA adapters served unmerged by the rollout engine, each row with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from tests.engines.conftest import make_lively
from tests.examples import examples

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.engines.adapters.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    adapter_config_file,
    inject_adapter,
    trained_parameters,
)
from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.model.adapter_rows import LowRank, RowAdapters
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weights import SHA256, read_tensors, weights_sha256, write_tensors
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import (
    ADAPTER_TARGETS,
    TARGETS_BY_ARCHITECTURE,
    AdapterConfig,
    ModelConfig,
    RolloutConfig,
)
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest

VOCAB_SIZE = 41
MIXED = (
    AdapterConfig(rank=1, alpha=3.0, targets=("q_proj", "v_proj")),
    AdapterConfig(rank=4, alpha=8.0, targets=ADAPTER_TARGETS),
    AdapterConfig(rank=16, alpha=16.0, targets=("k_proj", "o_proj", "down_proj", "lm_head")),
    AdapterConfig(rank=5, alpha=2.5, targets=("gate_proj", "up_proj")),
)
"""Four tenants: different ranks, scales and targets."""


def lively_adapter(folder: Path, checkpoint: Path, adapter: AdapterConfig, seed: int) -> Path:
    """A file of an adapter whose B is not zero, as it is after training."""
    model = build_model(ModelConfig(path=str(checkpoint)), VOCAB_SIZE, 0)
    inject_adapter(model, adapter, seed)
    generator = torch.Generator().manual_seed(seed)
    parameters = trained_parameters(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    path = folder / f"adapter-{seed}.safetensors"
    write_tensors(path, parameters, {SHA256: weights_sha256(parameters)})
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [lively_adapter(folder, checkpoint, adapter, seed) for seed, adapter in enumerate(MIXED)]


def engine_for(
    checkpoint: Path, adapter: AdapterConfig | None, num_slots: int = 16, dtype: Any = "float32"
) -> SlotRolloutEngine:
    rollout = RolloutConfig(num_slots=num_slots, max_new_tokens=40, max_prompt_tokens=24, dtype=dtype)
    return SlotRolloutEngine(ModelConfig(path=str(checkpoint)), rollout, vocab_size=VOCAB_SIZE, seed=0, adapter=adapter)


def of_tenant(requests: Sequence[TrajectoryRequest], name: str) -> list[TrajectoryRequest]:
    return [
        TrajectoryRequest(
            id=one.id._replace(adapter=name),
            prompt_tokens=one.prompt_tokens,
            max_new_tokens=one.max_new_tokens,
            stop_tokens=one.stop_tokens,
            seed=one.seed,
        )
        for one in requests
    ]


def what_was_sampled(turns: Sequence[FinishedTurn]) -> dict[TrajectoryId, tuple[object, ...]]:
    return {turn.id._replace(adapter=""): (turn.tokens, turn.logprobs, turn.versions) for turn in turns}


@pytest.fixture(scope="module")
def alone(checkpoint: Path, files: list[Path]) -> Callable[[int, list[TrajectoryRequest]], list[FinishedTurn]]:
    """Sample one tenant's requests with an engine of its own."""

    def run(tenant: int, requests: list[TrajectoryRequest]) -> list[FinishedTurn]:
        engine = engine_for(checkpoint, MIXED[tenant])
        engine.load_weights(files[tenant], 1)
        engine.submit(requests)
        return list(engine.run_chunk(max_decode_steps=10_000, max_seconds=600).finished)

    return run


def test_four_tenants_of_mixed_ranks_in_one_batch_sample_what_each_samples_alone(
    checkpoint, files, alone, new_requests
):
    """Also where chunks end early, and where one tenant's weights change while others decode."""
    engine = engine_for(checkpoint, None)
    for tenant, adapter in enumerate(MIXED):
        engine.add_adapter(f"t{tenant}", adapter)
        engine.load_weights(files[tenant], 1, adapter=f"t{tenant}")
    requests = {tenant: new_requests(2 + tenant, step=tenant + 1) for tenant in range(4)}
    shuffled = [one for tenant in (2, 0, 3, 1) for one in of_tenant(requests[tenant], f"t{tenant}")]
    engine.submit(shuffled[::2] + shuffled[1::2])
    finished: list[FinishedTurn] = []
    while engine.num_unfinished:
        finished += engine.run_chunk(max_decode_steps=7, max_seconds=600).finished
    for tenant in range(4):
        together = [turn for turn in finished if turn.id.adapter == f"t{tenant}"]
        assert what_was_sampled(together) == what_was_sampled(alone(tenant, requests[tenant]))
    texts = {tuple(turn.tokens) for turn in finished}
    assert len(texts) > len(finished) / 2, "adapters of one base must differ for this to prove anything"


def test_a_tenant_joins_leaves_the_device_and_gets_weights_while_others_are_under_way(
    checkpoint, files, alone, new_requests
):
    engine = engine_for(checkpoint, MIXED[0])
    engine.load_weights(files[0], 1)
    own, other = new_requests(4, step=1), new_requests(3, step=2)
    engine.submit(own)
    finished = list(engine.run_chunk(max_decode_steps=5, max_seconds=600).finished)
    engine.add_adapter("late", MIXED[2])
    engine.offload()
    engine.load_weights(files[2], 1, adapter="late")
    engine.load()
    engine.submit(of_tenant(other, "late"))
    while engine.num_unfinished:
        finished += engine.run_chunk(max_decode_steps=9, max_seconds=600).finished
    assert what_was_sampled([turn for turn in finished if not turn.id.adapter]) == what_was_sampled(alone(0, own))
    assert what_was_sampled([turn for turn in finished if turn.id.adapter]) == what_was_sampled(alone(2, other))


def test_an_offload_records_tokens_with_the_version_of_the_adapter_that_made_them(checkpoint, files, new_requests):
    engine = engine_for(checkpoint, None)
    engine.add_adapter("t", MIXED[0])
    engine.load_weights(files[0], 3, adapter="t")
    engine.submit(of_tenant(new_requests(2, step=1), "t"))
    finished = list(engine.run_chunk(max_decode_steps=5, max_seconds=600).finished)
    assert engine.num_unfinished
    engine.offload()
    engine.load()
    while engine.num_unfinished:
        finished += engine.run_chunk(max_decode_steps=100, max_seconds=600).finished
    assert {version for turn in finished for version in turn.versions} == {3}


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_whatever_adapters_the_other_rows_have(data):
    """For every number of neighbours and every rank: own rows of a mixed batch against the tenant's batch alone."""
    torch.set_num_threads(1)
    ranks = data.draw(st.lists(st.integers(1, 33), min_size=1, max_size=5))
    num_rows, num_in, num_out = data.draw(st.sampled_from([(8, 64, 96), (16, 48, 64), (64, 128, 32)]))
    owners = data.draw(st.lists(st.integers(0, len(ranks) - 1), min_size=num_rows, max_size=num_rows))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    inputs = torch.randn(num_rows, num_in, generator=generator)
    base = torch.randn(num_rows, num_out, generator=generator)
    adapters = [
        [{"qkv": LowRank(down=torch.randn(num_in, rank, generator=generator), up=torch.randn(rank, num_out))}]
        for rank in ranks
    ]
    owner = torch.tensor(owners).unsqueeze(1)
    mixed = base.clone()
    RowAdapters([(layers, owner != number) for number, layers in enumerate(adapters)]).add(0, "qkv", inputs, mixed)
    for number, layers in enumerate(adapters):
        only = base.clone()
        RowAdapters([(layers, None)]).add(0, "qkv", inputs, only)
        own = (owner == number).squeeze(1)
        assert torch.equal(mixed[own], only[own])


def test_an_adapter_with_b_zero_samples_what_the_base_samples(checkpoint, new_requests, drain):
    plain, adapted = engine_for(checkpoint, None), engine_for(checkpoint, MIXED[1])
    for engine in (plain, adapted):
        engine.submit(new_requests(3))
    assert drain(plain) == drain(adapted)


def test_trajectories_of_two_tenants_share_no_prefilled_prompt(checkpoint, files, alone, new_requests):
    engine = engine_for(checkpoint, MIXED[0])
    engine.add_adapter("other", MIXED[1])
    engine.load_weights(files[0], 1)
    engine.load_weights(files[1], 1, adapter="other")
    requests = new_requests(2)
    engine.submit([*requests, *of_tenant(requests, "other")])
    finished = engine.run_chunk(max_decode_steps=10_000, max_seconds=600).finished
    assert what_was_sampled([one for one in finished if one.id.adapter]) == what_was_sampled(alone(1, requests))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # in peft itself
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("tenant", range(4))
def test_sampled_log_probs_are_those_that_peft_computes(checkpoint, files, alone, new_requests, tmp_path, tenant):
    """The unmerged product of the rollout engine against `PeftModel.from_pretrained` over the same base."""
    requests = new_requests(2)
    assert_as_peft(alone(tenant, requests), requests, checkpoint, files[tenant], MIXED[tenant], tmp_path)


def assert_as_peft(turns, requests, checkpoint: Path, file: Path, adapter: AdapterConfig, folder: Path) -> None:
    (folder / ADAPTER_FILE).write_bytes(file.read_bytes())
    (folder / ADAPTER_CONFIG_FILE).write_bytes(adapter_config_file(adapter, str(checkpoint)))
    model = PeftModel.from_pretrained(build_model(ModelConfig(path=str(checkpoint)), VOCAB_SIZE, 0), folder)
    for turn, request in zip(sorted(turns, key=lambda one: one.id), requests, strict=True):
        tokens = torch.tensor([[*request.prompt_tokens, *turn.tokens]])
        with torch.no_grad():
            distribution = torch.log_softmax(model(input_ids=tokens).logits[0], dim=-1)
        start = len(request.prompt_tokens)
        expected = [float(distribution[start + at - 1, token]) for at, token in enumerate(turn.tokens)]
        assert turn.logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # in peft itself
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("architecture", [each for each in TARGETS_BY_ARCHITECTURE if each != "qwen3"])
def test_adapters_of_each_architecture_are_served_as_peft_computes_them(architecture, new_requests, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    model = ModelConfig(architecture=architecture, **(experts if architecture == "qwen3_moe" else {}))
    adapter = replace(MIXED[1], targets=TARGETS_BY_ARCHITECTURE[architecture])
    base = make_lively(build_model(model, VOCAB_SIZE, 0))
    base.save_pretrained(tmp_path / "base")
    file = lively_adapter(tmp_path, tmp_path / "base", adapter, 1)
    engine = engine_for(tmp_path / "base", adapter)
    engine.load_weights(file, 1)
    requests = new_requests(2)
    engine.submit(requests)
    turns = engine.run_chunk(max_decode_steps=10_000, max_seconds=600).finished
    assert_as_peft(turns, requests, tmp_path / "base", file, adapter, tmp_path)


def test_an_adapter_that_is_not_finite_is_refused_before_it_can_reach_other_rows(checkpoint, files, tmp_path):
    engine = engine_for(checkpoint, MIXED[1])
    tensors, _ = read_tensors(files[1])
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = float("inf")
    write_tensors(tmp_path / "bad.safetensors", tensors, {})
    with pytest.raises(PipelineError, match=f"{name} has numbers that are not finite"):
        engine.load_weights(tmp_path / "bad.safetensors", 1)
    assert engine.version == 0


def test_files_of_another_adapter_and_names_that_are_not_served_are_refused(checkpoint, files, new_requests):
    engine = engine_for(checkpoint, MIXED[1])
    with pytest.raises(UserError, match="is missing; accepted: the tensors that peft writes"):
        engine.load_weights(files[2], 1)
    with pytest.raises(UserError, match="adapter 'b' is not served here; accepted: ''"):
        engine.submit(of_tenant(new_requests(1), "b"))
    with pytest.raises(UserError, match="adapter '' is there already"):
        engine.add_adapter("", MIXED[0])
    engine.add_adapter("base", None)
    with pytest.raises(IllegalTransitionError, match="a base that adapters stand on"):
        engine.load_weights(files[2], 1, adapter="base")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_finds_an_engine_with_an_adapter_exact_on_this_machine(checkpoint, dtype):
    report = probe_rollout(engine_for(checkpoint, MIXED[1], num_slots=8, dtype=dtype))
    assert all(check.is_equal for check in report.checks if check.name != "recomputation")

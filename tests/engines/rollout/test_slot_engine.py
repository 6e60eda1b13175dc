"""One request, one answer: what a schedule may not change, and what the chunk contract promises."""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.core.model import SubStage
from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.transformer import DecodePlan, DecoderWeights, KvCache, PositionTables
from rlmux.engines.model.weights import read_weights
from rlmux.engines.residency import Offloaded, storage_bytes
from rlmux.engines.rollout.batch_probe import BatchProbe
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import ModelConfig, RolloutConfig
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest, TurnReply

NewTensors = Callable[[], list[torch.Tensor]]
NewEngine = Callable[..., SlotRolloutEngine]
NewRequests = Callable[..., list[TrajectoryRequest]]
Drain = Callable[..., list[FinishedTurn]]

LOGPROB_ERROR = {"float32": 1e-4, "bfloat16": 0.2}
"""Nats by which log-probs may differ from a float32 forward."""
IN_EITHER_DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
IN_ANY_CACHE = pytest.mark.parametrize(
    ("dtype", "kv_tokens"),
    [("float32", None), ("bfloat16", None), ("float32", 160), ("bfloat16", 160)],
    ids=["float32", "bfloat16", "float32-short", "bfloat16-short"],
)
"""Slots of full length, or 160 tokens, which are two of them: slots become longer and trajectories leave them."""
WITH_A_SHORT_CACHE = pytest.mark.parametrize("kv_tokens", [None, 160])


@pytest.fixture
def requests(new_requests: NewRequests) -> list[TrajectoryRequest]:
    return new_requests(16)


@pytest.fixture
def expected(new_engine: NewEngine, requests: list[TrajectoryRequest], drain: Drain) -> list[FinishedTurn]:
    """The answers of an engine that got everything at once and was never disturbed."""
    engine = new_engine()
    engine.submit(requests)
    return drain(engine)


@torch.inference_mode()
def full_forward_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


# --- the same bits under any schedule ----------------------------------------------------------------------


def test_answers_vary_in_length_and_reason(expected: list[FinishedTurn]) -> None:
    assert {turn.stop_reason for turn in expected} == {"stop", "length"}
    assert len({len(turn.tokens) for turn in expected}) > 8
    assert all(len(turn.tokens) == len(turn.logprobs) == len(turn.versions) for turn in expected)


@IN_EITHER_DTYPE
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_full_forward(
    dtype: str,
    temperature: float,
    lively_model: PreTrainedModel,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    drain: Drain,
) -> None:
    engine = new_engine(temperature=temperature)
    engine.submit(requests)
    for request, turn in zip(requests, drain(engine), strict=True):
        reference = full_forward_logprobs(lively_model, request.prompt_tokens, turn.tokens, temperature)
        assert (reference - torch.tensor(turn.logprobs, dtype=torch.float64)).abs().max() < LOGPROB_ERROR[dtype]


@IN_ANY_CACHE
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_submission_changes_nothing(
    seed: int,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    expected: list[FinishedTurn],
    drain: Drain,
) -> None:
    engine = new_engine()
    engine.submit(random.Random(seed).sample(requests, len(requests)))
    assert drain(engine) == expected


@IN_ANY_CACHE
@pytest.mark.parametrize("chunk_steps", [1, 3, 7])
def test_chunk_boundaries_change_nothing(
    chunk_steps: int,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    expected: list[FinishedTurn],
    drain: Drain,
) -> None:
    engine = new_engine()
    engine.submit(requests)
    assert drain(engine, chunk_steps=chunk_steps) == expected


@IN_ANY_CACHE
def test_companions_change_nothing(
    new_engine: NewEngine, requests: list[TrajectoryRequest], expected: list[FinishedTurn], drain: Drain
) -> None:
    for request, turn in list(zip(requests, expected, strict=True))[::5]:
        engine = new_engine()
        engine.submit([request])
        assert drain(engine) == [turn]


@IN_ANY_CACHE
def test_requests_that_come_later_change_nothing(
    new_engine: NewEngine, requests: list[TrajectoryRequest], expected: list[FinishedTurn], drain: Drain
) -> None:
    engine = new_engine()
    finished: list[FinishedTurn] = []
    for start in range(0, len(requests), 6):
        engine.submit(requests[start : start + 6])
        finished += engine.run_chunk(max_decode_steps=4, max_seconds=60.0).finished
    assert sorted(finished + drain(engine), key=lambda turn: turn.id) == expected


@IN_EITHER_DTYPE
@pytest.mark.parametrize("kv_tokens", [80, 160, 320])
def test_slots_that_follow_the_tokens_in_flight_change_no_answer(
    dtype: str, kv_tokens: int, checkpoint: Path, new_engine: NewEngine, new_requests: NewRequests, drain: Drain
) -> None:
    """Against slots of full length: attention, one product for each head, has the same bits beside fewer of them."""
    requests = new_requests(16)
    rollout = RolloutConfig(num_slots=16, max_new_tokens=40, max_prompt_tokens=24, dtype=dtype)  # type: ignore[arg-type]
    whole = SlotRolloutEngine(ModelConfig(path=str(checkpoint)), rollout, vocab_size=41, seed=0)
    short = new_engine()
    for engine in (whole, short):
        engine.submit(requests)
    assert drain(short) == drain(whole)


@pytest.mark.parametrize("kv_tokens", [160])
def test_more_short_answers_run_at_once_than_slots_of_full_length_would_fit(
    kv_tokens: int, new_engine: NewEngine, new_requests: NewRequests, drain: Drain
) -> None:
    engine = new_engine()
    long, *short = (replace(one, prompt_tokens=(3,), stop_tokens=()) for one in new_requests(8))
    engine.submit([replace(one, max_new_tokens=8) for one in short])
    assert engine.run_chunk(max_decode_steps=1, max_seconds=60.0).num_active == 10  # of 16 tokens; 2 of full length
    drain(engine)
    engine.submit([replace(long, max_new_tokens=40), *(replace(one, max_new_tokens=30) for one in short[:9])])
    num_active = [engine.run_chunk(max_decode_steps=steps, max_seconds=60.0).num_active for steps in (8, 16, 12)]
    assert num_active == [10, 5, 3]
    drain(engine)
    engine.submit([replace(one, max_new_tokens=8) for one in short])
    assert engine.run_chunk(max_decode_steps=1, max_seconds=60.0).num_active == 10


@pytest.mark.parametrize("kv_tokens", [160])
def test_what_leaves_a_slot_before_its_first_token_is_computed_with_new_weights(
    kv_tokens: int,
    tmp_path: Path,
    lively_model: PreTrainedModel,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    drain: Drain,
) -> None:
    engine, fresh = new_engine(), new_engine()
    engine.submit(requests)
    engine.run_chunk(max_decode_steps=0, max_seconds=60.0)
    engine.offload()
    engine.load()
    for each in (engine, fresh):
        each.load_weights(weight_file(lively_model, tmp_path / "w.safetensors", 0.5), 1)
    fresh.submit(requests)
    assert drain(engine) == drain(fresh)


@IN_ANY_CACHE
def test_offloading_in_the_middle_changes_nothing_and_frees_everything(
    dtype: str,
    kv_tokens: int | None,
    lively_model: PreTrainedModel,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    expected: list[FinishedTurn],
    drain: Drain,
) -> None:
    engine = new_engine()
    held = engine.resident_bytes()
    weights = DecoderWeights(DecoderShape.of(lively_model), torch.device("cpu"), getattr(torch, dtype))
    form = DecoderShape.of(lively_model), 16, 80, torch.device("cpu"), weights.flat.dtype
    assert held > storage_bytes(KvCache(*form, num_tokens=kv_tokens).tensors()) + weights.flat.nbytes
    engine.submit(requests)
    finished = list(engine.run_chunk(max_decode_steps=6, max_seconds=60.0).finished)
    engine.offload()
    engine.offload()
    assert engine.resident_bytes() == 0
    with pytest.raises(IllegalTransitionError, match="offloaded"):
        engine.run_chunk(max_decode_steps=1, max_seconds=1.0)
    engine.load()
    engine.load()
    assert engine.resident_bytes() == held
    assert sorted(finished + drain(engine), key=lambda turn: turn.id) == expected


@IN_ANY_CACHE
def test_migration_with_kv_changes_nothing(
    new_engine: NewEngine, requests: list[TrajectoryRequest], expected: list[FinishedTurn], drain: Drain
) -> None:
    source, target = new_engine(), new_engine()
    source.submit(requests)
    finished = list(source.run_chunk(max_decode_steps=9, max_seconds=60.0).finished)
    partials = source.take_partials(None, with_kv=True)
    assert [partial.request.id for partial in partials] == sorted(partial.request.id for partial in partials)
    assert sum(len(partial.tokens) > 0 for partial in partials) >= 4
    assert sum(not partial.tokens for partial in partials) >= 4
    assert drain(source) == []
    target.continue_from(partials[::-1])
    assert sorted(finished + drain(target), key=lambda turn: turn.id) == expected


@WITH_A_SHORT_CACHE
def test_migration_without_kv_moves_logprobs_by_rounding_only(
    new_engine: NewEngine, requests: list[TrajectoryRequest], expected: list[FinishedTurn], drain: Drain
) -> None:
    source, target = new_engine(), new_engine()
    source.submit(requests)
    finished = list(source.run_chunk(max_decode_steps=9, max_seconds=60.0).finished)
    target.continue_from(source.take_partials(None, with_kv=False))
    finished = sorted(finished + drain(target), key=lambda turn: turn.id)
    assert [turn.tokens for turn in finished] == [turn.tokens for turn in expected]
    worst = max(
        abs(a - b)
        for left, right in zip(finished, expected, strict=True)
        for a, b in zip(left.logprobs, right.logprobs, strict=True)
    )
    assert worst < 5e-5


@IN_ANY_CACHE
def test_where_no_smaller_batch_is_exact_the_full_one_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    expected: list[FinishedTurn],
    drain: Drain,
) -> None:
    monkeypatch.setattr(BatchProbe, "is_decode_exact", lambda self, width, window, capacity: False)
    monkeypatch.setattr(BatchProbe, "is_prefill_exact", lambda self, rows, length: False)
    monkeypatch.setattr("rlmux.engines.rollout.batch_probe.is_exact_by_shape", {})
    engine = new_engine()
    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    assert sorted(report.finished, key=lambda turn: turn.id) == expected
    assert {each.num_rows for each in report.iterations if each.sub_stage is SubStage.TAIL_DECODE} == {16}


def test_this_machine_allows_smaller_batches_only_where_their_bits_are_equal(
    lively_model: PreTrainedModel,
) -> None:
    weights = DecoderWeights(DecoderShape.of(lively_model), torch.device("cpu"))
    weights.refresh(lively_model.state_dict())
    tables = PositionTables(lively_model, max_len=80, device=torch.device("cpu"))
    probe = BatchProbe(weights, tables, num_slots=16, max_len=80)
    assert probe.is_slot_exact
    for num_rows in (1, 5, 9, 16):
        width, window = probe.decode_shape(num_rows, 20, 80)
        assert width >= num_rows
        assert window >= 20
        assert (width, window) == (16, 80) or probe.is_decode_exact(width, window, 80)


@pytest.fixture
def new_tensors() -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Tensors made since the fixture or the last call that this process can still reach.

    What was there before is frozen, so that neither the collector nor the search goes through all of this process.
    """

    def found() -> list[torch.Tensor]:
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        gc.freeze()
        return tensors

    gc.freeze()
    yield found
    gc.unfreeze()


def test_a_search_for_new_tensors_finds_one_that_stays(new_tensors: NewTensors) -> None:
    kept = torch.ones(3)
    torch.ones(4)
    assert [each is kept for each in new_tensors()] == [True]
    assert new_tensors() == []


def test_a_probe_leaves_no_tensor_behind(
    monkeypatch: pytest.MonkeyPatch, lively_model: PreTrainedModel, new_tensors: NewTensors
) -> None:
    monkeypatch.setattr("rlmux.engines.rollout.batch_probe.is_exact_by_shape", {})
    weights = DecoderWeights(DecoderShape.of(lively_model), torch.device("cpu"))
    tables = PositionTables(lively_model, max_len=80, device=torch.device("cpu"))
    probe = BatchProbe(weights, tables, num_slots=16, max_len=80)
    new_tensors()
    assert probe.is_slot_exact
    probe.decode_shape(5, 20, 80)
    assert new_tensors() == []


def test_a_shape_whose_bits_differ_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    expected: list[FinishedTurn],
    drain: Drain,
) -> None:
    step = DecodePlan.step

    def step_that_rounds_differently(plan: DecodePlan, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = step(plan, tokens, positions)
        return logits if plan.width in (8, 16) else logits * (1 + 2**-20)

    monkeypatch.setattr(DecodePlan, "step", step_that_rounds_differently)
    monkeypatch.setattr("rlmux.engines.rollout.batch_probe.is_exact_by_shape", {})
    engine = new_engine()
    assert engine.is_schedule_exact
    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    assert sorted(report.finished, key=lambda turn: turn.id) == expected
    assert {each.num_rows for each in report.iterations if each.sub_stage is not SubStage.PREFILL} == {8, 16}


# --- the chunk contract ------------------------------------------------------------------------------------


def test_a_freed_slot_is_refilled_at_once(new_engine: NewEngine, new_requests: NewRequests) -> None:
    requests = new_requests(20, stop_tokens=())
    engine = new_engine(num_slots=4)
    engine.submit(requests)
    free_at = [0] * 4
    for request in requests:
        heapq.heapreplace(free_at, free_at[0] + request.max_new_tokens)
    report = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    assert report.decode_steps == max(free_at)
    assert report.sampled_tokens == sum(request.max_new_tokens for request in requests)


def test_one_answer_of_each_prompt_first_ends_sooner_and_changes_no_answer(new_engine, new_requests):
    """Five prompts have short answers, the last one has long ones."""
    short, long = new_requests(5, stop_tokens=(), max_new_tokens=3), new_requests(6, stop_tokens=(), max_new_tokens=36)
    requests = [*short, *long[-2:]]
    steps, answers = {}, {}
    for order in ("given", "longest"):
        engine = new_engine(num_slots=2, order=order)
        engine.submit(requests)
        report = engine.run_chunk(max_decode_steps=1000, max_seconds=60.0)
        steps[order] = report.decode_steps
        answers[order] = sorted(report.finished, key=lambda turn: turn.id)
    assert answers["longest"] == answers["given"]
    assert steps["longest"] < steps["given"]


def test_a_chunk_keeps_its_step_limit_and_makes_a_step_however_little_time_it_has(
    new_engine: NewEngine, requests: list[TrajectoryRequest]
) -> None:
    engine = new_engine()
    engine.submit(requests)
    assert engine.run_chunk(max_decode_steps=5, max_seconds=60.0).decode_steps == 5
    assert engine.run_chunk(max_decode_steps=5, max_seconds=0.0).decode_steps == 1
    assert engine.run_chunk(max_decode_steps=0, max_seconds=60.0).decode_steps == 0


def test_a_report_adds_up(
    new_engine: NewEngine, requests: list[TrajectoryRequest], expected: list[FinishedTurn]
) -> None:
    engine = new_engine()
    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    assert report.sampled_tokens == sum(len(turn.tokens) for turn in expected)
    distinct = {request.prompt_tokens for request in requests}
    assert report.prefill_tokens >= sum(len(tokens) - 1 for tokens in distinct)
    decoded = [each for each in report.iterations if each.sub_stage is not SubStage.PREFILL]
    assert sum(each.tokens for each in decoded) == report.sampled_tokens
    assert sum(each.ms for each in report.iterations) <= report.seconds * 1e3
    assert (report.num_active, report.num_waiting, report.num_waiting_for_env) == (0, 0, 0)


def test_the_prompt_of_a_group_is_prefilled_once(new_engine: NewEngine, new_requests: NewRequests) -> None:
    engine = new_engine()
    requests = new_requests(2, group_size=8)
    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=1, max_seconds=60.0)
    assert report.prefill_tokens == sum(len(requests[i].prompt_tokens) - 1 for i in (0, 8))


def test_the_first_weights_are_those_of_build_model(drain: Drain) -> None:
    config, rollout = ModelConfig(), RolloutConfig(num_slots=4, max_new_tokens=8, max_prompt_tokens=8)
    engine = SlotRolloutEngine(config, rollout, vocab_size=30, seed=3)
    request = TrajectoryRequest(
        id=TrajectoryId(1, 0, 0), prompt_tokens=(4, 2), max_new_tokens=8, stop_tokens=(), seed=3
    )
    engine.submit([request])
    (turn,) = drain(engine)
    reference = full_forward_logprobs(build_model(config, 30, 3), (4, 2), turn.tokens)
    assert (reference - torch.tensor(turn.logprobs, dtype=torch.float64)).abs().max() < 1e-4


# --- weights -----------------------------------------------------------------------------------------------


def weight_file(model: PreTrainedModel, path: Path, scale: float) -> Path:
    tied = {"lm_head.weight"}
    save_file({k: v * scale for k, v in model.state_dict().items() if k not in tied}, path)
    return path


@IN_EITHER_DTYPE
@pytest.mark.parametrize(("is_offloaded", "is_spilled"), [(False, False), (True, False), (True, True)])
def test_new_weights_are_used_and_named_in_the_versions(
    dtype: str,
    is_offloaded: bool,
    is_spilled: bool,
    tmp_path: Path,
    lively_model: PreTrainedModel,
    new_engine: NewEngine,
    requests: list[TrajectoryRequest],
    expected: list[FinishedTurn],
    drain: Drain,
) -> None:
    engine = new_engine()
    engine.submit(requests)
    assert drain(engine) == expected
    if is_offloaded:
        engine.offload(spill_to=tmp_path / "spilled" if is_spilled else None)
    engine.load_weights(weight_file(lively_model, tmp_path / "w.safetensors", 0.5), 7)
    engine.load()
    engine.submit(requests)
    finished = drain(engine)
    assert {version for turn in finished for version in turn.versions} == {7}
    assert [turn.tokens for turn in finished] != [turn.tokens for turn in expected]
    halved = build_model(ModelConfig(), 41, 0)
    halved.load_state_dict({k: v * 0.5 for k, v in lively_model.state_dict().items()})
    reference = full_forward_logprobs(halved, requests[0].prompt_tokens, finished[0].tokens)
    assert (reference - torch.tensor(finished[0].logprobs, dtype=torch.float64)).abs().max() < LOGPROB_ERROR[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoints_weights_are_rounded_to_what_the_trainer_computes_with(
    dtype: str, tmp_path: Path, lively_model: PreTrainedModel
) -> None:
    """The same fused weights as from the published version: a norm's gain is rounded before it is multiplied."""
    masters = {name: each for name, each in lively_model.state_dict().items() if name != "lm_head.weight"}
    save_file(masters, tmp_path / "checkpoint")
    save_file({name: each.bfloat16() for name, each in masters.items()}, tmp_path / "published")
    rollout = RolloutConfig(num_slots=4, max_new_tokens=8, max_prompt_tokens=8, dtype=dtype)
    fused = []
    for name in ("checkpoint", "published"):
        engine = SlotRolloutEngine(ModelConfig(), rollout, vocab_size=41, seed=0, trained_dtype="bfloat16")
        engine.load_weights(tmp_path / name, 1)
        fused.append(engine._weights.flat.clone())
    assert torch.equal(*fused)


def test_weights_that_are_replaced_while_offloaded_are_not_copied_back(
    tmp_path: Path, lively_model: PreTrainedModel, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy_to = Offloaded.copy_to

    def note(offloaded: Offloaded, tensors: Sequence[torch.Tensor], *, num_skipped: int = 0) -> None:
        copied.append(sum(tensor.nbytes for tensor in tensors[num_skipped:]))
        copy_to(offloaded, tensors, num_skipped=num_skipped)

    monkeypatch.setattr(Offloaded, "copy_to", note)
    engine = new_engine()
    for version in (1, None):
        engine.offload()
        if version is not None:
            engine.load_weights(weight_file(lively_model, tmp_path / "w.safetensors", 0.5), version)
        engine.load()
    assert copied[1] - copied[0] == engine._weights.flat.nbytes


def test_a_folder_is_read_tensor_by_tensor_to_the_bits_of_the_model_that_is_built(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, new_engine: NewEngine
) -> None:
    mapped = new_engine()._weights.flat
    monkeypatch.setattr("rlmux.engines.adapters.shared_base.weight_paths", lambda folder: [])
    assert torch.equal(new_engine()._weights.flat, mapped)


def test_a_weight_file_keeps_no_tensor_and_outlives_its_name(
    tmp_path: Path, lively_model: PreTrainedModel, new_tensors: NewTensors
) -> None:
    path = weight_file(lively_model, tmp_path / "w.safetensors", 1.0)
    tensors = read_weights(path, 1)
    path.unlink()
    new_tensors()
    for name in tensors:
        assert torch.equal(tensors[name], lively_model.state_dict()[name])
    assert new_tensors() == []
    path.write_bytes(b"no weights")
    with pytest.raises(SafetensorError):
        read_weights(path, 1)


def test_a_sync_pipeline_refuses_weights_in_the_middle_of_a_trajectory(
    tmp_path: Path, lively_model: PreTrainedModel, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    path = weight_file(lively_model, tmp_path / "w.safetensors", 0.5)
    engine = new_engine()
    engine.submit(new_requests(1, stop_tokens=()))
    engine.load_weights(path, 1)
    engine.run_chunk(max_decode_steps=1, max_seconds=60.0)
    with pytest.raises(IllegalTransitionError, match="version 2"):
        engine.load_weights(path, 2)
    assert engine.version == 1


@WITH_A_SHORT_CACHE
def test_an_async_trajectory_keeps_the_version_of_each_token(
    tmp_path: Path,
    lively_model: PreTrainedModel,
    new_engine: NewEngine,
    new_requests: NewRequests,
    drain: Drain,
) -> None:
    engine = new_engine(staleness=1)
    request = replace(new_requests(1, group_size=1, stop_tokens=())[0], max_new_tokens=10)
    engine.submit([request])
    engine.run_chunk(max_decode_steps=4, max_seconds=60.0)
    engine.load_weights(weight_file(lively_model, tmp_path / "w.safetensors", 0.5), 1)
    (turn,) = drain(engine)
    assert turn.versions == (0,) * 4 + (1,) * 6


def test_weights_that_are_not_numbers_stop_the_pipeline(
    tmp_path: Path, lively_model: PreTrainedModel, new_engine: NewEngine, requests: list[TrajectoryRequest]
) -> None:
    engine = new_engine()
    engine.load_weights(weight_file(lively_model, tmp_path / "w.safetensors", float("nan")), 1)
    engine.submit(requests)
    with pytest.raises(PipelineError, match="not finite"):
        engine.run_chunk(max_decode_steps=100, max_seconds=60.0)


# --- turns -------------------------------------------------------------------------------------------------


def play(engine: SlotRolloutEngine, *, num_replies: int, chunk_steps: int = 10_000) -> list[FinishedTurn]:
    """Answer each stop with tokens made from what was said, `num_replies` times; the last turn of each."""
    over: list[FinishedTurn] = []
    while True:
        report = engine.run_chunk(max_decode_steps=chunk_steps, max_seconds=60.0)
        last = [t for t in report.finished if t.stop_reason == "length" or t.num_turns > num_replies]
        over += last
        replies = [
            TurnReply(id=turn.id, tokens=(len(turn.tokens) % 7, 9, 5)) for turn in report.finished if turn not in last
        ]
        engine.reply(replies, [turn.id for turn in last])
        if not replies and not report.num_active and not report.num_waiting:
            return sorted(over, key=lambda turn: turn.id)


def test_an_empty_reply_continues_the_turn(
    lively_model: PreTrainedModel, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    requests = new_requests(12, stop_tokens=(5, 6, 7))
    engine = new_engine(is_single_turn=False)
    engine.submit(requests)
    over: dict[TrajectoryId, FinishedTurn] = {}
    while len(over) < len(requests):
        finished = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0).finished
        over |= {turn.id: turn for turn in finished if turn.stop_reason == "length"}
        engine.reply([TurnReply(id=turn.id, tokens=()) for turn in finished if turn.stop_reason == "stop"], [])
    assert max(turn.num_turns for turn in over.values()) > 2
    for request in requests:
        turn = over[request.id]
        reference = full_forward_logprobs(lively_model, request.prompt_tokens, turn.tokens)
        assert (reference - torch.tensor(turn.logprobs, dtype=torch.float64)).abs().max() < 1e-4
        assert all(turn.is_sampled)


@WITH_A_SHORT_CACHE
def test_a_trajectory_of_several_turns_equals_its_teacher_forced_context(
    lively_model: PreTrainedModel, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    requests = [replace(request, max_new_tokens=40) for request in new_requests(12, stop_tokens=(5, 6, 7))]
    engine = new_engine(is_single_turn=False)
    engine.submit(requests)
    turns = play(engine, num_replies=3)
    assert max(turn.num_turns for turn in turns) == 4
    for request, turn in zip(requests, turns, strict=True):
        reference = full_forward_logprobs(lively_model, request.prompt_tokens, turn.tokens)
        is_sampled = torch.tensor(turn.is_sampled)
        logprobs = torch.tensor(turn.logprobs, dtype=torch.float64)
        assert (reference - logprobs)[is_sampled].abs().max() < 1e-4
        assert (logprobs[~is_sampled] == 0.0).all()
        for index, (token, sampled) in enumerate(zip(turn.tokens, turn.is_sampled, strict=True)):
            if token in (5, 6, 7) and sampled and index + 1 < len(turn.tokens):
                said = turn.tokens[index + 1 : index + 4]
                assert said == ((index + 1) % 7, 9, 5)[: len(said)]
                assert turn.is_sampled[index + 1 : index + 4] == (False,) * len(said)


@WITH_A_SHORT_CACHE
@pytest.mark.parametrize("chunk_steps", [1, 2, 5])
def test_turns_are_the_same_under_any_chunks(
    chunk_steps: int, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    requests = new_requests(12, stop_tokens=(5, 6, 7))
    calm, hurried = new_engine(is_single_turn=False), new_engine(is_single_turn=False)
    calm.submit(requests)
    hurried.submit(requests)
    assert play(hurried, num_replies=3, chunk_steps=chunk_steps) == play(calm, num_replies=3)


@WITH_A_SHORT_CACHE
@pytest.mark.parametrize("steps_at_once", [2, 8, 1_000])
def test_looking_less_often_at_what_was_sampled_changes_no_answer(
    steps_at_once: int, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    requests = [
        replace(request, temperature=0.7 if index % 3 else None)
        for index, request in enumerate(new_requests(12, stop_tokens=(5, 6, 7)))
    ]
    watched = new_engine(is_single_turn=False)
    hurried = new_engine(is_single_turn=False, steps_at_once=steps_at_once)
    watched.submit(requests)
    hurried.submit(requests)
    assert play(hurried, num_replies=3) == play(watched, num_replies=3)

    alone = new_engine(steps_at_once=steps_at_once)
    alone.submit(requests[:1])
    report = alone.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    (turn,) = report.finished
    assert turn.stop_reason == "stop"
    assert report.sampled_tokens == len(turn.tokens)
    assert len(turn.tokens) <= report.decode_steps < len(turn.tokens) + steps_at_once
    assert report.decode_steps <= requests[0].max_new_tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_sample_what_launched_ones_do(new_requests: NewRequests, drain: Drain) -> None:
    requests = new_requests(16)
    rollout = RolloutConfig(num_slots=16, max_new_tokens=40, max_prompt_tokens=24)
    answers = []
    for uses_graphs in (False, True):
        engine = SlotRolloutEngine(
            ModelConfig(), rollout, vocab_size=41, seed=0, device="cuda", uses_graphs=uses_graphs
        )
        engine.submit(requests)
        answers.append(drain(engine))
    assert answers[0] == answers[1]


def test_a_parked_trajectory_yields_its_slot_to_those_that_wait_for_one(
    new_engine: NewEngine, new_requests: NewRequests
) -> None:
    everything = tuple(range(8))
    requests = [replace(request, max_new_tokens=40) for request in new_requests(8, stop_tokens=everything)]
    engine = new_engine(num_slots=4, is_single_turn=False)
    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    parked = [turn.id for turn in report.finished if turn.stop_reason == "stop"]
    assert (report.num_active, report.num_waiting) == (0, 0)
    assert report.num_waiting_for_env == len(parked) > 4
    engine.reply([], parked[:2])
    assert engine.run_chunk(max_decode_steps=1, max_seconds=60.0).num_waiting_for_env == len(parked) - 2


@IN_ANY_CACHE
@pytest.mark.parametrize("num_slots", [1, 3, 4])
def test_turns_are_the_same_where_parked_trajectories_yield_their_slots(
    num_slots: int, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    """More trajectories than slots: each is evicted and seated again between its turns."""
    requests = new_requests(12, stop_tokens=(5, 6, 7))
    calm, crowded = (new_engine(num_slots=num_slots, is_single_turn=False) for _ in range(2))
    expected = []
    for first in range(0, len(requests), num_slots):  # as many at a time as there are slots: none is evicted
        calm.submit(requests[first : first + num_slots])
        expected += play(calm, num_replies=3)
    crowded.submit(requests)
    assert play(crowded, num_replies=3) == expected


@IN_ANY_CACHE
def test_parked_trajectories_survive_offload_and_migration(new_engine: NewEngine, new_requests: NewRequests) -> None:
    requests = new_requests(8, stop_tokens=(5, 6, 7))
    calm, first, second = (new_engine(is_single_turn=False) for _ in range(3))
    calm.submit(requests)
    first.submit(requests)
    early = first.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    over = [turn for turn in early.finished if turn.stop_reason == "length"]
    parked = [turn for turn in early.finished if turn.stop_reason == "stop"]
    assert len(parked) > 3
    first.offload()
    second.continue_from(first.take_partials([turn.id for turn in parked[::2]], with_kv=True))
    first.load()
    for engine, own in ((first, parked[1::2]), (second, parked[::2])):
        engine.reply([TurnReply(id=t.id, tokens=(len(t.tokens) % 7, 9, 5)) for t in own], [])
        over += play(engine, num_replies=3)
    assert sorted(over, key=lambda turn: turn.id) == play(calm, num_replies=3)


def test_a_reply_past_the_budget_ends_the_trajectory_at_its_length(
    new_engine: NewEngine, new_requests: NewRequests
) -> None:
    requests = new_requests(16, stop_tokens=tuple(range(8)))
    engine = new_engine(is_single_turn=False, num_slots=32)
    engine.submit(requests)
    stops = [
        turn
        for turn in engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0).finished
        if turn.stop_reason == "stop"
    ]
    budgets = {request.id: request.max_new_tokens for request in requests}
    assert any(len(turn.tokens) == budgets[turn.id] for turn in stops)
    engine.reply([TurnReply(id=turn.id, tokens=(1,) * 40) for turn in stops], [])
    report = engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0)
    assert report.sampled_tokens == 0
    assert len(report.finished) == len(stops)
    for turn in report.finished:
        assert turn.stop_reason == "length"
        assert len(turn.tokens) == budgets[turn.id]
        assert turn.num_turns == 1


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": (1,) * 25}, "25 tokens; accepted: 1 to max_prompt_tokens 24"),
        ({"prompt_tokens": ()}, "0 tokens"),
        ({"prompt_tokens": (1, 41)}, "token 41 is not in the vocabulary; accepted: 0 to 40"),
        ({"prompt_tokens": (-1,)}, "token -1"),
        ({"max_new_tokens": 41}, "41; accepted: 1 to the engine's 40"),
        ({"max_new_tokens": 0}, "0; accepted"),
        ({"stop_tokens": tuple(range(9))}, "9 of them"),
    ],
)
def test_requests_that_cannot_run_are_refused_by_name(
    change: dict[str, object], message: str, new_engine: NewEngine, new_requests: NewRequests
) -> None:
    engine = new_engine()
    good, bad = new_requests(1)
    with pytest.raises(UserError, match=message) as refusal:
        engine.submit([good, replace(bad, **change)])
    assert "prompt=0, sample=1" in str(refusal.value)
    assert engine.run_chunk(max_decode_steps=1, max_seconds=1.0).num_active == 0


def test_orders_that_the_state_does_not_allow_are_refused(new_engine: NewEngine, new_requests: NewRequests) -> None:
    engine = new_engine(is_single_turn=False)
    requests = new_requests(1, stop_tokens=())
    engine.submit(requests)
    here, elsewhere = requests[0].id, TrajectoryId(9, 9, 9)
    with pytest.raises(IllegalTransitionError, match="already here"):
        engine.submit(requests)
    with pytest.raises(IllegalTransitionError, match="not waiting for one"):
        engine.reply([TurnReply(id=here, tokens=())], [])
    with pytest.raises(IllegalTransitionError, match="middle of a turn"):
        engine.reply([], [here])
    with pytest.raises(IllegalTransitionError, match="not here"):
        engine.take_partials([elsewhere], with_kv=True)


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.0), ("num_slots", 0)])
def test_a_rollout_config_out_of_range_is_refused(field: str, value: float) -> None:
    rollout = replace(RolloutConfig(), **{field: value})
    with pytest.raises(UserError, match=field):
        SlotRolloutEngine(ModelConfig(), rollout, vocab_size=30, seed=0)


def test_a_cache_that_holds_no_longest_sequence_is_refused_with_the_least_size() -> None:
    sizes = {"num_slots": 8, "max_prompt_tokens": 24, "max_new_tokens": 40}
    with pytest.raises(UserError, match="kv_tokens: 79 tokens hold no sequence of full length; accepted: 80 or more"):
        RolloutConfig(**sizes, kv_tokens=79)
    assert RolloutConfig(**sizes, kv_tokens=80).cached_tokens == 80
    assert RolloutConfig(**sizes, kv_tokens=10_000).cached_tokens == RolloutConfig(**sizes).cached_tokens == 640


def test_each_request_has_its_own_temperature_beside_any_others(new_engine, new_requests, drain):
    requests = new_requests(6)
    hot = [replace(one, temperature=2.0 if one.id.prompt % 2 else None) for one in requests]
    mixed = new_engine()
    mixed.submit(hot)
    together = drain(mixed)
    for temperature, engine in ((2.0, new_engine(temperature=2.0)), (1.0, new_engine())):
        engine.submit([one for one in requests if one.id.prompt % 2 == (temperature == 2.0)])
        assert drain(engine) == [turn for turn in together if turn.id.prompt % 2 == (temperature == 2.0)]


def test_random_numbers_are_those_of_the_id_that_a_request_is_drawn_as(new_engine, new_requests, drain):
    (first, *_), engine = new_requests(1), new_engine()
    engine.submit([first, replace(first, id=TrajectoryId(9, 9, 9), drawn_as=first.id)])
    one, other = drain(engine)
    assert one.tokens == other.tokens


def test_a_stop_text_ends_a_turn_with_the_token_that_completes_it(checkpoint, new_requests, drain):
    class Letters:
        """A text of three letters."""

        def decode(self, tokens):
            return "".join("<" if token % 5 == 3 else ">" if token % 5 == 1 else "x" for token in tokens)

    rollout = RolloutConfig(num_slots=8, max_new_tokens=40, max_prompt_tokens=24)
    engine = SlotRolloutEngine(ModelConfig(path=str(checkpoint)), rollout, vocab_size=41, seed=0, vocabulary=Letters())
    plain = [replace(one, max_new_tokens=40, stop_tokens=()) for one in new_requests(6)]
    engine.submit(plain)
    free = drain(engine)
    engine.submit([replace(one, stop_texts=("<>", "never")) for one in plain])
    ended = drain(engine, chunk_steps=3)
    for whole, cut in zip(free, ended, strict=True):
        text = Letters().decode(whole.tokens)
        end = text.find("<>") + 2 if "<>" in text else len(text)
        assert cut.tokens == whole.tokens[:end]
        assert cut.stop_reason == ("stop" if end < len(text) or text.endswith("<>") else "length")
    assert any(turn.stop_reason == "stop" for turn in ended)
    with pytest.raises(UserError, match="accepted: texts that are not empty"):
        engine.submit([replace(plain[0], stop_texts=("",))])


@IN_EITHER_DTYPE
def test_a_prompts_scores_are_the_log_probs_that_sampling_it_would_report(dtype, new_engine, new_requests, drain):
    engine = new_engine()
    request = replace(new_requests(1)[0], max_new_tokens=20, stop_tokens=())
    engine.submit([request])
    (turn,) = drain(engine)
    prompt = (*request.prompt_tokens, *turn.tokens)[:24]
    num_sampled = len(prompt) - len(request.prompt_tokens)
    scores = engine.score(prompt, num_sampled)
    assert scores == pytest.approx(list(turn.logprobs[:num_sampled]), abs=2e-6 if dtype == "float32" else 0.2)
    assert len(engine.score(prompt, len(prompt) - 1)) == len(prompt) - 1

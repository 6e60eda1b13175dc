"""The probe finds what an engine really does: exact on this machine, and less where its bits are made to differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from rlmux.core.errors import PipelineError, WorkerLostError
from rlmux.engines.determinism_probe import probe_rollout, probe_training
from rlmux.engines.model.transformer import DecodePlan
from rlmux.engines.rollout.batch_probe import BatchProbe
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.train.state import trainer_state
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update.ranks import touching_others
from rlmux.engines.train.update.train_tensors import deterministic_backward
from rlmux.engines.train.update.training_forward import TokenScores, score_tokens
from rlmux.rl.config import TrainingConfig
from rlmux.rl.determinism_class import DeterminismClass, ProbeReport, determinism_class_of
from rlmux.rl.types import TrajectoryRequest

NewEngine = Callable[..., SlotRolloutEngine]


def failed(report: ProbeReport) -> list[str]:
    return [check.name for check in report.checks if not check.is_equal]


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch shapes are used unmeasured, as by an engine without this one's own caution."""
    monkeypatch.setattr(BatchProbe, "is_decode_exact", lambda self, width, window, capacity: True)
    monkeypatch.setattr("rlmux.engines.rollout.batch_probe.is_exact_by_shape", {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_slots", [1, 3, 16])
@pytest.mark.parametrize("is_single_turn", [True, False])
def test_the_engine_is_exact_on_this_machine(new_engine: NewEngine, num_slots: int, is_single_turn: bool) -> None:
    report = probe_rollout(new_engine(num_slots=num_slots, is_single_turn=is_single_turn))
    assert set(failed(report)) <= {"recomputation"}
    assert determinism_class_of(report.checks) is DeterminismClass.EXACT


def test_a_probe_leaves_the_engine_as_it_was(
    new_engine: NewEngine, new_requests: Callable[..., list[TrajectoryRequest]]
) -> None:
    requests = new_requests(4)

    def sampled(engine: SlotRolloutEngine) -> list[object]:
        engine.submit(requests)
        return sorted(engine.run_chunk(max_decode_steps=10_000, max_seconds=60.0).finished, key=lambda turn: turn.id)

    probed = new_engine()
    probe_rollout(probed)
    assert probed.is_unused
    assert sampled(probed) == sampled(new_engine())


def test_an_engine_whose_bits_depend_on_the_batch_is_replayable(
    monkeypatch: pytest.MonkeyPatch, trusting: None, new_engine: NewEngine
) -> None:
    step = DecodePlan.step

    def depends_on_width(plan: DecodePlan, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = step(plan, tokens, positions)
        return logits * (1.0 + 1e-5 * logits.shape[0])

    monkeypatch.setattr(DecodePlan, "step", depends_on_width)
    report = probe_rollout(new_engine())
    assert "batches" in failed(report)
    assert "repeat" not in failed(report)
    assert determinism_class_of(report.checks) is DeterminismClass.REPLAYABLE


def test_an_engine_whose_bits_depend_on_the_slot_is_replayable(
    monkeypatch: pytest.MonkeyPatch, trusting: None, new_engine: NewEngine
) -> None:
    step = DecodePlan.step

    def depends_on_slot(plan: DecodePlan, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = step(plan, tokens, positions)
        return logits * (1.0 + 1e-5 * torch.arange(logits.shape[0]).unsqueeze(1))

    monkeypatch.setattr(DecodePlan, "step", depends_on_slot)
    report = probe_rollout(new_engine())
    assert {"shuffled", "migration"} & set(failed(report))
    assert determinism_class_of(report.checks) is DeterminismClass.REPLAYABLE


def test_an_engine_that_never_computes_the_same_twice_is_statistical(
    monkeypatch: pytest.MonkeyPatch, trusting: None, new_engine: NewEngine
) -> None:
    step, calls = DecodePlan.step, itertools.count()

    def drifts(plan: DecodePlan, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return step(plan, tokens, positions) * (1.0 + 1e-5 * next(calls))

    monkeypatch.setattr(DecodePlan, "step", drifts)
    report = probe_rollout(new_engine())
    assert "repeat" in failed(report)
    assert determinism_class_of(report.checks) is DeterminismClass.STATISTICAL


class SeesMode(torch.autograd.Function):
    """Adds nothing; notes in backward whether torch refuses what is not deterministic."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        SeesMode.seen.append(not torch.is_deterministic_algorithms_warn_only_enabled())
        return grads[0]


def test_gradients_are_by_deterministic_kernels_where_torch_was_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = TorchTrainEngine(TrainingConfig(name="a"))

    def scored(*args: Any, **kwargs: Any) -> TokenScores:
        scores = score_tokens(*args, **kwargs)
        return replace(scores, logprobs=SeesMode.apply(scores.logprobs))

    monkeypatch.setattr(trainer_state, "score_tokens", scored)
    monkeypatch.setattr(SeesMode, "seen", [])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        probe_training(engine)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert SeesMode.seen == [True] * 3


def test_an_operation_without_a_deterministic_kernel_is_the_pipelines_own_failure() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(PipelineError, match="one_backward does"), touching_others(), deterministic_backward():
            raise RuntimeError("one_backward does not have a deterministic implementation, but you set ...")
        with pytest.raises(WorkerLostError), touching_others(), deterministic_backward():
            raise RuntimeError("Connection closed by peer")
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_are_compared_and_leave_the_weights_and_gradients_alone() -> None:
    engine = TorchTrainEngine(TrainingConfig(name="a"))
    before = engine.weights_sha256()
    report = probe_training(engine)
    assert failed(report) == []
    assert engine.weights_sha256() == before
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in engine.model.parameters())


def test_a_trainer_whose_gradients_vary_is_statistical(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def varies(*args: Any, **options: Any) -> TokenScores:
        scores = score_tokens(*args, **options)
        return replace(scores, logprobs=scores.logprobs * (1.0 + 1e-6 * next(calls)))

    monkeypatch.setattr(trainer_state, "score_tokens", varies)
    report = probe_training(TorchTrainEngine(TrainingConfig(name="a")))
    assert failed(report) == ["gradient"]
    assert determinism_class_of(report.checks) is DeterminismClass.STATISTICAL

"""A tiny checkpoint with lively weights, engines over it, and requests with long-tailed lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlmux.engines.model.model_io import build_model
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import ModelConfig, RolloutConfig
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest

VOCAB_SIZE = 41


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_lively(model: PreTrainedModel) -> PreTrainedModel:
    """Fresh weights give nearly even odds, whatever the context; these tell contexts apart."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model


@pytest.fixture(scope="session")
def lively_model() -> PreTrainedModel:
    return make_lively(build_model(ModelConfig(), VOCAB_SIZE, 0))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, lively_model: PreTrainedModel) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    lively_model.save_pretrained(folder)
    return folder


@pytest.fixture
def dtype() -> str:
    """What engines sample in; a test that is parametrized by it overrides this."""
    return "float32"


@pytest.fixture
def kv_tokens() -> int | None:
    """What engines' caches have room for; a test that is parametrized by it overrides this."""
    return None


@pytest.fixture
def new_engine(checkpoint: Path, dtype: str, kv_tokens: int | None) -> Callable[..., SlotRolloutEngine]:
    def build(
        *,
        num_slots: int = 16,
        temperature: float = 1.0,
        staleness: int = 0,
        is_single_turn: bool = True,
        max_new_tokens: int = 40,
        steps_at_once: int | None = None,
        order: str = "given",
    ) -> SlotRolloutEngine:
        rollout = RolloutConfig(
            num_slots=num_slots,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=24,
            order=order,
            dtype=dtype,
            kv_tokens=kv_tokens,
        )
        return SlotRolloutEngine(
            ModelConfig(path=str(checkpoint)),
            rollout,
            vocab_size=VOCAB_SIZE,
            seed=0,
            staleness=staleness,
            is_single_turn=is_single_turn,
            steps_at_once=steps_at_once,
        )

    return build


@pytest.fixture
def new_requests() -> Callable[..., list[TrajectoryRequest]]:
    def build(
        num_prompts: int,
        group_size: int = 2,
        *,
        stop_tokens: Sequence[int] = (5,),
        max_new_tokens: int = 40,
        step: int = 1,
    ) -> list[TrajectoryRequest]:
        rng = random.Random(num_prompts)
        requests = []
        for prompt in range(num_prompts):
            tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24)))
            for sample in range(group_size):
                requests.append(
                    TrajectoryRequest(
                        id=TrajectoryId(step, prompt, sample),
                        prompt_tokens=tokens,
                        max_new_tokens=min(max_new_tokens, int(rng.lognormvariate(2.5, 0.8)) + 1),
                        stop_tokens=tuple(stop_tokens),
                        seed=11,
                    )
                )
        return requests

    return build


@pytest.fixture
def drain() -> Callable[..., list[FinishedTurn]]:
    """Run an engine until nothing can decode; the finished turns in id order."""

    def run(engine: SlotRolloutEngine, *, chunk_steps: int = 10_000) -> list[FinishedTurn]:
        finished: list[FinishedTurn] = []
        while True:
            report = engine.run_chunk(max_decode_steps=chunk_steps, max_seconds=60.0)
            finished += report.finished
            if not report.num_active and not report.num_waiting:
                return sorted(finished, key=lambda turn: turn.id)

    return run

"""A program's session on our own engine: every log-prob is the model's, and a worker that takes over makes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.conftest import make_lively
from transformers import PreTrainedModel

from rlmux.engines.model.model_io import build_model
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.agents.chat_tokens import ChatTokens
from rlmux.rl.agents.outcomes import ENDED, Outcome
from rlmux.rl.agents.session import Ask, Session
from rlmux.rl.config import ModelConfig, RolloutConfig
from rlmux.rl.types import FinishedTurn, Trajectory, TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import CharVocabulary

VOCABULARY = CharVocabulary()
IN_EITHER_DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
LOGPROB_ERROR = {"float32": 1e-4, "bfloat16": 0.2}
"""Nats by which log-probs may differ from a float32 forward."""
Drain = Callable[..., list[FinishedTurn]]
NewTable = Callable[[], "Table"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_lively(build_model(ModelConfig(), VOCABULARY.vocab_size, 0))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


class Table:
    """Sessions of one engine."""

    def __init__(self, new_engine: Callable[[], SlotRolloutEngine], drain: Drain, num_sessions: int) -> None:
        self.new_engine, self.drain = new_engine, drain
        self.requests = [
            TrajectoryRequest(
                id=TrajectoryId(1, 0, sample),
                prompt_tokens=(),
                max_new_tokens=200,
                stop_tokens=VOCABULARY.stop_tokens,
                seed=7,
                is_session=True,
            )
            for sample in range(num_sessions)
        ]
        chats = ChatTokens(VOCABULARY)
        self.sessions = [
            Session(request, VOCABULARY, chats, max_prompt_tokens=32, max_turns=64) for request in self.requests
        ]
        self.take_new_worker()

    def take_new_worker(self) -> None:
        self.engine = self.new_engine()
        self.engine.submit(self.requests)
        for session in self.sessions:
            session.take_turn(FinishedTurn.opening(session.request.id))

    def ask(self, chats: Sequence[list[dict[str, Any]]], **options: Any) -> None:
        """One question in each session."""
        asks = [Ask(messages=list(chat), **options) for chat in chats]
        for session, ask in zip(self.sessions, asks, strict=True):
            session.ask(ask)
        self.engine.reply([session.next_reply() for session in self.sessions], [])
        by_id = {session.request.id: session for session in self.sessions}
        for turn in self.drain(self.engine):
            by_id[turn.id].take_turn(turn)
        for chat, ask in zip(chats, asks, strict=True):
            chat.append(dict(ask.answer.result(timeout=0).message))

    def sequences(self) -> list[Trajectory]:
        return [
            each
            for session in self.sessions
            for each in session.trajectory(1.0, Outcome(kind=ENDED, text=ENDED)).sequences
        ]


@pytest.fixture
def new_table(dtype: str, model_folder: Path, drain: Drain) -> NewTable:
    def new_engine() -> SlotRolloutEngine:
        rollout = RolloutConfig(num_slots=4, max_new_tokens=200, max_prompt_tokens=32, dtype=dtype)
        return SlotRolloutEngine(
            ModelConfig(path=str(model_folder)),
            rollout,
            vocab_size=VOCABULARY.vocab_size,
            seed=0,
            is_single_turn=False,
        )

    return lambda: Table(new_engine, drain, 3)


def converse(table: Table, *, lost_at: int | None = None) -> list[Trajectory]:
    """A main chat, a subagent's, a long reply, a stop in the middle, and a question again."""
    mains = [[{"role": "user", "content": f"main {number}?"}] for number in range(3)]
    helpers = [[{"role": "user", "content": f"help {number}?"}] for number in range(3)]
    retried: list[list[dict[str, Any]]] = []
    plan: list[tuple[list[list[dict[str, Any]]], dict[str, Any]]] = [
        (mains, {}),
        (mains, {"max_tokens": 9}),
        (helpers, {}),
        (mains, {"max_tokens": 9}),
        (mains, {"max_tokens": 9}),
        (retried, {"max_tokens": 9}),
        (retried, {"max_tokens": 9}),
    ]
    for number, (chats, options) in enumerate(plan):
        if lost_at == number:
            table.take_new_worker()
        if number == 4:
            retried += [list(chat) for chat in chats]
        for chat in chats:
            if chat[-1]["role"] == "assistant":
                chat.append({"role": "user", "content": "x" * 60 if number == 3 else "and?"})
        table.ask(chats, **({"max_tokens": 20} | options))
    return table.sequences()


@IN_EITHER_DTYPE
@torch.inference_mode()
def test_every_log_prob_of_a_session_is_the_models(dtype: str, new_table: NewTable, model: PreTrainedModel) -> None:
    sequences = converse(new_table())
    assert len(sequences) == 3 * 3, "main, helper, and the question again"
    for each in sequences:
        prompt = each.prompt_tokens
        logits = model(torch.tensor([[*prompt, *each.tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        reference = logprobs.gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
        is_sampled = torch.tensor(each.is_sampled)
        assert is_sampled.any()
        made = torch.tensor(each.logprobs, dtype=torch.float64)
        assert (reference - made)[is_sampled].abs().max() < LOGPROB_ERROR[dtype]
        assert not made[~is_sampled].any()


@IN_EITHER_DTYPE
def test_a_worker_that_takes_over_makes_the_same_bits(new_table: NewTable) -> None:
    expected = converse(new_table())
    for lost_at in range(1, 7):
        assert converse(new_table(), lost_at=lost_at) == expected, f"lost before question {lost_at}"

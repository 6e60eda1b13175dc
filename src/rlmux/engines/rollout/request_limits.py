"""Checks that requests fit a rollout engine's slots and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.engines.rollout.slots import MAX_STOP_TOKENS
from rlmux.rl.config import RolloutConfig
from rlmux.rl.types import PartialTrajectory, TrajectoryRequest, TurnReply


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Sizes of an engine."""

    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    can_decode: bool = False
    """Whether responses can be decoded, as stop texts require."""

    @classmethod
    def of(cls, rollout: RolloutConfig, vocab_size: int, *, can_decode: bool) -> RequestLimits:
        """The limits of an engine that is built from a config."""
        return cls(
            vocab_size=vocab_size,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
            can_decode=can_decode,
        )

    def check_request(self, request: TrajectoryRequest) -> None:
        """Raises UserError with the value and what would be accepted."""
        if request.prompt_tokens or not request.is_session:
            self.check_prompt(request.prompt_tokens, f"prompt of {request.id}")
        if not 1 <= request.max_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"max_new_tokens of {request.id}: {request.max_new_tokens}; accepted: 1 to "
                f"the engine's {self.max_new_tokens}"
            )
        if len(request.stop_tokens) > MAX_STOP_TOKENS:
            raise UserError(
                f"stop_tokens of {request.id}: {len(request.stop_tokens)} of them; accepted: up to {MAX_STOP_TOKENS}"
            )
        if request.temperature is not None and not request.temperature > 0:
            raise UserError(f"temperature of {request.id}: {request.temperature}; accepted: more than 0")
        if request.stop_texts and not (self.can_decode and all(request.stop_texts)):
            raise UserError(f"stop_texts of {request.id}: {request.stop_texts}; accepted: texts that are not empty")

    def check_prompt(self, tokens: Sequence[int], where: str) -> None:
        """Raises UserError for a prompt that is too long, empty, or not of the vocabulary."""
        if not 1 <= len(tokens) <= self.max_prompt_tokens:
            raise UserError(f"{where}: {len(tokens)} tokens; accepted: 1 to max_prompt_tokens {self.max_prompt_tokens}")
        self.check_tokens(tokens, where)

    def check_partial(self, partial: PartialTrajectory) -> None:
        """`check_request`, and IllegalTransitionError for a KV that is not of the tokens it comes with."""
        self.check_request(partial.request)
        context = len(partial.request.prompt_tokens) + len(partial.tokens) - 1
        if partial.kv is not None and partial.kv.shape[3] != context:
            raise IllegalTransitionError(
                f"{partial.request.id} brings KV of {partial.kv.shape[3]} tokens for its {context}"
            )

    def check_reply(self, answer: TurnReply) -> None:
        """Raises UserError for a reply with a token that is not in the vocabulary, or a context that does not fit."""
        self.check_tokens(answer.tokens, f"reply to {answer.id}")
        if answer.context is not None:
            self.check_partial(answer.context)
            self.check_tokens(answer.context.tokens, f"reply to {answer.id}")

    def check_tokens(self, tokens: Sequence[int], where: str) -> None:
        """Raises UserError for a token that is not in the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"{where}: token {token} is not in the vocabulary; accepted: 0 to {self.vocab_size - 1}"
                )

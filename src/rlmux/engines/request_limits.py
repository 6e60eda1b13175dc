"""What a rollout engine accepts: requests that fit its slots and its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.engines.slots import MAX_STOP_TOKENS
from rlmux.rl.types import PartialTrajectory, TrajectoryRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The sizes that an engine was built for."""

    vocab_size: int
    max_prompt_tokens: int
    max_new_tokens: int

    def check_request(self, request: TrajectoryRequest) -> None:
        """Raises UserError with the value and what would be accepted."""
        if not 1 <= len(request.prompt_tokens) <= self.max_prompt_tokens:
            raise UserError(
                f"prompt of {request.id}: {len(request.prompt_tokens)} tokens; accepted: 1 to "
                f"max_prompt_tokens {self.max_prompt_tokens}"
            )
        if not 1 <= request.max_new_tokens <= self.max_new_tokens:
            raise UserError(
                f"max_new_tokens of {request.id}: {request.max_new_tokens}; accepted: 1 to "
                f"the engine's {self.max_new_tokens}"
            )
        if len(request.stop_tokens) > MAX_STOP_TOKENS:
            raise UserError(
                f"stop_tokens of {request.id}: {len(request.stop_tokens)} of them; accepted: up to {MAX_STOP_TOKENS}"
            )
        self.check_tokens(request.prompt_tokens, f"prompt of {request.id}")

    def check_partial(self, partial: PartialTrajectory) -> None:
        """`check_request`, and IllegalTransitionError for a KV that is not of the tokens it comes with."""
        self.check_request(partial.request)
        context = len(partial.request.prompt_tokens) + len(partial.tokens) - 1
        if partial.kv is not None and partial.kv.shape[3] != context:
            raise IllegalTransitionError(
                f"{partial.request.id} brings KV of {partial.kv.shape[3]} tokens for its {context}"
            )

    def check_tokens(self, tokens: Sequence[int], where: str) -> None:
        """Raises UserError for a token that is not in the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"{where}: token {token} is not in the vocabulary; accepted: 0 to {self.vocab_size - 1}"
                )

"""A rollout engine's record of an unfinished trajectory, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlmux.rl.types import FinishedTurn, PartialTrajectory, TrajectoryRequest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class RecordedTrajectory:
    """An unfinished response; engines' subclasses add its position."""

    request: TrajectoryRequest
    tokens: list[int] = field(default_factory=list)
    """Response tokens, sampled and forced."""
    logprobs: list[float] = field(default_factory=list)
    """One for each of `tokens`; 0.0 for a forced token."""
    is_sampled: list[bool] = field(default_factory=list)
    """False for each of `tokens` that the environment wrote."""
    versions: list[int] = field(default_factory=list)
    """Weight version that made each of `tokens`."""
    num_turns: int = 0
    is_waiting_for_env: bool = False
    turn_end: int | None = None
    """Response tokens with which the present turn ends at the latest; None: the budget."""

    @property
    def most_tokens(self) -> int:
        """Response tokens with which the present turn ends at the latest."""
        budget = self.request.max_new_tokens
        return budget if self.turn_end is None else min(budget, self.turn_end)

    @property
    def end_reason(self) -> str:
        """The stop reason of a turn that has as many tokens as it may have."""
        return "length" if len(self.tokens) >= self.request.max_new_tokens else "limit"

    @property
    def has_begun(self) -> bool:
        """Whether it has any tokens, by the present weights or earlier ones."""
        return bool(self.tokens)

    def mark_new(self, version: int) -> None:
        """Tokens of a context that have no version yet get this one."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))

    def finished_turn(self, stop_reason: str) -> FinishedTurn:
        """Everything recorded, as the env worker reads it."""
        return FinishedTurn(
            id=self.request.id,
            tokens=tuple(self.tokens),
            is_sampled=tuple(self.is_sampled),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
            num_turns=self.num_turns,
        )

    def partial(self, *, pending_tokens: Sequence[int], kv: Tensor | None) -> PartialTrajectory:
        """Everything that another engine needs to continue it.

        `pending_tokens`: forced tokens that were accepted and are not among `tokens` yet. `kv`: of all before.
        """
        return PartialTrajectory(
            request=self.request,
            tokens=tuple(self.tokens),
            is_sampled=tuple(self.is_sampled),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            pending_tokens=tuple(pending_tokens),
            num_turns=self.num_turns,
            is_waiting_for_reply=self.is_waiting_for_env,
            kv=kv,
            turn_end=self.turn_end,
        )

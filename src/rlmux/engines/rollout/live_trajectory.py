"""An unfinished trajectory inside a rollout engine.

    waiting ──▶ seated ──▶ (waiting for env ──▶ seated)* ──▶ its last turn
       ▲          │
       └──────────┘  evicted: by an offload, or to be migrated

While a trajectory is seated, the slot's tensors hold its newest tokens, log-probs and KV, and this record is behind.
`record_tokens` brings it up to date: when a turn ends, when weights change, and when the slot is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlmux.engines.rollout.recorded_trajectory import RecordedTrajectory
from rlmux.rl.types import PartialTrajectory


@dataclass(slots=True, kw_only=True)
class LiveTrajectory(RecordedTrajectory):
    """An engine's state of a trajectory beside the slot's tensors; the record is as of the last `record_tokens`."""

    pending: list[int] = field(default_factory=list)
    """Forced tokens that were accepted but not fed yet; empty while seated."""
    num_forced: int = 0
    """Response tokens beyond `is_sampled` that come from the environment; they come before sampled ones."""
    slot: int | None = None
    """Index of its slot, or None; written by `SlotTable` alone."""
    position: int = field(init=False)
    """Position in prompt + response of the token fed next."""
    kv: Tensor | None = None
    """KV [layers, 2, kv_heads, position, head_dim] of everything before `position`; None while seated or unknown."""
    is_prefilled_here: bool = False
    """Whether this engine computed `kv` from the tokens alone, so that it can be recomputed to the same bits."""
    response_start: int = field(init=False)
    """Position of the first response token."""
    last_position: int = field(init=False)
    """Position of the last token that the present turn may have."""

    def __post_init__(self) -> None:
        self.response_start = len(self.request.prompt_tokens)
        self.last_position = self.response_start + self.most_tokens - 1
        self.position = self.response_start + len(self.tokens) - 1

    @classmethod
    def from_partial(cls, partial: PartialTrajectory) -> LiveTrajectory:
        """A trajectory that comes from another engine."""
        return cls(
            request=partial.request,
            tokens=list(partial.tokens),
            logprobs=list(partial.logprobs),
            is_sampled=list(partial.is_sampled),
            versions=list(partial.versions),
            pending=list(partial.pending_tokens),
            num_forced=len(partial.pending_tokens),
            num_turns=partial.num_turns,
            is_waiting_for_env=partial.is_waiting_for_reply,
            kv=partial.kv,
            turn_end=partial.turn_end,
        )

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens before `position`; only while not seated."""
        return (*self.request.prompt_tokens, *self.tokens)[:-1]

    @property
    def needs_prefill(self) -> bool:
        """Whether its KV must be computed before it is seated; a context of length 0 has none."""
        return self.kv is None and self.position > 0

    @property
    def has_begun(self) -> bool:
        """Whether it has a slot or any tokens."""
        return self.slot is not None or bool(self.tokens)

    @property
    def tokens_left(self) -> int:
        """Response tokens that the present turn may still have."""
        return self.last_position - self.position

    @property
    def num_made(self) -> int:
        """Response tokens so far, those that lie in the slot included."""
        return self.position - self.response_start + 1

    @property
    def num_unrecorded(self) -> int:
        """Response tokens up to `position` that `record_tokens` has not seen."""
        return self.position - self.response_start + 1 - len(self.is_sampled)

    def num_forced_within(self, steps: int) -> int:
        """How many of the next `steps` tokens the environment wrote."""
        return max(0, min(steps, self.num_forced - self.num_unrecorded))

    def record_tokens(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Replace the response by `tokens` and `logprobs`, read from the slot; `version` made those that are new."""
        num_new = self.num_unrecorded
        num_forced = min(self.num_forced, num_new)
        self.tokens, self.logprobs = tokens, logprobs
        self.is_sampled += [False] * num_forced + [True] * (num_new - num_forced)
        self.versions += [version] * num_new
        self.num_forced -= num_forced

    def accept_reply(self, tokens: Sequence[int], turn_end: int | None = None) -> list[int]:
        """Continue with as many of the environment's `tokens` as the next turn may have; returns those."""
        self.turn_end = turn_end
        self.last_position = self.response_start + self.most_tokens - 1
        forced = list(tokens[: self.tokens_left])
        self.is_waiting_for_env = False
        self.num_forced = len(forced)
        return forced

    def drop_prefilled_kv(self) -> None:
        """Drop `kv` if this engine can recompute it."""
        if self.is_prefilled_here:
            self.kv, self.is_prefilled_here = None, False

    def to_partial(self) -> PartialTrajectory:
        """Everything that another engine needs to continue it; only while not seated."""
        return self.partial(pending_tokens=self.pending, kv=self.kv)

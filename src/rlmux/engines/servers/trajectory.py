"""An unfinished trajectory whose tokens a server makes.

waiting ──▶ under way (one request) ──▶ (waiting for env ──▶ waiting)* ──▶ its last turn
   ▲              │
   └──────────────┘  aborted or lost: prompt and tokens so far are the next request's

A module of its own: it is tested without a server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.engines.rollout.recorded_trajectory import RecordedTrajectory
from rlmux.engines.servers.settings import NOISE_BITS
from rlmux.rl.types import PartialTrajectory


@dataclass(slots=True, kw_only=True)
class ServedTrajectory(RecordedTrajectory):
    """A trajectory's state at the server, beside its record."""

    num_lost: int = 0
    """Requests for it that the server lost since its last token."""
    request_id: str | None = None
    """The active request; None without one."""

    @classmethod
    def from_partial(cls, partial: PartialTrajectory) -> ServedTrajectory:
        """A trajectory that comes from another engine; its KV is computed anew."""
        num_forced = len(partial.pending_tokens)
        version = partial.versions[-1] if partial.versions else 0
        return cls(
            request=partial.request,
            tokens=[*partial.tokens, *partial.pending_tokens],
            is_sampled=[*partial.is_sampled, *[False] * num_forced],
            logprobs=[*partial.logprobs, *[0.0] * num_forced],
            versions=[*partial.versions, *[version] * num_forced],
            num_turns=partial.num_turns,
            is_waiting_for_env=partial.is_waiting_for_reply,
            turn_end=partial.turn_end,
        )

    @property
    def tokens_left(self) -> int:
        """Response tokens that the present turn may still have."""
        return self.most_tokens - len(self.tokens)

    @property
    def context(self) -> Sequence[int]:
        """Prompt and everything so far."""
        return [*self.request.prompt_tokens, *self.tokens]

    def noise_seed(self, *, is_positional: bool) -> int:
        """Seed of its next request's noise: a function of (seed, step, prompt, sample).

        An engine whose noise is a function of seed and position continues it as if never interrupted. For others the
        position is in the seed, or each request of a trajectory would begin with the same noise.
        """
        words = [self.request.seed, *self.request.id, *([] if is_positional else [len(self.tokens)])]
        digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - NOISE_BITS)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: int, *, is_sampled: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.is_sampled += [is_sampled] * len(tokens)
        self.versions += [version] * len(tokens)

    def to_partial(self) -> PartialTrajectory:
        """Everything that another engine needs to continue it. The last reply has no sampled token after it yet."""
        return self.partial(pending_tokens=(), kv=None)

"""The formulas: seconds of one engine iteration and of one training stage as functions of the work in it.

One decode iteration with `A` active sequences of mean context `c` tokens takes, in milliseconds,

    t = fixed + experts * (1 - idle ** A) + low * min(A, 32) + slope * A + kv * A * c

`fixed` reads the weights and launches the kernels, `kv` reads the cache, the rest is arithmetic, collectives
and sampling. Of a mixture's experts an iteration reads those that some sequence picks: each sequence leaves out the
part `idle`, and they pick independently (a bound from above: real routers prefer some experts). An engine captures
graphs up to a batch size; above it kernels are launched one by one and `eager_floor_ms` is a lower bound. Between
iterations the host spends time of its own (`HostCosts`) that an engine's forward times do not show.

Invariant: every cost is finite, at least zero, and does not fall when sequences, tokens or context grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOW_ACTIVE = 32
"""Where the decode curve bends: the first sequences cost more each than later ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCurve:
    """One decode iteration."""

    fixed_ms: float
    low_active_ms: float
    """Milliseconds per active sequence, for the first 32 only."""
    active_ms: float
    """Milliseconds per active sequence."""
    kv_us: float
    """Microseconds per cached token read (active times context)."""
    eager_above: int = 512
    """The largest captured batch."""
    eager_floor_ms: float = 0.0
    experts_ms: float = 0.0
    """Milliseconds to read all experts of a mixture; 0 for a dense model."""
    idle_share: float = 0.0
    """Part of the experts that one sequence leaves out."""

    def step_s(self, active: float, context: float) -> float:
        """Seconds of one iteration with `active` sequences of `context` tokens on average."""
        return self.span_s(active, context, 1)

    def span_s(self, active: float, context: float, num_iterations: float) -> float:
        """Seconds of consecutive iterations of the same sequences, which grow by a token each time."""
        if active <= 0 or num_iterations <= 0:
            return 0.0
        middle = context + (num_iterations - 1) / 2
        ms = self.fixed_ms + self.low_active_ms * min(active, LOW_ACTIVE) + self.active_ms * active
        ms += self.kv_us * 1e-3 * active * middle
        if self.experts_ms:
            ms += self.experts_ms * (1 - self.idle_share**active)
        if active > self.eager_above:
            ms = max(ms, self.eager_floor_ms)
        return num_iterations * ms * 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCurve:
    """Prefill iterations."""

    fixed_ms: float
    """Milliseconds of each iteration: kernels are launched one by one, whatever the number of tokens."""
    ktoken_ms: float
    """Milliseconds per 1000 tokens."""
    chunk_tokens: int = 8192
    """The most tokens one iteration takes."""

    def num_iterations(self, tokens: float) -> int:
        return math.ceil(tokens / self.chunk_tokens) if tokens > 0 else 0

    def seconds(self, tokens: float) -> float:
        """Seconds to prefill `tokens`, in as many iterations as it takes."""
        return 1e-3 * (self.num_iterations(tokens) * self.fixed_ms + self.ktoken_ms * tokens * 1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Time of an engine outside the forward pass: scheduling, detokenising, streaming answers back."""

    iteration_ms: float
    prefill_ms: float
    """Extra milliseconds of an iteration that admits sequences."""
    token_us: float
    """Microseconds per generated token."""
    rollout_s: float
    """Seconds per rollout: the engine is woken, prompts are handed out, answers are collected."""
    first_rollout_s: float = 0.0
    """Extra seconds of a run's first rollout: compilation and first touches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One training stage: seconds fixed + seconds per million tokens."""

    fixed_s: float
    mtoken_s: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.mtoken_s * tokens * 1e-6

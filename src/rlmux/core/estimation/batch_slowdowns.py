"""How much slower a pipeline computes in one batch with others of its base, learned from its orders.

    an order's end ── (pipelines in the batch, tokens, seconds) ──▶ BatchSlowdowns ── slowdown(base, k) ──▶ policies

    sample = tokens/s of the pipeline alone / its tokens/s in batches of k pipelines
    slowdown(k) = mean of the last samples and of `expected_slowdown(k)`, which counts as `_PRIOR_SAMPLES` of them

A pipeline that was never seen alone gives no sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlmux.core.events import BatchShare

_EXPECTED_PER_PIPELINE = 0.5
"""What each further pipeline adds to the slowdown: 0.53 for the second, 0.54 each for the second to fourth, measured on
one core with a base of 5M parameters at 16 slots each; 0.24 and 0.23 with 60M."""
_PRIOR_SAMPLES = 2.0
_MOST_SAMPLES = 16.0
"""Samples after which older ones lose their weight."""


def expected_slowdown(num_together: int) -> float:
    """Slowdown of each pipeline in a batch of so many, before any was seen."""
    return 1.0 + _EXPECTED_PER_PIPELINE * (num_together - 1)


@dataclass(slots=True)
class _Mean:
    value: float
    weight: float = _PRIOR_SAMPLES

    def add(self, sample: float) -> None:
        self.weight = min(self.weight + 1.0, _MOST_SAMPLES)
        self.value += (sample - self.value) / self.weight


@dataclass(slots=True)
class BatchSlowdowns:
    """Slowdowns by base and number of pipelines in a batch. See the module docstring."""

    _alone: dict[tuple[str, str], float] = field(default_factory=dict)
    """Tokens per second of a pipeline alone, in its last order that had some time alone, by base and pipeline."""
    _means: dict[tuple[str, int], _Mean] = field(default_factory=dict)

    def slowdown(self, base: str, num_together: int) -> float:
        """Seconds of a pipeline in a batch of so many of the base, over its seconds alone; at least 1."""
        mean = self._means.get((base, num_together))
        return max(1.0, expected_slowdown(num_together) if mean is None else mean.value)

    def observe(self, base: str, pipeline: str, tokens: int, seconds: float, batches: Iterable[BatchShare]) -> None:
        """Learn from an order that has ended with so many tokens and seconds, of which `batches` were with others."""
        batches = tuple(batches)
        alone_tokens = tokens - sum(one.tokens for one in batches)
        alone_s = seconds - sum(one.seconds for one in batches)
        if alone_tokens > 0 and alone_s > 0.0:
            self._alone[base, pipeline] = alone_tokens / alone_s
        alone = self._alone.get((base, pipeline))
        for one in batches:
            if alone is not None and one.tokens > 0 and one.seconds > 0.0:
                key = base, one.num_together
                mean = self._means.setdefault(key, _Mean(expected_slowdown(one.num_together)))
                mean.add(alone * one.seconds / one.tokens)

"""How much slower a pipeline computes in one batch with others of its base, learned from its orders.

    an order's end ── BatchShare: pipelines together, tokens, seconds ──▶ BatchSlowdowns ── slowdown ──▶ policies

    sample = tokens/s of the pipeline alone / its tokens/s in batches of k pipelines
    slowdown of k = mean of the last samples and of `expected_slowdown`, which has the weight of `_PRIOR_SAMPLES`

A pipeline that was never seen alone gives no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.events import BatchShare
from rlmux.core.model import Phase, Pipeline, PipelineId

_EXPECTED_PER_PIPELINE = {Phase.ROLLOUT: 0.5, Phase.TRAIN: 0.85}
"""What each further pipeline adds to the slowdown. Rollouts: 0.53 for the second, 0.54 each for the second to fourth on
one core with a base of 5M parameters at 16 slots each; 0.24 and 0.23 with 60M. Training: 0.7 to 1.1 on one core, by
micro-batch; little enough to be tried."""
_PRIOR_SAMPLES = 2.0
_MOST_SAMPLES = 16.0
"""Samples after which older ones lose their weight."""


def expected_slowdown(phase: Phase, num_together: int) -> float:
    """Slowdown of each pipeline in a batch of so many, before any was seen."""
    return 1.0 + _EXPECTED_PER_PIPELINE[phase] * (num_together - 1)


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

    _alone: dict[tuple[Phase, PipelineId], float] = field(default_factory=dict)
    """Tokens per second of a pipeline alone, in its last order that had some time alone."""
    _means: dict[tuple[Phase, str, int], _Mean] = field(default_factory=dict)

    def slowdown(self, phase: Phase, base: str, num_together: int) -> float:
        """Seconds of a pipeline in a batch of so many of the base, over its seconds alone; at least 1."""
        mean = self._means.get((phase, base, num_together))
        return max(1.0, expected_slowdown(phase, num_together) if mean is None else mean.value)

    def observe(
        self, pipeline: Pipeline, phase: Phase, *, tokens: int, seconds: float, batches: Sequence[BatchShare]
    ) -> None:
        """Learn from an order that has ended with so many tokens and seconds, of which `batches` were with others."""
        alone_tokens = tokens - sum(one.tokens for one in batches)
        alone_s = seconds - sum(one.seconds for one in batches)
        if alone_tokens > 0 and alone_s > 0.0:
            self._alone[phase, pipeline.id] = alone_tokens / alone_s
        alone = self._alone.get((phase, pipeline.id))
        for one in batches:
            if alone is not None and one.tokens > 0 and one.seconds > 0.0:
                key = phase, pipeline.base_of(phase), one.num_together
                mean = self._means.setdefault(key, _Mean(expected_slowdown(phase, one.num_together)))
                mean.add(alone * one.seconds / one.tokens)

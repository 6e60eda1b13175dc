"""How much slower a pipeline computes in one batch with others of its base, learned from its orders.

    an order's end ── BatchShare: pipelines together, tokens, seconds ──▶ BatchSlowdowns ── slowdown ──▶ policies

    sample = seconds in batches of k pipelines / seconds that the same tokens take alone, at most k: more is what a
             batch takes once, as when its rows are probed
    slowdown of k = mean of the last samples and of `expected_slowdown`, which has the weight of `_PRIOR_SAMPLES`

Alone is the pipeline's last order without batches. The part of an order after its batches is slower, as it is a tail:
its tokens a second are taken only until an order was alone. A pipeline that was never seen alone gives no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmux.core.events import BatchShare
from rlmux.core.model import Phase, Pipeline, PipelineId

_FIXED_ROWS = 16
"""Rows whose computation takes as long as what a decode step does for any number of rows. By `benchmarks/tenants.py` on
one core, two pipelines in a batch are 1.67 times as slow as alone with 8 slots each and 1.42 with 16, at a base of 5M
parameters; 1.22 with 8 at 60M."""
_EXPECTED_IN_TRAINING = 0.85
"""What each further pipeline adds to the slowdown of training: 0.8 to 1.1 by the same benchmark; little enough to be
tried."""
_PRIOR_SAMPLES = 2.0
_MOST_SAMPLES = 16.0
"""Samples after which older ones lose their weight."""


def expected_slowdown(pipeline: Pipeline, phase: Phase, num_together: int) -> float:
    """Slowdown of the pipeline in a batch of so many alike, before any was seen."""
    if phase is Phase.TRAIN:
        return 1.0 + _EXPECTED_IN_TRAINING * (num_together - 1)
    num_slots = 2 * (pipeline.dense_threshold or _FIXED_ROWS // 2)
    return (_FIXED_ROWS + num_together * num_slots) / (_FIXED_ROWS + num_slots)


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
    """Tokens per second of a pipeline's last order without batches."""
    _partly_alone: dict[tuple[Phase, PipelineId], float] = field(default_factory=dict)
    """Tokens per second outside the batches of its last order with some."""
    _means: dict[tuple[Phase, str, int], _Mean] = field(default_factory=dict)

    def slowdown(self, pipeline: Pipeline, phase: Phase, num_together: int) -> float:
        """Seconds of the pipeline in a batch of so many of its base, over its seconds alone; at least 1."""
        mean = self._means.get((phase, pipeline.base_of(phase), num_together))
        return max(1.0, expected_slowdown(pipeline, phase, num_together) if mean is None else mean.value)

    def observe(
        self, pipeline: Pipeline, phase: Phase, *, tokens: int, seconds: float, batches: Sequence[BatchShare]
    ) -> None:
        """Learn from an order that has ended with so many tokens and seconds, of which `batches` were with others."""
        key = phase, pipeline.id
        batch_s = sum(batch.seconds for batch in batches)
        alone_s, alone_tokens = seconds - batch_s, tokens - sum(batch.tokens for batch in batches)
        if alone_s > 0.0 and alone_tokens > 0:
            (self._partly_alone if batches else self._alone)[key] = alone_tokens / alone_s
        rate = self._alone.get(key) or self._partly_alone.get(key)
        solo_s = 0.0 if rate is None else tokens / rate - alone_s
        for batch in batches:
            if solo_s > 0.0 and batch.tokens > 0:
                expected = expected_slowdown(pipeline, phase, batch.num_together)
                mean = self._means.setdefault((phase, pipeline.base_of(phase), batch.num_together), _Mean(expected))
                mean.add(min(batch_s / solo_s, batch.num_together))

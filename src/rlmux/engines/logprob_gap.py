"""Compares the policies of rollout and training: the largest difference between their log-probabilities.

fresh tokens: made by the version being trained      compared
stale tokens: made by an older version               another policy, not compared
"""

from __future__ import annotations

import math

from torch import Tensor

from rlmux.core.errors import PipelineError
from rlmux.engines.train.update.micro_batches import MicroBatch


class LogprobGap:
    """The largest difference over the micro-batches of one step."""

    def __init__(self, accepted: float = math.inf) -> None:
        """`accepted`: largest accepted gap in nats."""
        self._accepted = accepted
        self.largest = math.nan
        """Difference in nats; NaN while no fresh token was compared."""

    def compare(self, logprobs: Tensor, batch: MicroBatch, place: str) -> None:
        """Compare training's log-probabilities [R] of a micro-batch's tokens with those of the rollout.

        Raises PipelineError, beginning with `place`, for a log-probability that is not a number, and for a larger gap
        than accepted.
        """
        gaps = (logprobs.detach() - batch.sampled_logprobs).abs()[~batch.is_stale]
        if not len(gaps):
            return
        gap = float(gaps.max())
        if math.isnan(gap):
            raise PipelineError(
                f"{place}: a log-probability of rollout or training is not a number; the weights are left as they were"
            )
        if gap > self._accepted:
            raise PipelineError(
                f"{place}: logprob_gap is {gap:.3g}, accepted: up to {self._accepted:.3g} (algorithm.max_logprob_gap): "
                "training does not compute what rollout sampled from; the weights are left as they were"
            )
        self.largest = gap if math.isnan(self.largest) else max(self.largest, gap)

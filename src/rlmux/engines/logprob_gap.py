"""Whether rollout and training compute the same policy: the largest difference between their log-probabilities.

fresh tokens: made by the version being trained      compared
stale tokens: made by an older version               another policy, not compared
"""

from __future__ import annotations

import math

from torch import Tensor

from rlmux.core.errors import PipelineError
from rlmux.engines.micro_batches import MicroBatch


class LogprobGap:
    """The largest difference over the micro-batches of one step."""

    def __init__(self) -> None:
        self.largest = math.nan
        """Difference in nats; NaN while no fresh token was compared."""

    def compare(self, logprobs: Tensor, batch: MicroBatch, place: str) -> None:
        """Take in what training computed, [R], for the tokens of a micro-batch.

        Raises PipelineError, beginning with `place`, for a log-probability that is not a number.
        """
        gaps = (logprobs.detach() - batch.sampled_logprobs).abs()[~batch.is_stale]
        if not len(gaps):
            return
        gap = float(gaps.max())
        if math.isnan(gap):
            raise PipelineError(
                f"{place}: a log-probability of rollout or training is not a number; the weights are left as they were"
            )
        self.largest = gap if math.isnan(self.largest) else max(self.largest, gap)

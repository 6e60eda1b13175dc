"""A training stage in progress, one micro-batch at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from rlmux.engines.train.train_tensors import Requests, TrainTensors, answered
from rlmux.rl.types import TrainReport


@dataclass(slots=True, kw_only=True)
class StageWork:
    """Progress of a stage, a generator that stops after each micro-batch, so it can be cut anywhere."""

    requests: Requests[None]
    """What the stage computes."""
    state: TrainTensors
    """The tensors that compute the requests of a stage alone; its ranks stop together."""
    total: int
    """Micro-batches of the whole stage, as the rank counts them that has most."""
    done: int = 0
    """Micro-batches done so far."""
    is_done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Results of the stage, complete once `is_done`."""

    def run(self, max_seconds: float) -> TrainReport:
        """Do at least one micro-batch, until the stage is done or another like the last would end after `max_seconds`.

        That is decided before each micro-batch: no rank that has done its own waits for the decision of the first.
        """
        started = perf_counter()
        micro_batches = answered(self.requests, self.state.answer)
        tokens, elapsed_s, last_s = 0, 0.0, 0.0
        while not self.is_done:
            is_over = elapsed_s + last_s >= max_seconds
            is_last = self.done + 1 < self.total and self.state.ranks.agree(is_over=is_over)
            done_tokens = next(micro_batches, None)
            if done_tokens is None:
                self.is_done = True
                break
            tokens += done_tokens
            self.done += 1
            last_s, elapsed_s = perf_counter() - started - elapsed_s, perf_counter() - started
            if is_last:
                break
        return self.report(tokens, perf_counter() - started)

    def report(self, tokens: int, seconds: float) -> TrainReport:
        """Report of a call that did so many tokens in so many seconds."""
        return TrainReport(
            is_done=self.is_done,
            micro_batches_done=self.done,
            micro_batches_total=self.total,
            tokens=tokens,
            seconds=seconds,
            metrics=dict(self.metrics) if self.is_done else {},
        )

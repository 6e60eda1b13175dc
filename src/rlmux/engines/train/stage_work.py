"""Training in progress, one micro-batch at a time.

    StageWork   a stage of a step, alone
    TrainWork   a stage or a request, alone or beside others: joint_training answers what it requests

Both stop after each micro-batch, so they can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rlmux.engines.train.update.train_tensors import Backward, Requests, Score, TrainTensors, answered
from rlmux.rl.types import TrainReport


@dataclass(slots=True, kw_only=True)
class StageWork:
    """Progress of a stage."""

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


@dataclass(slots=True, kw_only=True)
class TrainWork:
    """A stage or a request, of which others compute what it requests. Errors end it and are kept."""

    requests: Requests[Any]
    """What it computes."""
    stage: StageWork | None = None
    """The stage's progress; None for a request."""
    score: Score | None = None
    """First request of the next micro-batch, if it was made already."""
    tokens: int = 0
    """Tokens computed so far."""
    seconds: float = 0.0
    """Its part of the time."""
    is_done: bool = False
    """Whether nothing is left to compute."""
    result: Any = None
    """Result of a request."""
    error: Exception | None = None
    """Error that ended it."""

    @property
    def is_over(self) -> bool:
        """Whether it is done or has failed."""
        return self.is_done or self.error is not None

    def has_score(self) -> bool:
        """Whether a micro-batch is left; its first request is made."""
        if self.score is None and not self.is_over:
            self.score = self.take_score()
        return self.score is not None

    def take_score(self) -> Score | None:
        """The first request of the next micro-batch; None where it has none."""
        score, self.score = self.score, None
        if score is None:
            request = self.resume(None)
            assert not isinstance(request, Backward), "a gradient is of scores"
            return request
        return score

    def run_alone(self, answer: Callable[[Score | Backward], object]) -> None:
        """Compute one micro-batch; `answer`: of the tensors in training."""
        request: Score | Backward | None = self.take_score()
        while request is not None:
            reply: object
            try:
                reply = answer(request)
            except Exception as error:
                reply = error
            request = self.resume(reply)

    def resume(self, reply: object) -> Score | Backward | None:
        """Continue with the reply to its last request, to its next one; None at the end of a micro-batch."""
        try:
            item = self.requests.throw(reply) if isinstance(reply, Exception) else self.requests.send(reply)
            if not isinstance(item, int):
                return item
            self.tokens += item
            if self.stage is not None:
                self.stage.done += 1
                if self.stage.done >= self.stage.total:
                    next(self.requests)
        except StopIteration as end:
            self.is_done, self.result = True, end.value
            if self.stage is not None:
                self.stage.is_done = True
        except Exception as error:
            self.error = error
        return None

"""What a client's batches took, kind by kind, and how long it thought between them: learned, in solo seconds.

    batches that ended ──▶ seconds a unit, by kind ── expected_s(kind, units) ─▶ estimates of the open batch
                      └─▶ seconds of a step       ── seconds() ─▶ the load that placement plans with

The client gives sizes in units of its own; a batch's seconds are taken to grow with them. Where it gives none, the
median of the last batches stands. A step, for placement, is what the client's own step took of each kind, where it
counts steps, or else a batch of each kind that was seen; and the thinking after them, which holds no device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rlmux.core.estimation.measured_steps import MEASURED_STEPS, WINDOW_STEPS, quantile
from rlmux.core.model import MeasuredSeconds, Phase, PhaseSeconds


@dataclass(frozen=True, slots=True)
class _Seen:
    """A batch that ended."""

    units: int
    solo_s: float
    held_s: float
    step: int | None = None
    """The client's own step; None where it names none."""


@dataclass(slots=True)
class _Kind:
    """The last batches of one kind."""

    seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    steps: deque[_Seen] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """The same, those of one step of the client as one."""
    thinking_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Seconds from the end of such a batch to the next arrival of work of any kind."""


class RequestBatchSeconds:
    """The last batches of one client. Fed by the scheduler."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Phase, ...], _Kind] = {}
        self._last: tuple[Phase, ...] | None = None
        """Kind of the batch after which the client thinks; None while it does not."""
        self._since_s = 0.0
        """Time from which it thinks."""

    def end(self, kind: tuple[Phase, ...], units: int, solo_s: float, held_s: float, step: int | None = None) -> None:
        """A batch has ended after so many seconds in all."""
        known = self._kinds.setdefault(kind, _Kind())
        known.seen.append(_Seen(units, solo_s, held_s, step))
        if step is not None and known.steps and known.steps[-1].step == step:
            earlier = known.steps.pop()
            units, solo_s, held_s = earlier.units + units, earlier.solo_s + solo_s, earlier.held_s + held_s
        known.steps.append(_Seen(units, solo_s, held_s, step))

    def begin_thinking(self, kind: tuple[Phase, ...], now_s: float) -> None:
        """Nothing is there to do: the client has what a batch of this kind gave, and thinks."""
        self._last, self._since_s = kind, now_s

    def end_thinking(self, now_s: float) -> None:
        """Work is there again."""
        if self._last is not None:
            self._kinds[self._last].thinking_s.append(now_s - self._since_s)
            self._last = None

    def expected_s(self, kind: tuple[Phase, ...], units: int) -> float | None:
        """Solo seconds of a batch of this kind and size; None before the first."""
        if kind not in self._kinds:
            return None
        seen = self._kinds[kind].seen
        sized = [batch.solo_s / batch.units for batch in seen if batch.units]
        if units and sized:
            return units * quantile(sized, 0.5)
        return quantile([batch.solo_s for batch in seen], 0.5)

    def seconds(self) -> MeasuredSeconds | None:
        """Seconds of a step as a distribution; None before `MEASURED_STEPS` of each kind that was seen."""
        fewest = min((len(kind.steps) for kind in self._kinds.values()), default=0)
        if fewest < MEASURED_STEPS:
            return None
        thinking_s = sum(quantile(kind.thinking_s, 0.5) for kind in self._kinds.values() if kind.thinking_s)

        def solo(part: float) -> PhaseSeconds:
            return self._step_s(
                [quantile([batch.solo_s for batch in kind.steps], part) for kind in self._kinds.values()]
            )

        def with_thinking(seconds: PhaseSeconds) -> PhaseSeconds:
            return PhaseSeconds(rollout_s=seconds.rollout_s, train_s=seconds.train_s, sync_s=thinking_s)

        held = self._step_s([quantile([batch.held_s for batch in kind.steps], 0.5) for kind in self._kinds.values()])
        low, median, high = (with_thinking(solo(part)) for part in (0.1, 0.5, 0.9))
        return MeasuredSeconds(num_steps=fewest, low=low, median=median, high=high, held=with_thinking(held))

    def _step_s(self, seconds_by_kind: list[float]) -> PhaseSeconds:
        """Seconds of each phase; those of a batch of both phases count as training, once."""
        kinds = list(zip(self._kinds, seconds_by_kind, strict=True))
        rollout_s = sum(seconds for kind, seconds in kinds if Phase.TRAIN not in kind)
        train_s = sum(seconds for kind, seconds in kinds if Phase.TRAIN in kind)
        return PhaseSeconds(rollout_s=rollout_s, train_s=train_s)

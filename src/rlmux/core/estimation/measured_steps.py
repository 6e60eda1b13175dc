"""What a pipeline's own steps took, phase by phase, in solo seconds.

    orders that ended or paused ──▶ the open steps ── a step is trained ──▶ its two phases ──▶ seconds(): a distribution

Two kinds of seconds are kept. *Solo*: computing, and waits for the pipeline's own environments; its SLO is judged by
them. *Held*: an order's from begin to end without its switch, hand-overs included, for which its neighbours wait.
Neither contains a wait for a neighbour, since an order has its devices; what sharing them adds is divided out by the
caller. A rollout takes as long as its longest shard. Rewards and publications hold no device and count once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlmux.core.model import DeviceId, MeasuredSeconds, PhaseSeconds, Pipeline, Stage

MEASURED_STEPS = 3
"""Steps after which a pipeline is planned with its own seconds: the median of three is not that of the first, which
starts processes and probes shapes."""
WINDOW_STEPS = 8
"""Steps that the distribution looks back."""
DRIFT = 0.25
"""Part of the seconds it is planned with by which a phase's median changes before the pipeline is placed again."""


@dataclass(slots=True)
class _Spent:
    """Seconds of one shard, or of a step's training, so far."""

    solo_s: float = 0.0
    held_s: float = 0.0

    def add(self, solo_s: float, held_s: float) -> None:
        self.solo_s += solo_s
        self.held_s += held_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Seconds of a step that is trained."""

    rollout: _Spent
    """Those of its longest shard."""
    train: _Spent
    has_migrated: bool
    """Whether trajectories migrated: no device had the shard of a pipeline alone."""


class MeasuredSteps:
    """The last whole steps of one pipeline. Fed by the scheduler."""

    def __init__(self) -> None:
        self._rollout: dict[int, dict[DeviceId, _Spent]] = {}
        """Seconds of each shard, by step that is not trained yet."""
        self._train: dict[int, _Spent] = {}
        """Seconds of training, by step that is not trained yet."""
        self._between: dict[Stage, deque[float]] = {}
        """Seconds of the last rewards and publications."""
        self._migrated: dict[int, None] = {}
        """Steps not trained yet in which trajectories migrated."""
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._proportions: deque[float] = deque(maxlen=WINDOW_STEPS)
        """Rollout over training, in solo seconds, of the last steps without a migration."""
        self._num_devices = 0
        self._last: PhaseSeconds | None = None
        """What `last` found; None: it has not looked since something was added."""

    def open_rollout(self, step: int, devices: Sequence[DeviceId]) -> None:
        """A step's rollout begins, perhaps again: what was measured of it and of later steps does not count."""
        if len(devices) != self._num_devices:
            self._num_devices = len(devices)
            self._steps.clear()
            self._proportions.clear()
            self._last = None
        for later in [known for known in {*self._rollout, *self._train, *self._migrated} if known >= step]:
            self._rollout.pop(later, None)
            self._train.pop(later, None)
            self._migrated.pop(later, None)
        self._rollout[step] = {}

    def add_rollout(self, step: int, device: DeviceId, solo_s: float, held_s: float) -> None:
        """An order of the shard on the device took so long, or the shard waited so long for its environments."""
        shards = self._rollout.get(step)
        if shards is not None:
            shards.setdefault(device, _Spent()).add(solo_s, held_s)

    def add_migration(self, step: int) -> None:
        """Trajectories of the step migrated."""
        self._migrated[step] = None

    def add_train(self, step: int, solo_s: float, held_s: float) -> None:
        """An order of the step's training took so long."""
        self._train.setdefault(step, _Spent()).add(solo_s, held_s)

    def add_between(self, stage: Stage, seconds: float) -> None:
        """A stage that holds no device took so long."""
        self._between.setdefault(stage, deque(maxlen=WINDOW_STEPS)).append(seconds)
        self._last = None

    def end_step(self, step: int) -> None:
        """The step is trained."""
        shards, train = self._rollout.pop(step, None), self._train.pop(step, None)
        has_migrated = step in self._migrated
        self._migrated.pop(step, None)
        if shards and train is not None:
            rollout = _Spent(
                max(shard.solo_s for shard in shards.values()), max(shard.held_s for shard in shards.values())
            )
            self._steps.append(_Step(rollout=rollout, train=train, has_migrated=has_migrated))
            if not has_migrated and train.solo_s > 0.0:
                self._proportions.append(rollout.solo_s / train.solo_s)
            self._last = None

    @property
    def last(self) -> PhaseSeconds | None:
        """Solo seconds of the last whole step, with the sync as its last ones took; None before the first.

        Where trajectories migrated, a device computed those of others, too: the rollout then counts as long as its
        training makes expect, since both grow with the step's tokens.
        """
        if self._last is None and self._steps:
            last = self._steps[-1]
            rollout_s = last.rollout.solo_s
            if last.has_migrated and self._proportions:
                rollout_s = min(rollout_s, quantile(self._proportions, 0.5) * last.train.solo_s)
            self._last = PhaseSeconds(rollout_s=rollout_s, train_s=last.train.solo_s, sync_s=self._between_s())
        return self._last

    def is_last_beyond(self, planned: PhaseSeconds | None) -> bool:
        """Whether a phase of the last step differs from the seconds planned with by more than `DRIFT`."""
        last = self.last
        return last is not None and has_drifted(planned, last)

    def _between_s(self) -> float:
        return sum(quantile(seconds, 0.5) for seconds in self._between.values())

    def seconds(self) -> MeasuredSeconds | None:
        """The distribution; None before `MEASURED_STEPS` steps. So many without a migration count alone."""
        if len(self._steps) < MEASURED_STEPS:
            return None
        counted = [step for step in self._steps if not step.has_migrated]
        if len(counted) < MEASURED_STEPS:
            counted = list(self._steps)
        between_s = self._between_s()

        def solo(part: float) -> PhaseSeconds:
            return PhaseSeconds(
                rollout_s=quantile([step.rollout.solo_s for step in counted], part),
                train_s=quantile([step.train.solo_s for step in counted], part),
                sync_s=between_s,
            )

        held = PhaseSeconds(
            rollout_s=quantile([step.rollout.held_s for step in counted], 0.5),
            train_s=quantile([step.train.held_s for step in counted], 0.5),
            sync_s=between_s,
        )
        return MeasuredSeconds(num_steps=len(counted), low=solo(0.1), median=solo(0.5), high=solo(0.9), held=held)


class DoneSteps:
    """What the steps of one pipeline that are done took alone, weight sync included: its SLO counts them as they were,
    not as the next one is expected to be. Fed by the scheduler."""

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: as it was submitted."""
        self._first_step = pipeline.first_step
        self._own = pipeline.estimate if pipeline.held is None else None
        self._until_s: list[float] = []
        """Solo seconds of the steps up to each."""

    def add(self, step: int, measured: PhaseSeconds, given: PhaseSeconds | None) -> None:
        """Record a trained step. `measured`: its solo seconds; `given`: the user's estimate for these nodes, or
        None."""
        own, alone_s = self._own, measured.solo_s
        if own is not None and given is not None:
            alone_s = over(measured.rollout_s, given.rollout_s) * own.rollout_s
            alone_s += over(measured.train_s, given.train_s) * own.train_s + own.sync_s
        index = step - self._first_step
        del self._until_s[index:]  # steps that a lost node made to be trained again
        before_s = self.solo_s(step - 1)
        while len(self._until_s) <= index:
            before_s += alone_s
            self._until_s.append(before_s)

    def solo_s(self, step: int) -> float:
        """Solo seconds of its steps up to this one, which is done."""
        num_done = min(step - self._first_step + 1, len(self._until_s))
        return self._until_s[num_done - 1] if num_done > 0 else 0.0


def has_drifted(planned: PhaseSeconds | None, measured: PhaseSeconds) -> bool:
    """Whether the measured seconds differ from those planned with by more than `DRIFT` in a phase."""
    if planned is None:
        return True
    pairs = (planned.rollout_s, measured.rollout_s), (planned.train_s, measured.train_s)
    return any(abs(now_s - before_s) > DRIFT * before_s for before_s, now_s in pairs)


def over(seconds: float, base_s: float) -> float:
    """The ratio of the two; 1 where one of them is nothing."""
    return seconds / base_s if seconds > 0.0 and base_s > 0.0 else 1.0


def quantile(values: Sequence[float] | deque[float], part: float) -> float:
    """The quantile by linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

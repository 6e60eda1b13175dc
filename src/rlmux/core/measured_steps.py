"""What a pipeline's own steps took, phase by phase, in solo seconds.

    orders that ended or paused ──▶ the open steps ── a step is trained ──▶ its two phases ──▶ seconds(): a distribution

A phase's seconds are those of its orders from begin to end, without switches: an order holds its devices, so it never
waits for a neighbour, and what sharing its devices adds is divided out by its caller. Waits for the pipeline's own
environments count, whether its devices were held meanwhile or not. A rollout takes as long as its longest shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rlmux.core.model import DeviceId, MeasuredSeconds, PhaseSeconds

MEASURED_STEPS = 3
"""Steps after which a pipeline is planned with its own seconds: the median of three is not that of the first, which
starts processes and probes shapes."""
WINDOW_STEPS = 8
"""Steps that the distribution looks back."""
DRIFT = 0.25
"""Part of the seconds it is planned with by which a phase's median changes before the pipeline is placed again."""


class MeasuredSteps:
    """The last whole steps of one pipeline. Fed by the scheduler."""

    def __init__(self) -> None:
        self._rollout_s: dict[int, dict[DeviceId, float]] = {}
        """Seconds of each shard so far, by step that is not trained yet."""
        self._train_s: dict[int, float] = {}
        """Seconds of training so far, by step."""
        self._migrated: dict[int, None] = {}
        """Steps not trained yet in which trajectories migrated: no device had the shard of a pipeline alone."""
        self._steps: deque[tuple[bool, PhaseSeconds]] = deque(maxlen=WINDOW_STEPS)
        """Whether trajectories migrated, and the seconds, of each step that is trained."""
        self._num_devices = 0

    def open_rollout(self, step: int, devices: Sequence[DeviceId]) -> None:
        """A step's rollout begins, perhaps again: what was measured of it and of later steps does not count."""
        if len(devices) != self._num_devices:
            self._num_devices = len(devices)
            self._steps.clear()
        self._rollout_s = {before: seconds for before, seconds in self._rollout_s.items() if before < step}
        self._train_s = {before: seconds for before, seconds in self._train_s.items() if before < step}
        self._migrated = {before: None for before in self._migrated if before < step}
        self._rollout_s[step] = {}

    def add_rollout(self, step: int, device: DeviceId, solo_s: float) -> None:
        """An order of the shard on the device took so long, or the shard waited so long for its environments."""
        shards = self._rollout_s.get(step)
        if shards is not None:
            shards[device] = shards.get(device, 0.0) + solo_s

    def add_migration(self, step: int) -> None:
        """Trajectories of the step migrated."""
        self._migrated[step] = None

    def add_train(self, step: int, solo_s: float) -> None:
        """An order of the step's training took so long."""
        self._train_s[step] = self._train_s.get(step, 0.0) + solo_s

    def end_step(self, step: int) -> None:
        """The step is trained."""
        shards, train_s = self._rollout_s.pop(step, None), self._train_s.pop(step, None)
        has_migrated = step in self._migrated
        self._migrated.pop(step, None)
        if shards and train_s is not None:
            self._steps.append((has_migrated, PhaseSeconds(rollout_s=max(shards.values()), train_s=train_s)))

    def seconds(self) -> MeasuredSeconds | None:
        """The distribution; None before `MEASURED_STEPS` steps. So many without a migration count alone."""
        if len(self._steps) < MEASURED_STEPS:
            return None
        counted = [seconds for has_migrated, seconds in self._steps if not has_migrated]
        if len(counted) < MEASURED_STEPS:
            counted = [seconds for _, seconds in self._steps]
        low, median, high = (_quantiles(counted, part) for part in (0.1, 0.5, 0.9))
        return MeasuredSeconds(num_steps=len(counted), low=low, median=median, high=high)


def has_drifted(planned: PhaseSeconds | None, measured: PhaseSeconds) -> bool:
    """Whether the measured seconds differ from those planned with by more than `DRIFT` in a phase."""
    if planned is None:
        return True
    pairs = (planned.rollout_s, measured.rollout_s), (planned.train_s, measured.train_s)
    return any(abs(now_s - before_s) > DRIFT * before_s for before_s, now_s in pairs)


def _quantiles(steps: Sequence[PhaseSeconds], part: float) -> PhaseSeconds:
    return PhaseSeconds(
        rollout_s=_quantile([step.rollout_s for step in steps], part),
        train_s=_quantile([step.train_s for step in steps], part),
    )


def _quantile(values: Sequence[float], part: float) -> float:
    """The quantile by linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

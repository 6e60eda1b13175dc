"""What is wrong with a run: a fold of its log by a table of rules, the same live, afterwards and in a test.

    steps of each pipeline ──▶ RULES ──▶ Alert: rule, level, since which step, numbers, advice        one each at most
    times of its steps, the disk ──▶ stands still, SLO at risk, disk full
    the policy's faults ──▶ policy fault

A rule decides from a pipeline's steps so far whether the newest is bad. It fires after a number of bad steps in a row,
and ends with the first good one. Thresholds are starting points: smoothing over 10 steps, noise as the median of the
last 50 changes.
"""

from __future__ import annotations

import math
import shutil
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rlmux.core.model import PipelineId, PipelineStatus
from rlmux.report.slos import StepTime
from rlmux.report.summary import StepTimes
from rlmux.report.timeline.history import History
from rlmux.report.timeline.records import PipelineRecord

_SMOOTHING = 2.0 / (10 + 1)
"""Weight of the newest step in a mean with the span of 10 steps."""
_LAST = 50
"""Steps that medians are over."""
_MIN_STEPS = 20
"""Steps before which a curve has no shape."""
_FIRST = 10
"""Steps at the start that later ones are compared with."""
LEAST_STILL_S = 1800.0
"""Seconds without a step that are not yet a standstill, however short steps are."""
LEAST_FREE_SHARE = 0.05
HELD_IDLE_S = 600.0
"""Seconds for which a device must be held and idle."""
_NAMED_DEVICES = 8
_IDLE_USE = 0.05
"""Use, by the device's own counter, below which it counts as idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that is wrong now."""

    rule: str
    level: str
    """`critical`, `warning` or `info`."""
    pipeline: str | None
    """Pipeline that it is about; None for the whole run."""
    step: int | None
    """First of the steps that it is about."""
    text: str
    """What is seen, with its numbers."""
    advice: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class MetricHistory:
    """A metric's values so far, as much of them as rules need."""

    num: int = 0
    last: float = math.nan
    smooth: float = math.nan
    """Mean that weighs the newest most."""
    first_smooth: float = math.nan
    """That mean after the first steps."""
    best_smooth: float = -math.inf
    first: list[float] = field(default_factory=list)
    """Values of the first steps, sorted."""
    before: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Values before the newest."""
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, value: float) -> None:
        if self.num:
            self.before.append(self.last)
            self.changes.append(abs(value - self.last))
        if self.num < _FIRST:
            insort(self.first, value)
        self.smooth = value if not self.num else self.smooth + _SMOOTHING * (value - self.smooth)
        self.last, self.num = value, self.num + 1
        if self.num <= _FIRST:
            self.first_smooth = self.smooth
        if self.num >= _FIRST:
            self.best_smooth = max(self.best_smooth, self.smooth)

    @property
    def noise(self) -> float:
        """Median size of the last changes from step to step."""
        return median(self.changes) if self.changes else 0.0


Curves = Mapping[str, MetricHistory]
OwnRules = Mapping[str, Mapping[str, Any]]
"""`level` and `steps` of the rules that a pipeline's file has otherwise, by rule; None where as all have them."""
OFF = "off"
Seen = str | None
"""What is wrong with the newest step, in words; None where nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table."""

    name: str
    level: str
    steps: int
    """Bad steps in a row after which it fires."""
    look: Callable[[Curves], Seen]
    advice: str


def _not_finite(curves: Curves) -> Seen:
    bad = [name for name in ("loss", "reward_mean", "grad_norm", "kl") if name in curves and _is_bad(curves[name])]
    return f"{', '.join(bad)} is not a finite number" if bad else None


def _is_bad(curve: MetricHistory) -> bool:
    return curve.num > 0 and not math.isfinite(curve.last)


def _reward_fell(curves: Curves) -> Seen:
    reward = curves.get("reward_mean")
    if reward is None or reward.num < _MIN_STEPS:
        return None
    fall = reward.best_smooth - reward.smooth
    gain = reward.best_smooth - reward.first_smooth
    is_large = fall > max(0.5 * gain, 0.1 * abs(reward.best_smooth))  # first: a median costs more
    is_bad = is_large and fall > 3.0 * reward.noise
    return f"reward fell from {reward.best_smooth:.3g} to {reward.smooth:.3g}" if is_bad else None


def _kl_rose(curves: Curves) -> Seen:
    kl = curves.get("kl")
    if kl is None or not kl.before or kl.last <= 0.1:
        return None
    usual = median(kl.before)
    return f"kl is {kl.last:.3g}, usually {usual:.3g}" if kl.last > 5.0 * usual else None


def _kl_is_huge(curves: Curves) -> Seen:
    kl = curves.get("kl")
    return f"kl is {kl.last:.3g}" if kl is not None and kl.num and kl.last > 10.0 else None


def _engines_disagree(curves: Curves) -> Seen:
    gap = curves.get("logprob_gap")
    if gap is None or len(gap.before) < _FIRST or gap.last <= 1e-4:
        return None
    usual = median(gap.before)
    return f"logprob_gap is {gap.last:.3g}, usually {usual:.3g}" if gap.last > 10.0 * usual else None


def _policies_differ(curves: Curves) -> Seen:
    kl = curves.get("mismatch_kl")
    return f"mismatch_kl is {kl.last:.3g} nats a token" if kl is not None and kl.num and kl.last > 0.01 else None


def _entropy_fell(curves: Curves) -> Seen:
    entropy = curves.get("entropy")
    if entropy is None or entropy.num < _MIN_STEPS:
        return None
    usual = median(entropy.first)
    return f"entropy is {entropy.last:.3g}, at first {usual:.3g}" if entropy.last < max(0.1 * usual, 0.01) else None


def _rewards_are_equal(curves: Curves) -> Seen:
    spread, reward = curves.get("reward_std"), curves.get("reward_mean")
    is_flat = spread is not None and spread.num > 0 and spread.last == 0.0 and reward is not None
    return f"every answer got the reward {reward.last:.3g}" if is_flat and reward is not None else None


RULES: Sequence[Rule] = (
    Rule(
        name="nonfinite",
        level="critical",
        steps=1,
        look=_not_finite,
        advice="Look at the step's samples; lower train.learning_rate or train.grad_clip.",
    ),
    Rule(
        name="reward_collapse",
        level="critical",
        steps=4,
        look=_reward_fell,
        advice="Go back to a checkpoint before the fall, with a lower learning rate or a higher weight of kl.",
    ),
    Rule(
        name="kl_blowup",
        level="warning",
        steps=3,
        look=_kl_rose,
        advice="The policy runs away from its reference: lower the learning rate, or raise the weight of kl.",
    ),
    Rule(
        name="kl_huge",
        level="critical",
        steps=3,
        look=_kl_is_huge,
        advice="The policy has left its reference: go back to a checkpoint.",
    ),
    Rule(
        name="engine_trainer_gap",
        level="warning",
        steps=3,
        look=_engines_disagree,
        advice="Rollout and training disagree about the same tokens: compare their dtypes and weights.",
    ),
    Rule(
        name="engine_mismatch",
        level="warning",
        steps=3,
        look=_policies_differ,
        advice="Rollout samples another policy than training computes: compare dtypes, or set algorithm.mismatch.",
    ),
    Rule(
        name="entropy_collapse",
        level="warning",
        steps=10,
        look=_entropy_fell,
        advice="Answers become equal: raise the temperature, or lower the learning rate.",
    ),
    Rule(
        name="no_signal",
        level="warning",
        steps=10,
        look=_rewards_are_equal,
        advice="Nothing is left to learn from: the reward is broken, or the task is solved.",
    ),
)


LOOKED_AT = ("loss", "reward_mean", "reward_std", "grad_norm", "kl", "logprob_gap", "mismatch_kl", "entropy")
"""Metrics that a rule reads."""


@dataclass(slots=True)
class _Fold:
    """One pipeline's steps so far."""

    last_step: int = 0
    num_steps: int = 0
    curves: dict[str, MetricHistory] = field(default_factory=dict)
    begun: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(first bad step, bad steps in a row) by rule."""
    seen: dict[str, str] = field(default_factory=dict)

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.last_step, self.num_steps = step, self.num_steps + 1
        for name in LOOKED_AT:
            value = metrics.get(name)
            if value is None:
                continue
            curve = self.curves.get(name)
            if curve is None:
                curve = self.curves[name] = MetricHistory()
            curve.add(value)
        for rule in RULES:
            words = rule.look(self.curves)
            if words is None:
                self.begun.pop(rule.name, None)
            else:
                first, many = self.begun.get(rule.name, (step, 0))
                self.begun[rule.name], self.seen[rule.name] = (first, many + 1), words

    def firing(self, pipeline: str, own: OwnRules) -> Iterator[Alert]:
        for rule in RULES:
            first, many = self.begun.get(rule.name, (0, 0))
            if many >= (own.get(rule.name, {}).get("steps") or rule.steps):
                yield Alert(
                    rule=rule.name,
                    level=rule.level,
                    pipeline=pipeline,
                    step=first,
                    text=self.seen[rule.name],
                    advice=rule.advice,
                )


class Alerts:
    """The alerts of a run that grows: each look takes in what is new."""

    def __init__(self) -> None:
        self._folds: dict[PipelineId, _Fold] = {}

    def look(self, history: History, times: StepTimes, *, now_s: float, is_going_on: bool) -> list[Alert]:
        """What is wrong as of the last row: with the policy, then by pipeline in the log's order.

        `now_s`: time of the run's clock. `is_going_on`: a process carries the run on.
        """
        found: list[Alert] = []
        for name, record in history.pipelines.items():
            if record.pipeline.is_filler:
                continue  # it trains nothing, and waits for as long as others want its devices
            rules = history.alert_rules.get(name, {})
            own = list(self._fold_of(name, record).firing(str(name), rules))
            if is_going_on and record.status == PipelineStatus.RUNNING:
                own += _slow(record, times.get(name, ()))
                own += _still(record, times.get(name, ()), now_s)
            found += _at_own_levels(own, rules)
        return [*_policy_faults(history), *(_held_idle(history) if is_going_on else ()), *found]

    def _fold_of(self, name: PipelineId, record: PipelineRecord) -> _Fold:
        fold = self._folds.get(name)
        steps = sorted(record.metrics)
        if fold is None or fold.num_steps > len(steps) or steps[: fold.num_steps][-1:] != _last(fold):
            fold = self._folds[name] = _Fold()  # steps are to be done again: what followed them counts no more
        for step in steps[fold.num_steps :]:
            fold.add(step, record.metrics[step])
        return fold


def _policy_faults(history: History) -> Iterator[Alert]:
    """Decisions of the policy failed since the run was last started or resumed."""
    if history.policy_faults:
        first, num_more = history.policy_faults[0], len(history.policy_faults) - 1
        more = "1 more error is" if num_more == 1 else f"{num_more} more errors are"
        others = f"; {more} in the log" if num_more else ""
        yield Alert(
            rule="policy_fault",
            level="warning",
            pipeline=None,
            step=None,
            text=f"policy {first.policy} failed in {first.method}: {first.error}{others}",
            advice="The plain order of work stood in: the run goes on, not as planned. Mend the policy, then resume.",
        )


def _held_idle(history: History) -> Iterator[Alert]:
    """Devices that pipelines hold, and that have computed next to nothing for long, by their own counters."""
    readings = list(history.hardware)
    recent = [each for each in readings if each.time_s >= history.last_s - HELD_IDLE_S]
    if len(recent) == len(readings) or not recent:
        return  # they do not reach back far enough
    since_s = readings[-len(recent) - 1].time_s
    holders: dict[str, list[str]] = {}
    for pin in history.pins:
        if math.isinf(pin.end_s) and pin.start_s <= since_s:
            for node in pin.placement.nodes:
                holders.setdefault(str(node), []).append(str(pin.pipeline))
    idle = [
        f"{device} ({', '.join(holders[node_name])})"
        for device in recent[-1].note.devices
        if (node_name := device.rpartition(".")[0]) in holders
        and all(
            (use := each.note.devices.get(device, {}).get("use")) is not None and use < _IDLE_USE for each in recent
        )
    ]
    if idle:
        more = f" and {len(idle) - _NAMED_DEVICES} more" if len(idle) > _NAMED_DEVICES else ""
        yield Alert(
            rule="held_idle",
            level="warning",
            pipeline=None,
            step=None,
            text=f"held and idle for {HELD_IDLE_S / 60:.0f} min by the device's own counter: "
            f"{', '.join(idle[:_NAMED_DEVICES])}{more}",
            advice="See what they wait for on the timeline; park the pipeline, or give it fewer nodes.",
        )


def _at_own_levels(alerts: Sequence[Alert], own: OwnRules) -> Iterator[Alert]:
    """The alerts with the levels of the pipeline's file, without those that it switched off."""
    for alert in alerts:
        level = own.get(alert.rule, {}).get("level") or alert.level
        if level != OFF:
            yield replace(alert, level=level)


def _last(fold: _Fold) -> list[int]:
    return [fold.last_step] if fold.num_steps else []


def _slow(record: PipelineRecord, times: Sequence[StepTime]) -> Iterator[Alert]:
    """Its last steps are slower than its SLO, or nearly; the first is left out, as it starts processes."""
    slo = record.pipeline.slo_slowdown
    last = [time for time in times[1:] if time.solo_s > 0.0][-5:]
    if not math.isfinite(slo) or len(last) < 5:
        return
    slowdown = math.fsum(time.seconds for time in last) / math.fsum(time.solo_s for time in last)
    if slowdown > 0.95 * slo:
        is_broken = slowdown > slo
        yield Alert(
            rule="slo_broken" if is_broken else "slo_at_risk",
            level="critical" if is_broken else "warning",
            pipeline=str(record.pipeline.id),
            step=last[0].step,
            text=f"its last five steps took {slowdown:.2f} of alone, SLO {slo:.2f}",
            advice="See what it waits for on the timeline; give its group more nodes, or the pipeline a looser SLO.",
        )


def _still(record: PipelineRecord, times: Sequence[StepTime], now_s: float) -> Iterator[Alert]:
    begun_s = max([record.admitted_s or 0.0, *(time.end_s for time in times[-1:])])
    usual_s = median(time.seconds for time in times) if times else 0.0
    still_s = now_s - begun_s
    if still_s > max(LEAST_STILL_S, 6.0 * usual_s):
        yield Alert(
            rule="stands_still",
            level="critical",
            pipeline=str(record.pipeline.id),
            step=times[-1].step + 1 if times else record.pipeline.first_step,
            text=f"no step for {still_s / 60:.0f} min; one usually takes {usual_s:.3g} s",
            advice="See what it waits for on the timeline, and the end of its log.",
        )


def disk_alert(folder: Path) -> Alert | None:
    """What is wrong where a run's disk has less than a twentieth left."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    if usage.free >= LEAST_FREE_SHARE * usage.total:
        return None
    return Alert(
        rule="disk_low",
        level="critical",
        pipeline=None,
        step=None,
        text=f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.0f} GB are free",
        advice="Free some: a checkpoint that cannot be written stops the run.",
    )

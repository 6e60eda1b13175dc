"""The run in numbers: `summary.json`, and what `run --json` prints. Its keys are stable.

    step_s_mean     a step lasts from its predecessor's end to its own, the first from its rollout's first
                    computing. The first is left out where there are others: it waits for every worker to start
                    and for the SFT warm-ups of all pipelines on its devices
    step_slowdown   step_s_mean over the mean solo estimate of the same steps
    solo estimate   what one step takes with no other pipeline in the way, from this run's own measurements:
                        the rollout worker that computed and waited for its environment longest
                      + the reward, training and publish stages
                    a pipeline with staleness overlaps the two, alone too: the larger of them. Switches and
                    gaps are left out. Where orders ran beside each other on a device, their seconds contain the
                    interference, so the estimate is high and the slowdown is low
    utilization     busy_s over the makespan
    control_overhead
                    seconds of `control` on all devices, over makespan times devices: neither computing nor a
                    declared switch, although an order was given or could have been
    tokens          sampled in rollouts whose result counts; work that was lost or done again counts once

Everything is there for an unfinished run too, as of the last row; what is not known is null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlmux.core.actions import Switch
from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.report.mechanisms import mechanisms
from rlmux.report.slos import StepTime, mean_step_s, move_totals, slo_attainment, slo_fields
from rlmux.report.timeline.build import Timeline
from rlmux.report.timeline.delivery import delivery_summary
from rlmux.report.timeline.intervals import Cause, Kind
from rlmux.report.timeline.records import MIGRATIONS, OrderRecord, PipelineRecord
from rlmux.report.timeline.step_work import StepWork

_NONE, _GENERATE = Switch.NONE, Stage.GENERATE
_BUSY, _TOOL_WAIT = Kind.BUSY, Cause.TOOL_WAIT
StepTimes = Mapping[PipelineId, Sequence[StepTime]]
"""Every published step of every pipeline, in order."""


def summarize(timeline: Timeline, steps: StepTimes | None = None) -> dict[str, Any]:
    """The contents of `summary.json`. `steps`: `step_times` of the timeline, if already computed."""
    makespan_s = timeline.makespan_s
    steps = step_times(timeline) if steps is None else steps
    tokens = _tokens_by_pipeline(timeline.orders)
    pipelines = {
        str(name): _pipeline(timeline, record, steps[name], tokens.get(name, 0))
        for name, record in timeline.pipelines.items()
    }
    return {
        "policy": timeline.header.get("policy"),
        "backend": timeline.header.get("backend"),
        "makespan_s": makespan_s,
        "tokens_per_s": _ratio(sum(pipeline["tokens"] for pipeline in pipelines.values()), makespan_s),
        "pipelines": pipelines,
        "devices": {str(device): _device(timeline, device) for device in timeline.devices},
        "slo_attainment": slo_attainment(pipelines.values()),
        **move_totals([move for pipeline in pipelines.values() for move in pipeline["moves"]]),
        "num_migrations": sum(instant.what in MIGRATIONS for instant in timeline.instants),
        "mechanisms": mechanisms(timeline.orders),
        "num_switches": sum(order.switch is not _NONE for order in timeline.orders),
        "control_overhead": _ratio(timeline.seconds(Cause.CONTROL), makespan_s * len(timeline.devices)),
    }


def step_times(timeline: Timeline) -> dict[PipelineId, list[StepTime]]:
    """Every published step of every pipeline, in order."""
    work = {name: StepWork() for name in timeline.pipelines}
    for device in timeline.devices.values():
        for interval in device.intervals:
            if interval[2] is _BUSY or interval[3] is _TOOL_WAIT:  # is_own_time, of hundreds of thousands
                own = work.get(interval[4])  # type: ignore[arg-type]
                if own is not None and interval[6] is not None:
                    own.add_interval(device.id, interval)
    for order in timeline.orders:
        if order.pipeline in work:
            work[order.pipeline].add_order(order)
    return {name: work[name].steps(record) for name, record in timeline.pipelines.items()}


def _tokens_by_pipeline(orders: Iterable[OrderRecord]) -> Counter[PipelineId]:
    """Tokens sampled in rollouts whose result counts."""
    tokens: Counter[PipelineId] = Counter()
    for order in orders:
        if order.stage is _GENERATE and order.counts:
            tokens[order.pipeline] += order.tokens
    return tokens


def _pipeline(timeline: Timeline, record: PipelineRecord, steps: Sequence[StepTime], num_tokens: int) -> dict[str, Any]:
    metrics = [record.metrics[step] for step in sorted(record.metrics)]
    rewards = record.rewards
    deliveries = {step: found for step in sorted(record.published) if (found := record.delivery(step)) is not None}
    return {
        "steps": max(record.published, default=0),
        "tokens": num_tokens or int(sum(each.get("tokens", 0.0) for each in metrics)),
        "trajectories": int(sum(each.get("trajectories", 0.0) for each in metrics)),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "step_s_mean": mean_step_s(steps),
        **slo_fields(record, steps, timeline.end_s),
        "weights_sha256": record.weights_sha256,
        "delivery": delivery_summary(deliveries),
        "status": str(record.status),
        "promise": record.promise,
        **({"client_s": record.client_s(0.0, timeline.end_s)} if record.pipeline.work_arrives else {}),
        **({"score": record.score} if record.pipeline.is_filler else {}),
        **({"tries": record.tries} if record.retries else {}),
        **({"rounds": rounds} if (rounds := record.rounds) is not None else {}),
    }


def _device(timeline: Timeline, device: DeviceId) -> dict[str, Any]:
    seconds = timeline.devices[device].seconds_by_kind
    return {
        "pool": device.pool,
        **{f"{kind}_s": seconds[kind] for kind in Kind},
        "utilization": _ratio(seconds[Kind.BUSY], timeline.makespan_s),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None

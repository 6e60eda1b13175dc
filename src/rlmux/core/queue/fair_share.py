"""Which account has used how much, and the order in which waiting pipelines are offered room for it.

    PipelineSubmitted, SharesSet, PipelineRanked ─▶ Shares ── QueueView ─▶ QueueOrder
                                                     └── in_order ─▶ AdmissionQueue

What an account uses is what its pipelines are *charged* for. Each second of each device that a pipeline is pinned to is
charged to someone, and all of it adds up to the seconds for which devices were held:

    while an order computes or switches there   its pipeline, by the device fraction; a filler for what it uses; in a
                                                batch of several pipelines each by its share of the tokens
    the rest, a bubble                          the pipelines pinned there, by their seconds in a cycle on that device

What a filler is charged counts for no share and no quota: others are offered room as if it were not there.

So a pipeline that fills another's bubbles costs nothing extra, and one alone in its group pays for its own. An
admission adds one step's seconds to the account at once, or a hundred submissions would pass before its usage moves.

Nothing is counted, and the order is that of submission, until a pipeline has more than a name: a user, a
project, an urgency or a rank, or shares are set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlmux.core.decayed_usage import HALF_LIFE_S, DecayedUsage, full_of
from rlmux.core.events import BatchShare
from rlmux.core.model import Account, Cluster, DeviceId, Phase, Pipeline, PipelineId, PipelineStatus, Urgency
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.placement.group_load import phases_of
from rlmux.core.queue.quotas import DAY_S, Quotas
from rlmux.core.queue_order import (
    AccountSpent,
    AccountUsage,
    QueueOrder,
    QueueView,
    RunningPipeline,
    ShareSettings,
    WaitingPipeline,
)
from rlmux.core.state import GroupState, HeldDevice, SchedulerState
from rlmux.core.work import Order

_NO_ACCOUNT = Account("", "")
_URGENT_FACTOR = 2.0
"""What an urgent pipeline uses counts so many times in its account's usage."""
_UNKNOWN_STEP_S = 60.0
"""Seconds that a step of a pipeline without estimate is taken to hold its devices."""


class Shares:
    """Counts what accounts use; see the module."""

    def __init__(self, cluster: Cluster, state: SchedulerState, queue_order: QueueOrder | None) -> None:
        self._cluster = cluster
        self._state = state
        self._queue_order = queue_order
        self.quotas = Quotas(cluster, state)
        self.are_set = False
        """Whether anything but the order of submission may decide."""

    def note_submitted(self, pipeline: Pipeline) -> None:
        """A pipeline has come."""
        has_urgency = pipeline.urgency not in (Urgency.NORMAL, Urgency.FILLER)
        if pipeline.account != _NO_ACCOUNT or has_urgency or pipeline.rank != 0:
            self.begin()

    def begin(self) -> None:
        """Count from now on, and let more than the order of submission decide."""
        if self.are_set or self._queue_order is None:
            return
        self.are_set = True
        for group in self._state.groups.values():
            self.hold((device for _, device in group.members_by_device), group)
        for order in self._state.fillers.running.values():
            self.hold(order.devices, self._state.fillers)

    def set(self, settings: ShareSettings) -> None:
        """Take over what users and projects are entitled to; what they used before decays anew from now on."""
        state = self._state
        self.begin()
        self.charge(state.held_devices)
        state.settings = settings
        state.share_by_account = {entry.account: entry.share for entry in settings.accounts}
        state.quota_by_account = {entry.account: entry.quota for entry in settings.accounts if not entry.quota.is_empty}
        for by_pool in state.usage_by_account.values():
            for usage in by_pool.values():
                usage.device_s, usage.at_s = usage.at(state.now_s), state.now_s
                usage.half_life_s = settings.half_life_s

    def restore(self, usage: Iterable[AccountUsage], spent: Iterable[AccountSpent] = ()) -> None:
        """Count what was used in earlier parts of the run."""
        state = self._state
        self.begin()
        self.quotas.budgets.restore(spent)
        for used in usage:
            by_pool = state.usage_by_account.setdefault(used.account, {})
            by_pool[used.pool] = DecayedUsage(used.device_s, state.now_s, self._half_life_s)
            if used.today_s > 0.0:
                self.quotas.begin_day()
                state.charged_today.setdefault(used.account, {})[used.pool] = used.today_s

    def usage(self) -> tuple[AccountUsage, ...]:
        """What every account has used up to now."""
        state = self._state
        self.charge(state.held_devices)
        today = state.charged_today if state.day == int(state.now_s // DAY_S) else {}
        return tuple(
            AccountUsage(
                account=account,
                pool=pool,
                device_s=usage.at(state.now_s),
                today_s=today.get(account, {}).get(pool, 0.0),
            )
            for account, by_pool in state.usage_by_account.items()
            for pool, usage in by_pool.items()
        )

    def spent(self) -> tuple[AccountSpent, ...]:
        """What every account with a budget was charged in its present period."""
        self.charge(self._state.held_devices)
        return tuple(self._state.spent_by_account.values())

    @property
    def _half_life_s(self) -> float:
        return HALF_LIFE_S if self._state.settings is None else self._state.settings.half_life_s

    # ------------------------------------------------------------------ charges

    def hold(self, devices: Iterable[DeviceId], group: GroupState) -> None:
        """A pipeline of the group is about to be pinned to these devices, or a filler to compute there."""
        if not self.are_set:
            return
        for device in devices:
            held = self._state.held_devices.setdefault(device, HeldDevice(group, self._state.now_s))
            self._charge(device)
            if held.group is self._state.fillers:
                held.group = group

    def let_go(self, devices: Iterable[DeviceId]) -> None:
        """A pipeline is pinned to these devices no longer, and their seconds are charged."""
        for device in devices if self.are_set else ():
            group = self._state.held_devices[device].group if device in self._state.held_devices else None
            if group is None or _pinned(group, device):
                continue
            if self._state.devices[device].filler is None:
                del self._state.held_devices[device]
            else:  # a filler still computes there
                self._state.held_devices[device].group = self._state.fillers

    def charge(self, devices: Iterable[DeviceId]) -> None:
        """Charge the seconds of these devices up to now, before something changes there."""
        for device in devices if self.are_set else ():
            self._charge(device)

    def charge_by_tokens(self, order: Order, batches: Sequence[BatchShare]) -> None:
        """Replace what an order that has ended was charged for batches with others by its share of their tokens."""
        since_s, now_s = order.started_s, self._state.now_s
        if not batches or not self.are_set or now_s <= since_s:
            return
        rate = sum(batch.charged_s - batch.held_s for batch in batches) / (now_s - since_s)
        for device in order.devices:
            self._add(self._state.runs[order.pipeline], device.pool, rate, since_s)

    def enter(self, run: PipelineRun) -> None:
        """Count one expected step of a pipeline that is admitted, in its account's usage alone."""
        if self.are_set:
            for pool, device_s in self._entry_by_pool(run.pipeline).items():
                self._usage(run, pool).add(device_s, self._state.now_s)

    def _charge(self, device: DeviceId) -> None:
        state = self._state
        held = state.held_devices.get(device)
        if held is None or state.now_s <= held.since_s:
            return
        bubble = 1.0
        for order, device_fraction in state.devices[device].orders.items():
            bubble -= device_fraction
            self._add(state.runs[state.orders[order].pipeline], device.pool, device_fraction, held.since_s)
        filler = state.devices[device].filler
        if filler is not None:
            self._bill(state.runs[state.orders[filler].pipeline], device.pool, 1.0, held.since_s)
        pinned = _pinned(held.group, device)
        total = sum(pinned.values())
        for pipeline, weight in pinned.items() if bubble > 0.0 else ():
            self._count(state.runs[pipeline], device.pool, bubble * weight / total, held.since_s)
            if filler is None:
                self._bill(state.runs[pipeline], device.pool, bubble * weight / total, held.since_s)
        state.held_by_pool[device.pool] = state.held_by_pool.get(device.pool, 0.0) + state.now_s - held.since_s
        held.since_s = state.now_s

    def _add(self, run: PipelineRun, pool: str, rate: float, since_s: float) -> None:
        """Charge the pipeline for a rate, in devices, from `since_s` until now, and count it as used."""
        self._bill(run, pool, rate, since_s)
        self._count(run, pool, rate, since_s)

    def _bill(self, run: PipelineRun, pool: str, rate: float, since_s: float) -> None:
        charged = self._state.charged_by_pipeline.setdefault(run.pipeline.id, {})
        charged[pool] = charged.get(pool, 0.0) + rate * (self._state.now_s - since_s)

    def _count(self, run: PipelineRun, pool: str, rate: float, since_s: float) -> None:
        """Count it for the share of the pipeline's account, and for its quota."""
        now_s = self._state.now_s
        factor = _URGENT_FACTOR if run.pipeline.urgency == Urgency.URGENT else 1.0
        self._usage(run, pool).add_rate(factor * rate, since_s, now_s)
        self.quotas.count(run.pipeline, pool, rate, since_s)

    def _usage(self, run: PipelineRun, pool: str) -> DecayedUsage:
        by_pool = self._state.usage_by_account.setdefault(run.pipeline.account, {})
        return by_pool.setdefault(pool, DecayedUsage(0.0, self._state.now_s, self._half_life_s))

    # ------------------------------------------------------------------ the order

    def in_order(self) -> list[PipelineRun]:
        """Waiting pipelines that are not held and within their quotas, the first to be offered room first."""
        waiting = [run for run in self._state.waiting.values() if not run.admission.is_held]
        runs = [run for run, excess in self.quotas.excesses(waiting) if excess is None]
        runs.sort(key=lambda run: run.sequence)
        if not self.are_set or self._queue_order is None or len(runs) < 2:
            return runs
        by_id = {run.pipeline.id: run for run in runs}
        return [by_id[name] for name in self._queue_order.order(self._view(runs))]

    def to_park(self, head: PipelineRun) -> list[PipelineRun]:
        """Running pipelines that may be parked to make room for a waiting one, the first to go first."""
        settings = self._state.settings
        if self._queue_order is None or settings is None or not settings.parks:
            return []
        placed = (run for group in self._state.groups.values() for run in group.members.values())
        running = sorted((run for run in placed if _may_be_parked(run, settings)), key=lambda run: run.sequence)
        view = replace(self._view([head]), running=tuple(_running(run) for run in running))
        names = self._queue_order.to_park(view.waiting[0], view) if running else ()
        return [self._state.runs[name] for name in names]

    def standing_of(self, account: Account) -> tuple[float, float]:
        """(the dominant share of an account's project, the one that every project would have had by its weight)."""
        if self._queue_order is None or not self.are_set:
            return 0.0, 0.0
        view = self._view(list(self._state.waiting.values()))
        project = Account(account.project, "")
        return self._queue_order.share_of(project, view), self._queue_order.fair_share(view)

    def _view(self, runs: list[PipelineRun]) -> QueueView:
        state = self._state
        self.charge(state.held_devices)
        return QueueView(
            waiting=tuple(self._waiting(run) for run in runs),
            usage_by_account={
                account: {pool: usage.at(state.now_s) / self._capacity(pool) for pool, usage in by_pool.items()}
                for account, by_pool in state.usage_by_account.items()
            },
            share_by_account=state.share_by_account,
            capacity_by_pool={pool: self._capacity(pool) for pool in self._cluster.pools},
        )

    def _capacity(self, name: str) -> float:
        """Device-seconds of the whole pool held for ever; those of one device where the pool has no end."""
        pool = self._cluster.pools[name]
        return full_of(self._half_life_s) * (pool.num_nodes * pool.devices_per_node if pool.num_nodes else 1)

    def _waiting(self, run: PipelineRun) -> WaitingPipeline:
        pipeline = run.pipeline
        return WaitingPipeline(
            id=pipeline.id,
            account=pipeline.account,
            urgency=pipeline.urgency,
            rank=run.admission.rank,
            waited_s=self._state.now_s - run.admission.waiting_since_s,
            sequence=run.sequence,
            entry_by_pool=self._entry_by_pool(pipeline),
        )

    def _entry_by_pool(self, pipeline: Pipeline) -> dict[str, float]:
        """Device-seconds of each pool that one step is expected to hold."""
        entry: dict[str, float] = {}
        rollout_s, train_s = phases_of(pipeline) if pipeline.estimate is not None else (_UNKNOWN_STEP_S,) * 2
        for phase, count, seconds in (
            (Phase.ROLLOUT, pipeline.num_rollout_nodes, rollout_s),
            (Phase.TRAIN, pipeline.num_train_nodes, train_s),
        ):
            pool = self._cluster.pool_serving(phase)
            if pool is not None:
                entry[pool.name] = entry.get(pool.name, 0.0) + count * pool.devices_per_node * seconds
        return entry


def _may_be_parked(run: PipelineRun, settings: ShareSettings) -> bool:
    """Whether it may be parked for another: it runs for long enough, has planned steps, and was promised no SLO."""
    return (
        run.status is PipelineStatus.RUNNING
        and not run.pipeline.work_arrives
        and not run.parking.is_parking
        and run.pipeline.slo_slowdown == math.inf
        and run.step.published_version - max(run.admission.restart_step, 0) >= settings.min_steps
    )


def _running(run: PipelineRun) -> RunningPipeline:
    pipeline = run.pipeline
    return RunningPipeline(id=pipeline.id, account=pipeline.account, urgency=pipeline.urgency, sequence=run.sequence)


def _pinned(group: GroupState, device: DeviceId) -> dict[PipelineId, float]:
    """Pipelines that are pinned to the device, with their seconds there in a cycle; equal where those are unknown."""
    seconds: dict[PipelineId, float] = {}
    for index, phase in enumerate((Phase.ROLLOUT, Phase.TRAIN)):
        for name, run in group.members_by_device.get((phase, device), {}).items():
            seconds[name] = seconds.get(name, 0.0) + phases_of(run.pipeline)[index] * run.cycle.steps_per_cycle
    return seconds if all(seconds.values()) else dict.fromkeys(seconds, 1.0)

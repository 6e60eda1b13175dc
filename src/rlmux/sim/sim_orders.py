"""The orders that run: how far each is, how fast it runs, and when it is looked at next.

    begin ─▶ rates ─▶ schedule_end ─▶ kernel ─▶ next_event ─▶ ChunkFinished | StageFinished
               ▲                                     │
               └──────── update_rates ◀── an order begins, ends, changes its sub-stage or its device fraction

Every order has one entry in the kernel that counts: the time of its next progress report, or of its end. Whatever
changes its rate first advances its work to now at the old rate, and then schedules another entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.core.model import OrderId, SubStage
from rlmux.sim.kernel import WORK_ENDS, Kernel
from rlmux.sim.models.rates import Rates
from rlmux.sim.models.work import SoloSeconds
from rlmux.sim.results.metrics import Collector
from rlmux.sim.results.result import Span
from rlmux.sim.sim_state import SimOrder


class SimOrders:
    """Owner of every `RunningOrder`."""

    def __init__(
        self,
        kernel: Kernel,
        rates: Rates[SimOrder],
        collector: Collector,
        *,
        reacts_to_progress: bool,
        spans_until_s: float,
    ) -> None:
        """`reacts_to_progress`: of the policy; progress is reported for it, and where rates depend on sub-stages."""
        self._kernel = kernel
        self._rates = rates
        self._collector = collector
        self._are_independent = not rates.depends_on_sub_stage
        """Whether the begin or end of an order leaves all other rates unchanged."""
        self._has_reports = reacts_to_progress or not self._are_independent
        self._spans_until_s = spans_until_s
        self._order_by_id: dict[OrderId, SimOrder] = {}

    def __iter__(self) -> Iterator[SimOrder]:
        return iter(list(self._order_by_id.values()))

    def __getitem__(self, order: OrderId) -> SimOrder:
        return self._order_by_id[order]

    def __contains__(self, order: OrderId) -> bool:
        return order in self._order_by_id

    # ------------------------------------------------------------------ an order begins, changes, ends

    def begin(self, running: SimOrder) -> None:
        self._order_by_id[running.action.order] = running
        if self._are_independent:
            self._schedule_end(running)
        else:
            self._update_rates(self._rates.begin(running))

    def change(self, running: SimOrder) -> None:
        """Update rates after a change of the order's work."""
        self._update_rates(self._rates.change(running))

    def set_device_fraction(self, order: OrderId, device_fraction: float) -> None:
        running = self._order_by_id[order]
        self.advance(running)
        running.device_fraction = device_fraction
        self.change(running)

    def stop(self, running: SimOrder) -> None:
        """Remove an order whose work is advanced to now, and account for its device time."""
        del self._order_by_id[running.action.order]
        running.entry = -1
        if not self._are_independent:
            self._update_rates(self._rates.end(running))
        self._account(running)

    def delay(self, running: SimOrder, seconds: float) -> None:
        """Let the order compute nothing for so long, before it computes again."""
        running.advanced_to_s += seconds
        running.waited_s += seconds

    def delay_computing(self, orders: Sequence[SimOrder], seconds: float) -> None:
        """Delay orders that compute at this moment."""
        for running in orders:
            self.advance(running)
            self.delay(running, seconds)
            self._schedule_end(running)

    # ------------------------------------------------------------------ progress

    def next_event(self, running: SimOrder, entry: int) -> ChunkFinished | StageFinished | None:
        """What an entry of the kernel means: a progress report, the end, or nothing worth an event."""
        if running.entry != entry:
            return None
        work = running.work
        if type(work) is SoloSeconds:  # its one entry is its end
            running.busy_s += (self._kernel.now_s - running.advanced_to_s) * running.device_fraction
            return self._finish(running)
        is_prefill = work.sub_stage is SubStage.PREFILL
        self.advance(running)
        if is_prefill and not running.prefill_s:
            running.prefill_s = self.computed_s(running)
        if work.is_over:
            return self._finish(running)
        self.change(running)
        return self._report(running)

    def advance(self, running: SimOrder) -> None:
        """Advance its work to now, at the rate that it has had."""
        now_s = self._kernel.now_s
        elapsed_s = now_s - running.advanced_to_s
        if elapsed_s > 0.0:
            computed_s = running.work.advance(elapsed_s, running.rate)
            running.busy_s += computed_s * running.device_fraction
            if computed_s < elapsed_s:
                running.waited_s += elapsed_s - computed_s
            running.advanced_to_s = now_s

    def computed_s(self, running: SimOrder) -> float:
        """Seconds since the order in which it neither switched nor waited."""
        seconds = self._kernel.now_s - running.began_s - running.switch_s - running.waited_s
        return seconds if seconds > 0.0 else 0.0

    def _report(self, running: SimOrder) -> ChunkFinished | None:
        counts = running.work.report()
        if counts is None or counts == running.reported:
            return None
        running.reported = counts
        num_active, num_waiting, num_waiting_for_env = counts
        return ChunkFinished(
            time_s=self._kernel.now_s,
            order=running.action.order,
            num_active=num_active,
            num_waiting=num_waiting,
            num_waiting_for_env=num_waiting_for_env,
            seconds=self.computed_s(running),
        )

    def _finish(self, running: SimOrder) -> StageFinished:
        self.stop(running)
        action, now_s = running.action, self._kernel.now_s
        if action.stage is running.pipeline.last_stage:
            self._collector.end_step(action.pipeline, action.step, now_s)
        return StageFinished(
            time_s=now_s,
            order=action.order,
            seconds=self.computed_s(running),
            switch_s=running.switch_s,
            prefill_s=running.prefill_s,
        )

    # ------------------------------------------------------------------ rates

    def _update_rates(self, orders: Sequence[SimOrder]) -> None:
        for running in orders:
            self.advance(running)
            self._schedule_end(running)

    def _schedule_end(self, running: SimOrder) -> None:
        """Take the order's rate, and schedule its next report or its end."""
        rate = running.rate = self._rates.rate(running)
        work = running.work
        if type(work) is SoloSeconds:
            next_s = work.left_s / rate
        else:
            next_s = work.until_report(rate) if self._has_reports else work.until_over(rate)
        running.entry = self._kernel.schedule(running.advanced_to_s + next_s, WORK_ENDS, running)

    def _account(self, running: SimOrder) -> None:
        """Device time that the order has taken, and its span for a Gantt chart."""
        action, now_s = running.action, self._kernel.now_s
        devices = action.devices
        if not devices:
            return
        switch_s = running.switch_s
        if switch_s > 0.0:
            switch_s = min(switch_s, now_s - running.began_s)
        self._collector.compute(action.pipeline, devices, running.busy_s, switch_s)
        if running.began_s < self._spans_until_s:
            self._collector.spans.append(
                Span(
                    pipeline=action.pipeline,
                    devices=devices,
                    stage=action.stage,
                    step=action.step,
                    begin_s=running.began_s,
                    end_s=now_s,
                    switch_s=switch_s,
                )
            )

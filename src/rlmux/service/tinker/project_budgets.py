"""Daily compute budgets of projects: requests beyond a budget are refused until the next day.

    orders that end ─▶ charge(project, device_s) ─▶ tinker.db, by day        check(project) ─▶ BudgetError ─▶ 402

Days are in UTC. Started work is finished, so a project may exceed its budget by that. A budget that is set in
the ledger, by `rlmux budget`, holds from the next request on, instead of the file's.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from rlmux.core.actions import Park, Release, RunStage
from rlmux.core.errors import RlmuxError
from rlmux.core.events import NodeLost, PipelineFailed, PipelineRestarted, StageFinished, StagePaused, WorkerLost
from rlmux.core.model import OrderId, PipelineId
from rlmux.log.notes import Note, SharedBatchNote
from rlmux.service.tinker.ledger import Ledger

_DAY_S = 86400


class BudgetError(RlmuxError):
    """A project has used what it may use today."""


def today() -> int:
    """Days since 1970, in UTC."""
    return int(time.time()) // _DAY_S


class ProjectBudgets:
    """Budgets of the file and usage of the ledger."""

    def __init__(self, ledger: Ledger, hours_by_project: Mapping[str, float], today: Callable[[], int] = today) -> None:
        """`hours_by_project`: device-hours a day; a project that is not named has no limit."""
        self._ledger = ledger
        self._hours_by_project = hours_by_project
        self._today = today

    def charge(self, project: str, device_s: float) -> None:
        """Count what a project's work took."""
        self._ledger.add_usage(project, self._today(), device_s)

    def check(self, project: str) -> None:
        """Raises BudgetError for a project with nothing left today."""
        hours, used_h = self.hours(project), self.used_hours(project)
        if used_h >= hours:
            raise BudgetError(
                f"project {project} has used {used_h:.4g} of {hours:g} device-hours today; goes on at 00:00 UTC, or "
                "with a larger budget"
            )

    def hours(self, project: str) -> float:
        """Device-hours that a project may use in a day; infinity where it has no limit."""
        newest = self._ledger.budget(project)
        return self._hours_by_project.get(project, math.inf) if newest is None else newest

    def used_hours(self, project: str) -> float:
        """Device-hours that a project has used today."""
        return self._ledger.usage(project, self._today()) / 3600

    def projects(self, also: Iterable[str] = ()) -> list[str]:
        """Projects that have used something, have a budget, or are named, by name."""
        return sorted({*self._ledger.charged_projects(), *self._hours_by_project, *also})

    def set_hours(self, project: str, hours: float) -> None:
        """Have the project use so many device-hours a day from now on; infinity: as many as it likes."""
        self._ledger.set_budget(project, hours)


class Charges:
    """Finds in the controller's events what each order took, and for whom.

    A chunk whose batch had adapters of several clients is theirs by their shares of its tokens; all else of an order is
    its own pipeline's. What is charged for an order is what it held, to the second.

    An order without an ending event (its worker, node or pipeline is gone) has no known seconds and is not charged.
    """

    def __init__(self, charge: Callable[[PipelineId, float], None]) -> None:
        """`charge`: gets a pipeline and device-seconds; called in the controller's thread."""
        self._charge = charge
        self._order: dict[OrderId, RunStage] = {}
        self._others_s: dict[OrderId, defaultdict[PipelineId, float]] = {}
        """Seconds of an order that were other pipelines'."""

    @property
    def num_open(self) -> int:
        """Orders that have not ended."""
        return len(self._order)

    def update(self, events: Sequence[object], actions: Sequence[object], notes: Sequence[Note] = ()) -> None:
        """Take what happened, in the order in which it did."""
        for note in notes:
            if isinstance(note, SharedBatchNote) and note.order in self._order:
                self._share(note)
        for event in events:
            if not isinstance(event, StageFinished | StagePaused):
                self._forget_ended(event)
            elif (order := self._order.pop(event.order, None)) is not None:
                self._charge_order(order, event.seconds + event.switch_s)
        for action in actions:
            if isinstance(action, RunStage):
                self._order[action.order] = action
            else:
                self._forget_ended(action)

    def _forget_ended(self, news: object) -> None:
        for order in [order for order in self._order.values() if _is_ended(order, news)]:
            del self._order[order.order]
            self._others_s.pop(order.order, None)

    def _share(self, batch: SharedBatchNote) -> None:
        """A chunk of an order computed other pipelines' tokens."""
        others_s = self._others_s.setdefault(batch.order, defaultdict(float))
        for name, count in batch.tokens.items():
            if name != self._order[batch.order].pipeline:
                others_s[PipelineId(name)] += batch.seconds * count / sum(batch.tokens.values())

    def _charge_order(self, order: RunStage, seconds: float) -> None:
        others_s: Mapping[PipelineId, float] = self._others_s.pop(order.order, {})
        self._charge(order.pipeline, (seconds - sum(others_s.values())) * len(order.devices))
        for pipeline, its_s in sorted(others_s.items()):
            self._charge(pipeline, its_s * len(order.devices))


def _is_ended(order: RunStage, news: object) -> bool:
    """Whether an event or an action that names no order ends this one."""
    match news:
        case WorkerLost():
            return order.pipeline == news.pipeline and news.device in order.devices
        case NodeLost():
            return any(device.node_id == news.node for device in order.devices)
        case PipelineFailed() | PipelineRestarted() | Park() | Release():
            return order.pipeline == news.pipeline
    return False

"""Work that a client has announced and not received yet, from the log: when each order's work arrived.

WorkArrived ─▶ announced ── RunStage of a new batch ─▶ open ── StageFinished ─▶ gone
                            RunStage of the same ─────▶ open since its first arrival

A module of its own: it is a small fold of its own over the events of clients.
"""

from __future__ import annotations

from rlmux.core.actions import RunStage
from rlmux.core.model import Phase, Placement, Stage

_Kind = tuple[Phase, ...]


class Arrivals:
    """The work of one pipeline whose work arrives; see the module."""

    def __init__(self) -> None:
        self._announced: dict[_Kind, float] = {}
        """Time at which the work of each kind that has not begun arrived first."""
        self._open: dict[Stage, tuple[_Kind, int, float]] = {}
        """Kind, number and time of arrival of the batch that has begun last, by stage."""

    @property
    def has_work(self) -> bool:
        return bool(self._announced or self._open)

    def announce(self, time_s: float, kind: _Kind) -> None:
        self._announced.setdefault(kind, time_s)

    def withdraw(self, kind: _Kind) -> None:
        self._announced.pop(kind, None)

    def begin(self, action: RunStage, placement: Placement) -> tuple[float, _Kind]:
        """Time at which the order's work arrived, and its kind."""
        kind = self._kind_of(action, placement)
        before = self._open.get(action.stage)
        if before is not None and before[:2] == (kind, action.step):
            return before[2], kind
        arrived_s = self._announced.pop(kind, 0.0)
        self._open[action.stage] = (kind, action.step, arrived_s)
        return arrived_s, kind

    def end(self, stage: Stage) -> None:
        self._open.pop(stage, None)

    def _kind_of(self, action: RunStage, placement: Placement) -> _Kind:
        """The order's kind: by its stage and nodes, and where both phases have the same nodes by what was announced."""
        if action.stage is Stage.GENERATE:
            return (Phase.ROLLOUT,)
        both: _Kind = (Phase.ROLLOUT, Phase.TRAIN)
        trains_only = {device.node_id for device in action.devices} <= set(placement.train_nodes)
        if not trains_only:
            return both
        is_same = set(placement.rollout_nodes) <= set(placement.train_nodes)
        return both if is_same and both in self._announced and (Phase.TRAIN,) not in self._announced else (Phase.TRAIN,)

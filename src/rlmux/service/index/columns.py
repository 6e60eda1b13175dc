"""Intervals in columns: 50 bytes each, thousands to a row of the index.

Interval ── Places ──▶ record of INTERVAL       device, pipeline, cause, stage are places in lists of names
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlmux.core.model import DeviceId, PipelineId, Stage
from rlmux.report.timeline.intervals import Cause, Interval, Kind
from rlmux.report.timeline.live_timeline import Placed

Array = np.ndarray[Any, Any]

INTERVAL = np.dtype(
    [
        ("start_s", "<f8"),
        ("end_s", "<f8"),
        ("device", "<u2"),
        ("pipeline", "<u2"),
        ("step", "<u4"),
        ("order", "<u4"),
        ("fraction", "<f8"),
        ("cause", "u1"),
        ("kind", "u1"),
        ("stage", "u1"),
        ("lane", "u1"),
        ("flags", "u1"),
    ]
)
NO_PIPELINE, NO_STAGE = 65535, 255
IS_OPEN, IS_FINAL = 1, 2
"""Bits of `flags`: nothing in the log ends it; no later row changes it."""

CAUSES, KINDS, STAGES = tuple(Cause), tuple(Kind), tuple(Stage)
_CAUSE, _KIND, _STAGE = ({name: place for place, name in enumerate(names)} for names in (CAUSES, KINDS, STAGES))

KIND_BY_CAUSE = {
    **dict.fromkeys(CAUSES, Kind.BUBBLE),
    **dict.fromkeys((Cause.COMPUTE, Cause.TAIL), Kind.BUSY),
    **dict.fromkeys((Cause.SWITCH, Cause.STARTING), Kind.SWITCH),
    **dict.fromkeys((Cause.CLIENT, Cause.NOTHING_ADMITTED, Cause.DOWN), Kind.IDLE),
}


class Places:
    """The lists that numbers are places in. They grow at the end only."""

    def __init__(self, devices: Iterable[str] = (), pipelines: Iterable[str] = ()) -> None:
        self._devices = {name: place for place, name in enumerate(devices)}
        self._pipelines = {name: place for place, name in enumerate(pipelines)}

    @property
    def devices(self) -> list[str]:
        return list(self._devices)

    @property
    def pipelines(self) -> list[str]:
        return list(self._pipelines)

    def device(self, device: DeviceId) -> int:
        return self._devices.setdefault(str(device), len(self._devices))

    def pipeline(self, pipeline: PipelineId | None) -> int:
        if pipeline is None:
            return NO_PIPELINE
        return min(self._pipelines.setdefault(str(pipeline), len(self._pipelines)), NO_PIPELINE - 1)

    def columns(self, placed: Sequence[Placed], *, is_final: bool) -> Array:
        """Records of these intervals, in their order."""
        records = np.zeros(len(placed), INTERVAL)
        if not placed:
            return records
        devices, intervals = zip(*placed, strict=True)
        columns = dict(zip(Interval._fields, zip(*intervals, strict=True), strict=True))
        for name in ("start_s", "end_s", "step"):
            records[name] = columns[name]
        records["fraction"] = columns["device_fraction"]
        records["lane"] = np.minimum(columns["lane"], 255)
        place_of = {device: self.device(device) for device in dict.fromkeys(devices)}
        records["device"] = [place_of[device] for device in devices]
        records["pipeline"] = self._all_pipelines(columns["pipeline"])
        records["order"] = [order or 0 for order in columns["order"]]
        records["cause"] = [_CAUSE[cause] for cause in columns["cause"]]
        records["kind"] = [_KIND[kind] for kind in columns["kind"]]
        records["stage"] = [NO_STAGE if stage is None else _STAGE[stage] for stage in columns["stage"]]
        records["flags"] = (IS_FINAL if is_final else 0) | np.where(columns["is_open"], IS_OPEN, 0)
        return records

    def _all_pipelines(self, names: Sequence[PipelineId | None]) -> list[int]:
        """New names get their places in the order in which they come."""
        place_of = {name: self.pipeline(name) for name in dict.fromkeys(names)}
        return [place_of[name] for name in names]

"""The history that a status needs: orders that are over leave their steps' seconds, and go. It can be kept in a file.

    rows ──▶ CondensedHistory ──condense──▶ seconds of steps, by pipeline    (step_work.py)
                     │                      orders from the first one that is not over
                     └── keep ──▶ .status.cache ──▶ kept_history: the history as of a block, and what the block was

What is kept is as of the end of a block, which never changes again: the cache names its last row and its checksum, and
counts only where the log has that block. It may be deleted at any time. Runs that have pipelines whose work arrives are
folded whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from rlmux.core.actions import ReportPolicyFault
from rlmux.core.errors import LogError
from rlmux.core.model import OrderId, PipelineId
from rlmux.log import value_codec
from rlmux.log.progress_rows import Report
from rlmux.report.slos import StepTime
from rlmux.report.timeline.history import History
from rlmux.report.timeline.records import OrderRecord, Pin, PipelineRecord, Standstill
from rlmux.report.timeline.step_work import StepWork

CACHE_NAME = ".status.cache"
_VERSION = 6
_KEPT_APART = {
    OrderRecord: {"chunks"},
    PipelineRecord: {"metrics", "rollouts", "deliveries"},
    Pin: set(),
    Standstill: set[str](),
}
"""Fields that a status does not need of each record, or that are kept beside it."""


class BlockEnd(NamedTuple):
    """The end of a block."""

    last_seq: int
    crc32: int
    """CRC-32 of the block's bytes."""


class CondensedHistory(History):
    """Fold entries in as into a `History`; `condense` at any time."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        super().__init__(header)
        self._past: dict[PipelineId, StepWork] = {}
        """What the orders that are gone did."""

    def condense(self) -> None:
        """Drop the orders before the first that is not over, and what no status shows."""
        num_over = next((at for at, order in enumerate(self.orders) if math.isinf(order.end_s)), len(self.orders))
        for order in self.orders[:num_over]:
            if order.pipeline in self.pipelines:
                self._past.setdefault(order.pipeline, StepWork()).add_whole_order(order, self.standstills)
        for work in self._past.values():
            work.forget_orders()
        del self.orders[:num_over]
        since_s = self.orders[0].start_s if self.orders else math.inf
        self.standstills = [standstill for standstill in self.standstills if standstill.end_s > since_s]
        self.pins = [pin for pin in self.pins if math.isinf(pin.end_s)]
        self.instants, self.decisions_s, self.down = [], [], []

    def step_times(self) -> dict[PipelineId, list[StepTime]]:
        """`summary.step_times` of the whole history's timeline."""
        work = {name: self._past[name].copy() if name in self._past else StepWork() for name in self.pipelines}
        for order in self.orders:
            if order.pipeline in work and math.isfinite(order.end_s):
                work[order.pipeline].add_whole_order(order, self.standstills)
        return {name: work[name].steps(record) for name, record in self.pipelines.items()}

    def _forget_steps_after(self, record: PipelineRecord, last_step: int) -> None:
        super()._forget_steps_after(record, last_step)
        if record.pipeline.id in self._past:
            self._past[record.pipeline.id].forget_steps_after(last_step)

    # ------------------------------------------------------------------ kept in a file

    def as_bytes(self, place: BlockEnd) -> bytes | None:
        """The condensed history; None for one with clients, whose announcements are not kept."""
        if self._arrivals:
            return None
        described = {
            "version": _VERSION,
            "run_id": self.header.get("run_id"),
            "place": place,
            "start_s": self.start_s,
            "last_s": self.last_s,
            "control_s": self.control_s,
            "alert_rules": self.alert_rules,
            "policy_faults": [asdict(fault) for fault in self.policy_faults],
            "first_order": self._first_order,
            "last_order": self._last_order,
            "orders": [_fields_of(order) for order in self.orders],
            "running": list(self._running),
            "pins": [_fields_of(pin) for pin in self.pins],
            "pipelines": [[_fields_of(record), list(record.metrics.items())] for record in self.pipelines.values()],
            "reports": [list(order.chunks) for order in self.orders],
            "standstills": [_fields_of(standstill) for standstill in self.standstills],
            "past": {name: work.as_json() for name, work in self._past.items()},
        }
        return zlib.compress(value_codec.dumps(described).encode(), 1)

    @classmethod
    def of_bytes(cls, header: Mapping[str, Any], data: bytes) -> tuple[CondensedHistory, BlockEnd]:
        """What `as_bytes` made. Raises LogError for anything else, and for the history of another run."""
        try:
            described = json.loads(zlib.decompress(data))
            if (described["version"], described["run_id"]) != (_VERSION, header.get("run_id")):
                raise LogError("the status of another run, or of another version")
            history = cls(header)
            history._take(described)
            return history, BlockEnd(*map(int, described["place"]))
        except (zlib.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise LogError(f"not a kept status: {error}") from None

    def _take(self, described: dict[str, Any]) -> None:
        for name in ("start_s", "last_s", "control_s", "alert_rules"):
            setattr(self, name, described[name])
        self.policy_faults = [ReportPolicyFault(**fault) for fault in described["policy_faults"]]
        self._first_order, self._last_order = described["first_order"], described["last_order"]
        for fields_of_one, metrics in described["pipelines"]:
            record: PipelineRecord = _record(PipelineRecord, fields_of_one)
            record.metrics = {step: {name: float(each) for name, each in found.items()} for step, found in metrics}
            self.pipelines[record.pipeline.id] = record
        self.orders = [_record(OrderRecord, each) for each in described["orders"]]
        for order, reports in zip(self.orders, described["reports"], strict=True):
            for report in reports:
                order.chunks.append(Report(*report))
        self.standstills = [_record(Standstill, each) for each in described["standstills"]]
        by_id = {order.id: order for order in self.orders}
        self._running = {OrderId(id): by_id[OrderId(id + self._first_order)] for id in described["running"]}
        self.pins = [_record(Pin, each) for each in described["pins"]]
        self._pin_by_pipeline = {pin.pipeline: pin for pin in self.pins}
        self._past = {PipelineId(name): StepWork.of_json(work) for name, work in described["past"].items()}


def kept_history(folder: Path, header: Mapping[str, Any]) -> tuple[CondensedHistory, BlockEnd] | None:
    """What was kept of this run; None where nothing was, or nothing that can be read."""
    with contextlib.suppress(OSError, LogError):
        return CondensedHistory.of_bytes(header, (folder / CACHE_NAME).read_bytes())
    return None


def keep(folder: Path, history: CondensedHistory, place: BlockEnd) -> None:
    """Keep a condensed history, where the folder allows it. Aside, then in place: a reader never meets half a file."""
    data = history.as_bytes(place)
    if data is None:
        return
    aside = folder / f"{CACHE_NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):
        try:
            aside.touch(mode=0o600)
            aside.write_bytes(data)
            aside.replace(folder / CACHE_NAME)
        finally:
            aside.unlink(missing_ok=True)


def _fields_of(record: Any) -> dict[str, Any]:
    without = _KEPT_APART[type(record)]
    return {each.name: getattr(record, each.name) for each in fields(record) if each.name not in without}


def _record(kind: Any, values: Mapping[str, Any]) -> Any:
    readers = _readers(kind)
    return kind(**{name: readers[name](value, f"{kind.__name__}.{name}") for name, value in values.items()})


@cache
def _readers(kind: Any) -> dict[str, value_codec.Reader]:
    hints = get_type_hints(kind)
    kept = [each.name for each in fields(kind) if each.name not in _KEPT_APART[kind]]
    return {name: value_codec.reader(hints[name]) for name in kept}

"""The timeline's addresses: where things lie, buckets and intervals in binary, a window's sums, one gap.

u32 length of the header │ header, JSON │ planes or columns, little endian, each from a multiple of 8 bytes on
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query
from starlette.responses import Response

from rlmux.core.model import OrderId, PipelineId
from rlmux.report.slos import StepTime
from rlmux.report.timeline.intervals import Cause, Kind, label_of
from rlmux.report.timeline.intervals import Interval as Timed
from rlmux.report.timeline.live_steps import PublishedStep
from rlmux.report.timeline.step_causes import steady, step_causes, tokens_of
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import SECONDS, Caller, Seconds
from rlmux.service.dashboard.router import Address, get
from rlmux.service.dashboard.schemas.timeline_schemas import (
    Gap,
    Interval,
    Life,
    LifeColumns,
    Measured,
    Order,
    Other,
    Pinned,
    Place,
    StepCauses,
    Timeline,
)
from rlmux.service.index.columns import CAUSES, KIND_BY_CAUSE, KINDS, NO_PIPELINE, NO_STAGE, STAGES, Array
from rlmux.service.index.interval_rows import charges
from rlmux.service.index.store import IndexReader
from rlmux.service.index.tiles import LEVELS, without_overlaps
from rlmux.service.problems import ProblemError

_ADDRESS = "/timeline/{lane}"
MAX_INTERVALS = 20_000
MAX_BUCKETS = 4096
MAX_OTHERS = 16
_COLUMNS = (
    ("start", "<f8"), ("seconds", "<f8"), ("device", "<u2"), ("pipeline", "<u2"), ("cause", "u1"), ("stage", "u1"),
    ("lane", "u1"), ("flags", "u1"), ("step", "<u4"), ("order", "<u4"), ("fraction", "<f4"),
)  # fmt: skip
_LOOK_AHEAD_S = (60.0, 600.0, 6000.0, math.inf)


Rev = Annotated[int | None, Query(ge=0, le=2**53)]
Devices = Annotated[list[Annotated[str, Query(max_length=512)]] | None, Query()]


class Binary(Response):
    """Buckets or columns."""

    media_type = "application/octet-stream"


class TimelineReads:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        return (
            get(_ADDRESS, self.timeline, "Where the timeline's devices, pipelines and levels are"),
            get(f"{_ADDRESS}/tiles", self.tiles, "What each device did in each bucket", answers=Binary),
            get(f"{_ADDRESS}/intervals", self.intervals, "Every interval, as columns", answers=Binary),
            get(f"{_ADDRESS}/measure", self.measure, "Where a window's seconds went"),
            get(f"{_ADDRESS}/gap", self.gap, "One moment of a device"),
            get("/pipelines/{lane}/{name}/causes", self.causes, "Where the seconds of its last steps went"),
        )

    def timeline(self, caller: Caller, lane: str, lives: Literal["rows", "columns"] = "rows") -> Timeline:
        """`lives`: one object a pipeline, or columns, which a thousand pipelines need."""
        with self._reads.open(lane, caller.principal) as reader:
            facts = reader.facts
            found = _lives(reader)
            (num,) = reader.rows("SELECT count(*) FROM chunk")[0]
            devices = reader.rows("SELECT json FROM device ORDER BY place")
            return Timeline(
                lane=lane,
                start_s=facts["start_s"],
                end_s=facts["end_s"],
                is_over=facts["lane"]["is_over"],
                is_going_on=facts["is_going_on"],
                created=facts["lane"]["created"],
                devices=[Place.model_validate_json(text) for (text,) in devices],
                pipelines=facts["pipelines"],
                lives=found if lives == "rows" else None,
                life_columns=_life_columns(found) if lives == "columns" else None,
                **_names(),
                rev=facts["rev"],
                seq=reader.seq,
                open_from=facts["open_from_s"],
                bucket_s=list(LEVELS),
                num_intervals=reader.count_intervals(-math.inf, math.inf) if num else 0,
                max_intervals=MAX_INTERVALS,
                max_buckets=MAX_BUCKETS,
            )

    def tiles(
        self,
        caller: Caller,
        lane: str,
        t0: Seconds = None,
        t1: Seconds = None,
        rev: Rev = None,
        level: Annotated[int, Query(ge=0, le=len(LEVELS) - 1)] = 0,
    ) -> Binary:
        with self._reads.open(lane, caller.principal) as reader:
            start_s, end_s = _window(t0, t1, reader)
            width_s = LEVELS[level]
            first, last = math.floor(start_s / width_s), math.ceil(end_s / width_s)
            num = max(1, last - first)
            if num > MAX_BUCKETS:
                raise ProblemError(
                    413, f"{num} buckets", where="?level", accepted=f"level={_level_for(start_s, end_s)} or above"
                )
            planes = reader.planes(level, first, num)
            header = {
                **_header(reader, start_s, end_s),
                "level": level,
                "bucket_s": width_s,
                "first_bucket": first,
                "num_buckets": num,
                "num_devices": planes.busy.shape[0],
            }
            return _binary(_packed(header, planes.to_bytes()), rev, reader, last * width_s)

    def intervals(
        self,
        caller: Caller,
        lane: str,
        t0: Seconds = None,
        t1: Seconds = None,
        rev: Rev = None,
        device: Devices = None,
    ) -> Binary:
        with self._reads.open(lane, caller.principal) as reader:
            start_s, end_s = _window(t0, t1, reader)
            found = _of_devices(reader.intervals(start_s, end_s), device, reader)
            if len(found) > MAX_INTERVALS:
                raise ProblemError(
                    413,
                    f"{len(found)} intervals",
                    where="?t1",
                    accepted=f"at most {MAX_INTERVALS}; tiles of level={_level_for(start_s, end_s)}",
                )
            columns, data = _columns(found)
            header = {**_header(reader, start_s, end_s), **_names(), "count": len(found), "columns": columns}
            return _binary(_packed(header, data), rev, reader, end_s)

    def measure(
        self,
        caller: Caller,
        lane: str,
        t0: Seconds = None,
        t1: Seconds = None,
        rev: Rev = None,
        device: Devices = None,
    ) -> Measured:
        with self._reads.open(lane, caller.principal) as reader:
            start_s, end_s = _window(t0, t1, reader)
            found = without_overlaps(_of_devices(reader.intervals(start_s, end_s), device, reader))
            items = charges(_sums(found, start_s, end_s, reader.facts["pipelines"]))
            device_s = math.fsum(float(item["seconds"]) for item in items)
            measured = {"t0": start_s, "t1": end_s, "device_s": device_s, "items": items, "as_of_seq": reader.seq}
            return Measured.model_validate(measured)

    def causes(
        self, caller: Caller, lane: str, name: str, steps: Annotated[int, Query(ge=1, le=1000)] = 20
    ) -> StepCauses:
        """Of the pipeline's last steps, without its first."""
        with self._reads.open(lane, caller.principal) as reader:
            self._reads.check_pipeline(reader, name)
            query = "SELECT json FROM step WHERE pipeline = ? AND json IS NOT NULL ORDER BY step DESC LIMIT ?"
            newest = [json.loads(text) for (text,) in reversed(reader.rows(query, name, steps + 1))]
            published, found = steady([_published(row) for row in newest]), None
            if published:
                window = published[0].time.end_s - published[0].time.seconds, published[-1].time.end_s
                placed = _placed(reader.intervals(*window), name, reader)
                tokens = tokens_of({row["step"]: row["metrics"] for row in newest})
                found = step_causes(PipelineId(name), published, placed, tokens)
            nothing = {"first_step": None, "last_step": None, "num_steps": 0, "step_s": None, "alone_s": None}
            fields = {**nothing, "slowdown": None, "causes": []} if found is None else found.as_json()
            return StepCauses.model_validate({**fields, "as_of_seq": reader.seq})

    # ------------------------------------------------------------------ one moment of one device

    def gap(
        self,
        caller: Caller,
        lane: str,
        device: Annotated[str, Query(max_length=512, description="an id of a device")],
        t: Annotated[float, SECONDS],
    ) -> Gap:
        with self._reads.open(lane, caller.principal) as reader:
            at_s, devices = t, reader.facts["devices"]
            place = _device(device, reader)
            here = reader.intervals(at_s, np.nextafter(at_s, math.inf))
            mine = here[here["device"] == place]
            if not len(mine):
                raise ProblemError(404, f"nothing is known of {at_s} s", where="?t", accepted=_span(reader))
            picked = mine[0]
            start_s, end_s = float(picked["start_s"]), float(picked["end_s"])
            moment = _Moment(reader, at_s, here)
            node = devices[place].rpartition(".")[0]
            others, num_others = ([], 0) if KINDS[picked["kind"]] is Kind.BUSY else moment.others(node)
            return Gap(
                interval=_shown(picked, devices[place], reader),
                before=_last_order(reader, place, start_s),
                after=moment.ahead.first(lambda records: records["device"] == place),
                pinned=[moment.pinned(name) for name, nodes in moment.held if node in nodes],
                others=others,
                num_others=num_others,
                ends_s=end_s,
                as_of_seq=reader.seq,
            )


class _Moment:
    """What each pipeline did at one time."""

    def __init__(self, reader: IndexReader, at_s: float, here: Array) -> None:
        """`here`: the intervals of that time."""
        self._reader, self._at_s, self._here = reader, at_s, here
        self.ahead = _Ahead(reader, at_s)
        query = "SELECT pipeline, nodes FROM pin WHERE start_s <= ? AND end_s > ? ORDER BY number"
        self.held = [(str(name), json.loads(nodes)) for name, nodes in reader.rows(query, at_s, at_s)]

    def pinned(self, name: str) -> Pinned:
        place = _pipeline(name, self._reader)
        return Pinned(
            pipeline=name,
            doing=self.ahead.whole(self._here["order"][self._here["pipeline"] == place]),
            next=self.ahead.first(lambda records: records["pipeline"] == place),
        )

    def others(self, node: str) -> tuple[list[Other], int]:
        """The first pipelines that could have run on the node and were not pinned there, and how many there are."""
        beside, queued = self._beside(node), self._queued()
        pinned = [
            Other(**dict(self.pinned(name)), nodes=nodes, submitted_s=None, admitted_s=None)
            for name, nodes in beside[:MAX_OTHERS]
        ]
        return [*pinned, *queued][:MAX_OTHERS], len(beside) + len(queued)

    def _beside(self, node: str) -> list[tuple[str, list[str]]]:
        """The pipelines that are pinned in the node's pool but not on the node, each with its nodes of the pool."""
        places = [json.loads(text) for (text,) in self._reader.rows("SELECT json FROM device")]
        pool = next(place["pool"] for place in places if place["node"] == node)
        in_pool = {place["node"] for place in places if place["pool"] == pool}
        own = [(name, [each for each in nodes if each in in_pool]) for name, nodes in self.held if node not in nodes]
        return [(name, nodes) for name, nodes in own if nodes]

    def _queued(self) -> list[Other]:
        """The pipelines that were submitted and not admitted, by time of submission."""
        found = self._reader.rows(
            "SELECT * FROM (SELECT name, json_extract(json, '$.submitted_s') AS submitted_s,"
            " json_extract(json, '$.admitted_s') AS admitted_s, json_extract(json, '$.ended_s') AS ended_s, place"
            " FROM pipeline) WHERE submitted_s <= ?1 AND coalesce(admitted_s, ended_s, 9e999) > ?1"
            " ORDER BY submitted_s, place",
            self._at_s,
        )
        return [
            Other(pipeline=name, doing=[], next=None, nodes=[], submitted_s=submitted_s, admitted_s=admitted_s)
            for name, submitted_s, admitted_s, *_ in found
        ]


def _lives(reader: IndexReader) -> list[Life | None]:
    paths = "'$.project', '$.admitted_s', '$.ended_s', '$.reward_last'"
    found: dict[int, Life] = {}
    for place, text in reader.rows(f"SELECT place, json_extract(json, {paths}) FROM pipeline"):
        project, begun_s, ended_s, reward = json.loads(text)
        found[place] = Life(project=project, begun_s=begun_s, ended_s=ended_s, has_rewards=reward is not None)
    return [found.get(place) for place in range(len(reader.facts["pipelines"]))]


def _life_columns(lives: Sequence[Life | None]) -> LifeColumns:
    projects = sorted({life.project for life in lives if life})
    place_by_project = {name: place for place, name in enumerate(projects)}
    begun = [None if life is None else _ms(life.begun_s) for life in lives]
    ended = [None if life is None else _ms(life.ended_s) for life in lives]
    return LifeColumns(
        projects=projects,
        project=[-1 if life is None else place_by_project[life.project] for life in lives],
        begun_ms=begun,
        lasted_ms=[None if end is None else end - (begin or 0) for begin, end in zip(begun, ended, strict=True)],
        has_no_rewards=[place for place, life in enumerate(lives) if life and not life.has_rewards],
    )


def _ms(at_s: float | None) -> int | None:
    return None if at_s is None else round(at_s * 1000)


def _published(row: Mapping[str, Any]) -> PublishedStep:
    """A step of the index."""
    time = StepTime(row["step"], row["end_s"], row["seconds"], row["solo_s"])
    return PublishedStep(time, {stage: float(spent_s) for stage, spent_s in row["stages"].items()})


def _placed(records: Array, name: str, reader: IndexReader) -> list[tuple[int, Timed]]:
    """Intervals of the devices that a pipeline had orders on, each with its device."""
    pipelines = reader.facts["pipelines"]
    own = (records["pipeline"] == _pipeline(name, reader)) & (records["order"] > 0)
    return [
        (
            int(record["device"]),
            Timed(
                start_s=float(record["start_s"]),
                end_s=float(record["end_s"]),
                kind=KINDS[record["kind"]],
                cause=CAUSES[record["cause"]],
                pipeline=_name(record["pipeline"], pipelines),
                step=int(record["step"]),
                stage=STAGES[record["stage"]] if record["stage"] != NO_STAGE else None,
                order=OrderId(int(record["order"])) if record["order"] else None,
            ),
        )
        for record in records[np.isin(records["device"], np.unique(records["device"][own]))]
    ]


class _Ahead:
    """Looks at the orders from a time on, as far ahead as it takes."""

    def __init__(self, reader: IndexReader, at_s: float) -> None:
        self._reader = reader
        self._at_s = at_s
        self._seen: dict[float, Array] = {}

    def first(self, is_wanted: Any) -> Order | None:
        """The first order to begin after the time."""
        for ahead_s in _LOOK_AHEAD_S:
            records = self._records(ahead_s)
            found = records[(records["start_s"] > self._at_s) & is_wanted(records)]
            if len(found):
                return self.whole(found["order"][[np.argmin(found["start_s"])]])[0]
        return None

    def whole(self, orders: Array) -> list[Order]:
        """These orders, to their ends; 0 is none."""
        for ahead_s in _LOOK_AHEAD_S:
            records = self._records(ahead_s)
            found = records[np.isin(records["order"], orders)]
            if not orders.any() or (len(found) and found["end_s"].max() < self._at_s + ahead_s):
                break
        return _orders(found, self._reader)

    def _records(self, ahead_s: float) -> Array:
        if ahead_s not in self._seen:
            records = self._reader.intervals(self._at_s, self._at_s + ahead_s)
            self._seen[ahead_s] = records[records["order"] > 0]
        return self._seen[ahead_s]


def _last_order(reader: IndexReader, device: int, before_s: float) -> Order | None:
    for behind_s in _LOOK_AHEAD_S:
        records = reader.intervals(before_s - behind_s, before_s)
        found = records[(records["device"] == device) & (records["order"] > 0)]
        if len(found):
            return _orders(records[records["order"] == found[-1]["order"]], reader)[0]
    return None


def _orders(records: Array, reader: IndexReader) -> list[Order]:
    """The orders that these intervals are of, by their start, from the first to the last of what is given."""
    devices, pipelines = reader.facts["devices"], reader.facts["pipelines"]
    found = []
    for order in dict.fromkeys(records["order"][records["order"] > 0].tolist()):
        own = records[records["order"] == order]
        first = own[0]
        is_open = bool((own["flags"] & 1).any())
        found.append(
            Order(
                order=order,
                pipeline=pipelines[first["pipeline"]],
                step=int(first["step"]),
                stage=STAGES[first["stage"]].value if first["stage"] != NO_STAGE else None,
                start_s=float(own["start_s"].min()),
                end_s=None if is_open else float(own["end_s"].max()),
                devices=[devices[place] for place in dict.fromkeys(own["device"].tolist())],
            )
        )
    return sorted(found, key=lambda interval: interval.start_s)


def _shown(record: Any, device: str, reader: IndexReader) -> Interval:
    cause, name = CAUSES[record["cause"]], _name(record["pipeline"], reader.facts["pipelines"])
    return Interval(
        device=device,
        start_s=float(record["start_s"]),
        end_s=float(record["end_s"]),
        kind=KINDS[record["kind"]].value,
        cause=cause.value,
        pipeline=name,
        label=label_of(cause, name),
        is_open=bool(record["flags"] & 1),
    )


def _sums(records: Array, start_s: float, end_s: float, pipelines: Sequence[str]) -> list[Any]:
    """Seconds by name within a window."""
    lasted = np.minimum(records["end_s"], end_s) - np.maximum(records["start_s"], start_s)
    key = (records["kind"].astype(np.int64) << 32) | (records["cause"].astype(np.int64) << 16) | records["pipeline"]
    keys, place = np.unique(key, return_inverse=True)
    sums = np.bincount(place, lasted, len(keys)) if len(keys) else np.zeros(0)
    named = []
    for code, spent_s in zip(keys.tolist(), sums, strict=True):
        cause = CAUSES[code >> 16 & 0xFFFF]
        name = None if cause is Cause.CONTROL else _name(code & 0xFFFF, pipelines)
        named.append(((KINDS[code >> 32], cause, name), float(spent_s)))
    return named


def _name(place: int, pipelines: Sequence[str]) -> PipelineId | None:
    return None if place == NO_PIPELINE else PipelineId(pipelines[place])


def _pipeline(name: str, reader: IndexReader) -> int:
    pipelines = reader.facts["pipelines"]
    return pipelines.index(name) if name in pipelines else -1


def _device(device: str, reader: IndexReader) -> int:
    devices: list[str] = reader.facts["devices"]
    if device not in devices:
        raise ProblemError(404, f"no device {device[:80]!r}", where="?device", accepted=", ".join(devices[:20]))
    return devices.index(device)


def _of_devices(records: Array, devices: Sequence[str] | None, reader: IndexReader) -> Array:
    if devices is None:
        return records
    return records[np.isin(records["device"], [_device(device, reader) for device in devices])]


def _window(t0: float | None, t1: float | None, reader: IndexReader) -> tuple[float, float]:
    """The requested window; by default the whole run."""
    start_s = reader.facts["start_s"] if t0 is None else t0
    end_s = reader.facts["end_s"] if t1 is None else t1
    if end_s < start_s:
        raise ProblemError(400, "t1 is before t0", where="?t1", accepted=f"{start_s} or more")
    return start_s, end_s


def _span(reader: IndexReader) -> str:
    return f"{reader.facts['start_s']} to {reader.facts['end_s']}"


def _level_for(start_s: float, end_s: float) -> int:
    """The finest level with at most two thousand buckets."""
    return next((level for level, width_s in enumerate(LEVELS) if end_s - start_s <= 2000 * width_s), len(LEVELS) - 1)


def _names() -> dict[str, Any]:
    """The lists that numbers of causes, kinds and stages are places in."""
    return {
        "causes": [cause.value for cause in CAUSES],
        "kinds": [kind.value for kind in KINDS],
        "kind_by_cause": [KINDS.index(KIND_BY_CAUSE[cause]) for cause in CAUSES],
        "stages": [stage.value for stage in STAGES],
    }


def _header(reader: IndexReader, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "t0": start_s,
        "t1": end_s,
        "devices": reader.facts["devices"],
        "pipelines": reader.facts["pipelines"],
        "causes": [cause.value for cause in CAUSES],
        "rev": reader.facts["rev"],
        "seq": reader.seq,
        "open_from": reader.facts["open_from_s"],
    }


def _columns(found: Array) -> tuple[list[dict[str, Any]], bytes]:
    values: dict[str, Array] = {name: found[name] for name in found.dtype.names or ()}
    values |= {"start": found["start_s"], "seconds": found["end_s"] - found["start_s"]}
    described, parts, offset = [], [], 0
    for name, kind in _COLUMNS:
        data = np.ascontiguousarray(values[name], kind).tobytes()
        data += b"\0" * (-len(data) % 8)
        described.append({"name": name, "type": f"{kind.lstrip('<')[0]}{8 * int(kind[-1])}", "offset": offset})
        parts.append(data)
        offset += len(data)
    return described, b"".join(parts)


def _packed(header: Mapping[str, Any], data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return struct.pack("<I", len(text)) + text + data


def _binary(data: bytes, rev: int | None, reader: IndexReader, until_s: float) -> Binary:
    """The response, cached forever if its URL can never have another one."""
    open_from_s = reader.facts["open_from_s"]
    is_settled = open_from_s is None or until_s <= open_from_s
    is_final = is_settled and reader.is_whole and rev == reader.facts["rev"]
    return Binary(data, headers={"Cache-Control": "private, max-age=31536000, immutable"} if is_final else None)

"""The timeline's addresses: where things lie, buckets and intervals in binary, a window's sums, one gap.

u32 length of the header │ header, JSON │ planes or columns, little endian, each from a multiple of 8 bytes on
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmux.core.model import PipelineId
from rlmux.report.intervals import Cause, label_of
from rlmux.service.dashboard.door import Address, Asked, Told, get
from rlmux.service.dashboard.parameters import line, seconds, whole
from rlmux.service.dashboard.problems import ProblemError
from rlmux.service.dashboard.reads import Reads
from rlmux.service.index.columns import CAUSES, KIND_BY_CAUSE, KINDS, NO_PIPELINE, NO_STAGE, STAGES, Array
from rlmux.service.index.rows import charges
from rlmux.service.index.store import IndexReader
from rlmux.service.index.tiles import LEVELS, without_overlaps

_ADDRESS = "/timeline/{lane}"
MAX_INTERVALS = 20_000
MAX_BUCKETS = 4096
_BINARY = "application/octet-stream"
_COLUMNS = (
    ("start", "<f8"), ("seconds", "<f8"), ("device", "<u2"), ("pipeline", "<u2"), ("cause", "u1"), ("stage", "u1"),
    ("lane", "u1"), ("flags", "u1"), ("step", "<u4"), ("order", "<u4"), ("fraction", "<f4"),
)  # fmt: skip
_LOOK_AHEAD_S = (60.0, 600.0, 6000.0, math.inf)


class TimelineReads:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        window = {"t0": seconds, "t1": seconds, "rev": whole(0, 2**53)}
        return (
            get(_ADDRESS, self.timeline),
            get(f"{_ADDRESS}/tiles", self.tiles, {**window, "level": whole(0, len(LEVELS) - 1)}),
            get(f"{_ADDRESS}/intervals", self.intervals, {**window, "device": line}, lists=("device",)),
            get(f"{_ADDRESS}/measure", self.measure, {**window, "device": line}, lists=("device",)),
            get(f"{_ADDRESS}/gap", self.gap, {"device": line, "t": seconds}, lists=("device",)),
        )

    def timeline(self, asked: Asked) -> Any:
        with self._reads.open(asked.path["lane"], asked.who) as reader:
            facts = reader.facts
            (num,) = reader.rows("SELECT count(*) FROM chunk")[0]
            return {
                "lane": asked.path["lane"],
                "start_s": facts["start_s"],
                "end_s": facts["end_s"],
                "is_over": facts["lane"]["is_over"],
                "is_going_on": facts["is_going_on"],
                "created": facts["lane"]["created"],
                "devices": [
                    {key: row[key] for key in ("id", "pool", "node")}
                    for (text,) in reader.rows("SELECT json FROM device ORDER BY place")
                    for row in [json.loads(text)]
                ],
                "pipelines": facts["pipelines"],
                **_names(),
                "rev": facts["rev"],
                "seq": reader.seq,
                "open_from": facts["open_from_s"],
                "bucket_s": LEVELS,
                "num_intervals": reader.count_intervals(-math.inf, math.inf) if num else 0,
                "max_intervals": MAX_INTERVALS,
                "max_buckets": MAX_BUCKETS,
            }

    def tiles(self, asked: Asked) -> Any:
        query, level = asked.query, asked.query.get("level", 0)
        with self._reads.open(asked.path["lane"], asked.who) as reader:
            start_s, end_s = _window(query, reader)
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
            return _told(_packed(header, planes.to_bytes()), asked, reader, last * width_s)

    def intervals(self, asked: Asked) -> Any:
        query = asked.query
        with self._reads.open(asked.path["lane"], asked.who) as reader:
            start_s, end_s = _window(query, reader)
            found = _of_devices(reader.intervals(start_s, end_s), query.get("device"), reader)
            if len(found) > MAX_INTERVALS:
                raise ProblemError(
                    413,
                    f"{len(found)} intervals",
                    where="?t1",
                    accepted=f"at most {MAX_INTERVALS}; tiles of level={_level_for(start_s, end_s)}",
                )
            columns, data = _columns(found)
            header = {**_header(reader, start_s, end_s), **_names(), "count": len(found), "columns": columns}
            return _told(_packed(header, data), asked, reader, end_s)

    def measure(self, asked: Asked) -> Any:
        with self._reads.open(asked.path["lane"], asked.who) as reader:
            start_s, end_s = _window(asked.query, reader)
            found = without_overlaps(_of_devices(reader.intervals(start_s, end_s), asked.query.get("device"), reader))
            items = charges(_sums(found, start_s, end_s, reader.facts["pipelines"]))
            device_s = math.fsum(float(item["seconds"]) for item in items)
            return {"t0": start_s, "t1": end_s, "device_s": device_s, "items": items, "as_of_seq": reader.seq}

    # ------------------------------------------------------------------ one moment of one device

    def gap(self, asked: Asked) -> Any:
        query = asked.query
        if "device" not in query or "t" not in query:
            raise ProblemError(400, "device and t are needed", where="?device&t", accepted="an id and seconds")
        with self._reads.open(asked.path["lane"], asked.who) as reader:
            at_s, devices = query["t"], reader.facts["devices"]
            place = _device(query["device"][0], reader)
            here = reader.intervals(at_s, np.nextafter(at_s, math.inf))
            mine = here[here["device"] == place]
            if not len(mine):
                raise ProblemError(404, f"nothing is known of {at_s} s", where="?t", accepted=_span(reader))
            one = mine[0]
            start_s, end_s = float(one["start_s"]), float(one["end_s"])
            held = [
                (str(pipeline), json.loads(nodes))
                for pipeline, nodes in reader.rows(
                    "SELECT pipeline, nodes FROM pin WHERE start_s <= ? AND end_s > ? ORDER BY number", at_s, at_s
                )
            ]
            node = devices[place].rpartition(".")[0]
            ahead = _Ahead(reader, at_s)
            return {
                "interval": {"device": devices[place], **_shown(one, reader)},
                "before": _last_order(reader, place, start_s),
                "after": ahead.first(lambda records: records["device"] == place),
                "pinned": [
                    {
                        "pipeline": name,
                        "doing": _orders(here[here["pipeline"] == _pipeline(name, reader)], reader),
                        "next": ahead.first(lambda records, name=name: records["pipeline"] == _pipeline(name, reader)),
                    }
                    for name, nodes in held
                    if node in nodes
                ],
                "ends_s": end_s,
                "as_of_seq": reader.seq,
            }


class _Ahead:
    """Looks for orders that begin after a time, as far ahead as it takes."""

    def __init__(self, reader: IndexReader, at_s: float) -> None:
        self._reader = reader
        self._at_s = at_s
        self._seen: dict[float, Array] = {}

    def first(self, is_wanted: Any) -> dict[str, Any] | None:
        for ahead_s in _LOOK_AHEAD_S:
            if ahead_s not in self._seen:
                records = self._reader.intervals(self._at_s, self._at_s + ahead_s)
                self._seen[ahead_s] = records[(records["start_s"] > self._at_s) & (records["order"] > 0)]
            records = self._seen[ahead_s]
            found = records[is_wanted(records)]
            if len(found):
                order = found[np.argmin(found["start_s"])]["order"]
                return _orders(records[records["order"] == order], self._reader)[0]
        return None


def _last_order(reader: IndexReader, device: int, before_s: float) -> dict[str, Any] | None:
    for behind_s in _LOOK_AHEAD_S:
        records = reader.intervals(before_s - behind_s, before_s)
        found = records[(records["device"] == device) & (records["order"] > 0)]
        if len(found):
            return _orders(records[records["order"] == found[-1]["order"]], reader)[0]
    return None


def _orders(records: Array, reader: IndexReader) -> list[dict[str, Any]]:
    """The orders that these intervals are of, by their start, from the first to the last of what is given."""
    devices, pipelines = reader.facts["devices"], reader.facts["pipelines"]
    found = []
    for order in dict.fromkeys(records["order"][records["order"] > 0].tolist()):
        own = records[records["order"] == order]
        first = own[0]
        is_open = bool((own["flags"] & 1).any())
        found.append(
            {
                "order": order,
                "pipeline": pipelines[first["pipeline"]],
                "step": int(first["step"]),
                "stage": STAGES[first["stage"]].value if first["stage"] != NO_STAGE else None,
                "start_s": float(own["start_s"].min()),
                "end_s": None if is_open else float(own["end_s"].max()),
                "devices": [devices[place] for place in dict.fromkeys(own["device"].tolist())],
            }
        )
    return sorted(found, key=lambda one: one["start_s"])


def _shown(record: Any, reader: IndexReader) -> dict[str, Any]:
    cause, name = CAUSES[record["cause"]], _name(record["pipeline"], reader.facts["pipelines"])
    return {
        "start_s": float(record["start_s"]),
        "end_s": float(record["end_s"]),
        "kind": KINDS[record["kind"]].value,
        "cause": cause.value,
        "pipeline": name,
        "label": label_of(cause, name),
        "is_open": bool(record["flags"] & 1),
    }


def _sums(records: Array, start_s: float, end_s: float, pipelines: Sequence[str]) -> list[Any]:
    """Seconds by name within a window."""
    lasted = np.minimum(records["end_s"], end_s) - np.maximum(records["start_s"], start_s)
    key = (records["kind"].astype(np.int64) << 32) | (records["cause"].astype(np.int64) << 16) | records["pipeline"]
    keys, place = np.unique(key, return_inverse=True)
    sums = np.bincount(place, lasted, len(keys)) if len(keys) else np.zeros(0)
    named = []
    for one, spent_s in zip(keys.tolist(), sums, strict=True):
        cause = CAUSES[one >> 16 & 0xFFFF]
        name = None if cause is Cause.CONTROL else _name(one & 0xFFFF, pipelines)
        named.append(((KINDS[one >> 32], cause, name), float(spent_s)))
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


def _window(query: Mapping[str, Any], reader: IndexReader) -> tuple[float, float]:
    """The time that is asked for; the whole run by default."""
    start_s, end_s = query.get("t0", reader.facts["start_s"]), query.get("t1", reader.facts["end_s"])
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


def _told(data: bytes, asked: Asked, reader: IndexReader, until_s: float) -> Told:
    open_from_s = reader.facts["open_from_s"]
    is_settled = open_from_s is None or until_s <= open_from_s
    is_final = is_settled and reader.is_whole and asked.query.get("rev") == reader.facts["rev"]
    return Told(value=data, media_type=_BINARY, is_final=is_final)

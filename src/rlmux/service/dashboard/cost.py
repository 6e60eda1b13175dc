"""A lane's cost over time, compared with exclusive devices per pipeline and with busy time only.

    paid       nodes that a pipeline is pinned to, each once
    alone      the nodes that each pipeline is pinned to, once for each of them: the price without sharing
    computing  the busy part of the devices: with devices that are never idle the same work costs no less

Each is a mean over a bucket of the index's tiles, in dollars an hour; in devices if no pool has a price.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Query

from rlmux.core.errors import UserError
from rlmux.report.usage import UsageSums, window_of
from rlmux.service.dashboard.auth.access import SERVER
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import Caller, Filters
from rlmux.service.dashboard.router import Address, get
from rlmux.service.dashboard.schemas.run_schemas import Cost, Group, GroupList, Sums
from rlmux.service.dashboard.schemas.usage_schemas import UsageOfTime
from rlmux.service.index.columns import Array
from rlmux.service.index.groups import DAY, GroupSums, add_usage
from rlmux.service.index.selection import FILTERS
from rlmux.service.index.store import IndexReader
from rlmux.service.index.tiles import LEVELS
from rlmux.service.problems import ProblemError

MOST_BUCKETS = 480
MOST_GROUPS = 200
_KEYS = (*FILTERS, DAY)
GroupBy = Annotated[str, Query(pattern=f"^({'|'.join(_KEYS)})$", description=", ".join(_KEYS))]


class CostReads:
    """The handlers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def addresses(self) -> tuple[Address, ...]:
        return (
            get("/lanes/{lane}/cost", self.cost, "What the lane cost over time, and would have cost"),
            get("/usage", self.usage, "What a stretch of time took of all lanes' devices: hours and dollars"),
            get("/pipelines/groups", self.groups, "Sums of groups of pipelines: figures, device time, dollars"),
        )

    def groups(self, caller: Caller, filters: Filters, by: GroupBy = "project") -> GroupList:
        """Sums over all pipelines that match, of what the caller may see."""
        selection, sums, seqs, is_priced = filters.selection(), GroupSums(by), [], False
        for lane, reader in self._reads.readers(filters.lane, caller.principal):
            matching, _ = selection.select(self._reads.rows_of(lane, reader))
            nodes, has_prices = _nodes(reader)
            prices = np.array([nodes[node][0] if has_prices else 0.0 for node in _nodes_of_devices(reader)])
            sums.add(matching, reader, prices)
            seqs.append(reader.seq)
            is_priced = is_priced or has_prices
        items = [Group(**its.to_json(key, is_priced=is_priced)) for key, its in sums.items()]
        return GroupList(
            by=by,
            items=items[:MOST_GROUPS],
            total=Group(**sums.total.to_json("", is_priced=is_priced)),
            num_more=max(0, len(items) - MOST_GROUPS),
            other_hours=float(sums.others.seconds.sum()) / 3600.0,
            as_of_seq=seqs[0] if len(seqs) == 1 else None,
        )

    def usage(
        self,
        caller: Caller,
        since: Annotated[str, Query(max_length=64, description="a period such as 30d, a date, or an ISO time")] = "30d",
        until: Annotated[str | None, Query(max_length=64)] = None,
    ) -> UsageOfTime:
        """Of every lane with an index. Pipelines that the caller may not see have no project and no user."""
        try:
            sums = UsageSums(window_of(since, until, time.time()))
        except UserError as error:
            raise ProblemError(400, str(error), where="?since", accepted="a period such as 30d, or a date") from None
        for lane, reader in self._reads.readers(None, caller.principal):
            nodes, has_prices = _nodes(reader)
            prices = np.array([nodes[node][0] if has_prices else 0.0 for node in _nodes_of_devices(reader)])
            add_usage(sums, lane, self._reads.rows_of(lane, reader), reader, prices)
        return UsageOfTime.model_validate(sums.to_json())

    def cost(self, lane: str) -> Cost:
        """All pipelines count, since none is named.

        `sums`: of the whole run, in dollars or device-hours. A pipeline's time alone is its time divided by its mean
        slowdown.
        """
        with self._reads.open(lane, SERVER) as reader:
            start_s, end_s = float(reader.facts["start_s"]), float(reader.facts["end_s"])
            edges_s, level, first = _edges(start_s, end_s)
            nodes, is_priced = _nodes(reader)
            found = reader.rows("SELECT pipeline, nodes, start_s, end_s FROM pin ORDER BY number")
            pins = [
                NodeHold(pipeline, json.loads(names), float(begin_s), min(float(over_s), end_s))
                for pipeline, names, begin_s, over_s in found
            ]
            slowdowns = _slowdowns(reader)
            busy = reader.planes(level, first, len(edges_s) - 1).busy / 255.0
            prices = np.array([nodes[node][0] for node in _nodes_of_devices(reader)])
            widths_s = np.diff(np.clip(edges_s, start_s, end_s))
            bucket_s = LEVELS[level]
            series = {
                "paid": _mean(_merged(pins, nodes), edges_s, widths_s),
                "alone": _mean(_each(pins, nodes), edges_s, widths_s),
                "computing": np.divide(
                    prices @ busy * bucket_s, widths_s, out=np.zeros(len(widths_s)), where=widths_s > 0
                ),
            }
            alone = sum(
                price * (over_s - begin_s) / slowdowns.get(pin.pipeline, 1.0) / 3600.0
                for pin in pins
                for begin_s, over_s, price in _each([pin], nodes)
            )
            sums = {name: float(values @ widths_s) / 3600.0 for name, values in series.items()}
            return Cost(
                unit="usd_per_hour" if is_priced else "devices",
                x=np.clip(edges_s[1:], start_s, end_s).tolist(),
                **{name: values.tolist() for name, values in series.items()},
                sums=Sums(**{**sums, "alone": alone}),
                as_of_seq=reader.seq,
            )


class NodeHold(NamedTuple):
    """A pipeline's nodes and the interval in which it held them."""

    pipeline: str
    nodes: Sequence[str]
    begin_s: float
    over_s: float


Held = tuple[float, float, float]
"""Begin and end in seconds, and price per hour, of a held node."""


def _edges(start_s: float, end_s: float) -> tuple[Array, int, int]:
    """Edges of the buckets that overlap a run, their level and the first number."""
    for level, width_s in enumerate(LEVELS):
        first, last = math.floor(start_s / width_s), max(math.ceil(end_s / width_s), math.floor(start_s / width_s) + 1)
        if last - first <= MOST_BUCKETS or level + 1 == len(LEVELS):
            return np.arange(first, last + 1) * width_s, level, first
    raise AssertionError("there is a level")


def _nodes(reader: IndexReader) -> tuple[dict[str, tuple[float, float]], bool]:
    """(price per device, per node) by node, and whether prices are dollars; else each device costs 1."""
    pools: Mapping[str, Any] = reader.facts["lane"]["pools"]
    usd = {name: float(pool.get("usd_per_node_hour") or 0.0) for name, pool in pools.items()}
    is_priced = any(usd.values())
    names = _nodes_of_devices(reader)
    num = {name: names.count(name) for name in names}
    whole = {name: usd.get(_pool_of(name), 0.0) if is_priced else float(num[name]) for name in num}
    return {name: (whole[name] / num[name], whole[name]) for name in num}, is_priced


def _nodes_of_devices(reader: IndexReader) -> list[str]:
    return [str(json.loads(text)["node"]) for (text,) in reader.rows("SELECT json FROM device ORDER BY place")]


def _pool_of(node: str) -> str:
    return node.rpartition("-")[0]


def _slowdowns(reader: IndexReader) -> dict[str, float]:
    """Mean step slowdown of each pipeline with a finished step, at least 1."""
    rows = (json.loads(text) for (text,) in reader.rows("SELECT json FROM pipeline"))
    return {row["name"]: max(1.0, row["step_slowdown"]) for row in rows if row["step_slowdown"] is not None}


def _each(pins: Iterable[NodeHold], nodes: Mapping[str, tuple[float, float]]) -> list[Held]:
    """Each node, once per pinned pipeline."""
    return [(pin.begin_s, pin.over_s, nodes[node][1]) for pin in pins for node in pin.nodes if node in nodes]


def _merged(pins: Iterable[NodeHold], nodes: Mapping[str, tuple[float, float]]) -> list[Held]:
    """Each node, once while any pipeline is pinned to it."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for pin in pins:
        for node in pin.nodes:
            spans.setdefault(node, []).append((pin.begin_s, pin.over_s))
    merged: list[Held] = []
    for node, its in spans.items():
        if node not in nodes:
            continue
        until_s = -math.inf
        for begin_s, over_s in sorted(its):
            if over_s > until_s:
                merged.append((max(begin_s, until_s), over_s, nodes[node][1]))
                until_s = over_s
    return merged


def _mean(held: Sequence[Held], edges_s: Array, widths_s: Array) -> Array:
    """Mean price of the held nodes in each bucket. `widths_s`: seconds of each bucket within the run."""
    if not held:
        return np.zeros(len(widths_s))
    times_s = np.array([[begin_s, over_s] for begin_s, over_s, _ in held]).ravel()
    steps = np.array([[price, -price] for *_, price in held]).ravel()
    order = np.argsort(times_s, kind="stable")
    times_s, levels = times_s[order], np.cumsum(steps[order])
    sums = np.concatenate([[0.0], np.cumsum(levels[:-1] * np.diff(times_s))])
    at = np.interp(edges_s, times_s, sums)
    mean: Array = np.divide(np.diff(at), widths_s, out=np.zeros(len(widths_s)), where=widths_s > 0)
    return mean

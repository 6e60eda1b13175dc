"""What the mechanisms of sub-stages did in a run, from its orders: what moved, was given away, or shared.

    tails        begun trajectories that migrated, with their contexts; `freed_s`: device-seconds from then until the
                 rollout that they belong to had ended
    shards       shards that migrated before they began
    tool_waits   shards that gave their device away while all their trajectories waited for environments; `freed_s`:
                 device-seconds until they had it again
    fractions    orders that had a part of their devices, and their seconds

A module of its own: `summary` has the run in numbers, whatever the policy does; these are about what it may do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from rlmux.core.model import DeviceId, Phase, PipelineId
from rlmux.report.timeline.records import OrderRecord

Rollout = tuple[PipelineId, int]
"""A pipeline's step."""


def mechanisms(orders: Iterable[OrderRecord]) -> dict[str, dict[str, float]]:
    """Counts and seconds of each mechanism, as in `summary.json`."""
    tails = dict.fromkeys(("migrations", "trajectories", "tokens", "kv_bytes", "seconds", "freed_s"), 0.0)
    shards = dict.fromkeys(("migrations", "trajectories"), 0.0)
    tool_waits = dict.fromkeys(("given_away", "freed_s"), 0.0)
    fractions = dict.fromkeys(("orders", "seconds"), 0.0)
    orders = list(orders)
    ends_s, starts_s = _ends(orders), _starts(orders)
    for order in orders:
        if order.moved is not None and order.moved.num_begun:
            moved = order.moved
            tails["migrations"] += 1
            tails["trajectories"] += moved.num_begun
            tails["tokens"] += moved.tokens
            tails["kv_bytes"] += moved.kv_bytes
            tails["seconds"] += moved.seconds
            tails["freed_s"] += max(0.0, ends_s.get((order.pipeline, order.step), 0.0) - order.end_s)
        elif order.moved is not None:
            shards["migrations"] += 1
            shards["trajectories"] += order.moved.num_trajectories
        elif order.has_waited:
            tool_waits["given_away"] += 1
            tool_waits["freed_s"] += _until_next(starts_s, order)
        if order.least_fraction < 1.0 and not order.is_migration:
            fractions["orders"] += 1
            fractions["seconds"] += order.seconds
    counted = {"tails": tails, "shards": shards, "tool_waits": tool_waits, "fractions": fractions}
    return {name: _rounded(each) for name, each in counted.items()}


def mechanism_words(counted: Mapping[str, Mapping[str, float]]) -> str:
    """What the mechanisms did, in words; empty where they did nothing."""
    tails, shards, waits, fractions = (counted[name] for name in ("tails", "shards", "tool_waits", "fractions"))
    parts = []
    if tails["migrations"]:
        parts.append(
            f"{tails['migrations']:,} begun tails moved ({tails['trajectories']:,} trajectories, {tails['tokens']:,} "
            f"tokens), {tails['freed_s']:,} device-seconds freed"
        )
    if shards["migrations"]:
        parts.append(f"{shards['migrations']:,} shards moved before they began")
    if waits["given_away"]:
        parts.append(f"{waits['given_away']:,} tool waits given away for {waits['freed_s']:,} s")
    if fractions["orders"]:
        parts.append(f"{fractions['orders']:,} orders on a part of their device")
    return "; ".join(parts)


def _is_shard(order: OrderRecord) -> bool:
    return order.phase is Phase.ROLLOUT and not order.is_migration


def _ends(orders: Iterable[OrderRecord]) -> dict[Rollout, float]:
    """When each step's rollout ended."""
    ends_s: dict[Rollout, float] = {}
    for order in orders:
        if _is_shard(order) and math.isfinite(order.end_s):
            key = (order.pipeline, order.step)
            ends_s[key] = max(ends_s.get(key, 0.0), order.end_s)
    return ends_s


def _starts(orders: Iterable[OrderRecord]) -> dict[tuple[PipelineId, DeviceId], list[float]]:
    """When orders of rollouts began, ascending, by pipeline and device."""
    starts_s: dict[tuple[PipelineId, DeviceId], list[float]] = {}
    for order in orders:
        if _is_shard(order) and order.devices:
            starts_s.setdefault((order.pipeline, order.devices[0]), []).append(order.start_s)
    return starts_s


def _until_next(starts_s: Mapping[tuple[PipelineId, DeviceId], list[float]], order: OrderRecord) -> float:
    """Seconds until its pipeline's next rollout order on its device; 0 where none followed."""
    begins_s = starts_s.get((order.pipeline, order.devices[0]), [])
    place = bisect_left(begins_s, order.end_s)
    return begins_s[place] - order.end_s if place < len(begins_s) else 0.0


def _rounded(counts: Mapping[str, float]) -> dict[str, Any]:
    """Seconds to milliseconds; all else is counted."""
    return {key: round(value, 3) if key.endswith(("_s", "seconds")) else int(value) for key, value in counts.items()}

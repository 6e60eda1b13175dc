"""Spot nodes: what a node of a pool costs over time, and which nodes are taken back, after which notice.

    at_s,pool,usd_per_gpu_hour,node,notice_s,down_s
    0,rollout,0.70,,,
    5400,rollout,,3,120,1800
    7200,rollout,0.95,,,

| column | what it is |
|---|---|
| `at_s` | seconds since the workload began, 0 or more; rows are in this order |
| `pool` | a pool of the cluster |
| `usd_per_gpu_hour` | the pool's price from then on, 0 or more, the first at 0 s. Empty in a row with a `node` |
| `node` | number of the node that is taken back, from 0. Empty in a row with a price |
| `notice_s` | seconds from the notice, at `at_s`, until the node is gone, 0 or more |
| `down_s` | seconds until a node is there again, above 0; empty: it does not come back |

A mistake is one line: file, row (as an editor numbers lines), column, value, and what is accepted.
"""

from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, NodeId
from rlmux.sim.spot_trace import PriceChange, Reclaim, SpotTrace
from rlmux.sim.workloads.csv_rows import CsvRow, numbered_lines

COLUMNS = ("at_s", "pool", "usd_per_gpu_hour", "node", "notice_s", "down_s")


def load(path: Path | str, cluster: Cluster) -> SpotTrace:
    """Read the file for a cluster. Raises UserError for the first mistake."""
    path = Path(path)
    rows = _rows(path)
    _check_order(rows)
    prices, reclaims = [], []
    for row in rows:
        pool = row.text("pool")
        if pool not in cluster.pools:
            raise row.error("pool", f"is {pool!r}: no such pool; accepted: {', '.join(cluster.pools)}")
        if row.optional("node") and row.optional("usd_per_gpu_hour"):
            raise row.error("node", "is given beside a price; accepted: one of them in a row")
        if row.optional("node"):
            reclaims.append(_reclaim(row, pool, cluster))
        elif row.optional("usd_per_gpu_hour"):
            price = row.number_of("usd_per_gpu_hour", at_least=0)
            prices.append(PriceChange(at_s=row.time_of("at_s"), pool=pool, usd_per_gpu_hour=price))
        else:
            raise row.error("usd_per_gpu_hour", "is empty, and so is 'node'; accepted: a price, or a node")
    _check_prices(rows)
    _check_reclaims([row for row in rows if row.optional("node")], reclaims)
    return SpotTrace(prices=tuple(prices), reclaims=tuple(reclaims))


def _rows(path: Path) -> list[CsvRow]:
    numbered = numbered_lines(path)
    if len(numbered) < 2:
        raise UserError(f"{path}: no rows; accepted: a header with {', '.join(COLUMNS)}, then prices and reclaims")
    header = [name.strip() for name in next(csv.reader([numbered[0][1]]))]
    unknown = [name for name in header if name not in COLUMNS]
    if unknown or sorted(set(header)) != sorted(header):
        name = (unknown or [name for name in header if header.count(name) > 1])[0]
        raise UserError(f"{path}: row {numbered[0][0]}: column {name!r}; accepted: {', '.join(COLUMNS)}, each once")
    missing = [name for name in ("at_s", "pool") if name not in header]
    if missing:
        raise UserError(f"{path}: row {numbered[0][0]}: missing column {missing[0]}; found: {', '.join(header)}")
    return [CsvRow(path, number, header, next(csv.reader([line]))) for number, line in numbered[1:]]


def _reclaim(row: CsvRow, pool: str, cluster: Cluster) -> Reclaim:
    index = row.number_of("node", at_least=0)
    num_nodes = cluster.pools[pool].num_nodes
    if index != int(index) or (num_nodes is not None and index >= num_nodes):
        most = "0 or more" if num_nodes is None else f"0 to {num_nodes - 1}, the nodes of pool {pool!r}"
        raise row.error("node", f"is {index:g}; accepted: a whole number, {most}")
    return Reclaim(
        at_s=row.time_of("at_s"),
        node=NodeId(pool, int(index)),
        notice_s=row.number_of("notice_s", at_least=0),
        down_s=row.number_of("down_s", at_least=0, default=math.inf, above=True),
    )


def _check_order(rows: list[CsvRow]) -> None:
    for before, row in pairwise(rows):
        at_s, latest_s = row.time_of("at_s"), before.time_of("at_s")
        if at_s < latest_s:
            raise row.error("at_s", f"is {at_s:g}, before row {before.number}; accepted: {latest_s:g} or later")


def _check_prices(rows: list[CsvRow]) -> None:
    """One price at a time, from the beginning on: there is no gap that a price would have to be made up for."""
    row_by_key: dict[tuple[str, float], CsvRow] = {}
    priced: set[str] = set()  # membership tests only
    for row in rows:
        if not row.optional("usd_per_gpu_hour"):
            continue
        pool, at_s = row.text("pool"), row.time_of("at_s")
        if pool not in priced and at_s > 0.0:
            raise row.error("at_s", f"is {at_s:g}: the first price of pool {pool!r}; accepted: a first price at 0")
        priced.add(pool)
        earlier = row_by_key.setdefault((pool, at_s), row)
        if earlier is not row:
            what = f"is a second price of pool {pool!r} at {at_s:g} s, beside row {earlier.number}"
            raise row.error("usd_per_gpu_hour", f"{what}; accepted: one")


def _check_reclaims(rows: list[CsvRow], reclaims: list[Reclaim]) -> None:
    """A node is there when its notice comes."""
    last_by_node: dict[NodeId, tuple[CsvRow, Reclaim]] = {}
    for row, reclaim in zip(rows, reclaims, strict=True):
        earlier = last_by_node.get(reclaim.node)
        if earlier is not None and reclaim.at_s < earlier[1].back_at_s:
            back_s = earlier[1].back_at_s
            there = "never: its down_s is empty" if math.isinf(back_s) else f"from {back_s:g} s on"
            raise row.error("node", f"is {reclaim.node.index}, taken in row {earlier[0].number}; accepted: {there}")
        last_by_node[reclaim.node] = (row, reclaim)

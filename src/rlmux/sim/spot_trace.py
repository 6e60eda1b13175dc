"""What a file of spot nodes comes to: prices over time, and nodes that are taken back.

spot.csv ── workloads/spot.py ─▶ SpotTrace ─▶ node_changes.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmux.core.model import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChange:
    """The price of a pool's nodes from a time on."""

    at_s: float
    pool: str
    usd_per_gpu_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """A node that is taken back, and that may come again."""

    at_s: float
    """Time of the notice."""
    node: NodeId
    notice_s: float
    """Seconds from the notice until it is gone."""
    down_s: float = math.inf
    """Seconds until a node of that number is there again; infinite where none is."""

    @property
    def gone_at_s(self) -> float:
        return self.at_s + self.notice_s

    @property
    def back_at_s(self) -> float:
        return self.gone_at_s + self.down_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotTrace:
    """A whole file, in the order of time."""

    prices: tuple[PriceChange, ...] = ()
    reclaims: tuple[Reclaim, ...] = ()

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools that have a price over time."""
        return tuple(dict.fromkeys(change.pool for change in self.prices))

"""Results of one search over pipelines of a kind, reused by the next with another budget.

    pack     pins(budget) of the same rollouts    steps: what two budgets agree on holds for all between them
    fits     fits(period) of the same phases      one step: what fits a period fits every longer one

Searches come back to the same kinds of pipelines, and each pipeline has a budget of its own. Pins are the first that a
depth-first search finds in one fixed order, and a larger budget only opens more ways, so they only come earlier in that
order: equal at two budgets, they are equal between them. Both are caches: dropping them changes no result.

A module of its own: its tests compare it with searches that reuse nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter, itemgetter

from rlmux.core.estimation.cycles import PhaseLoad, fits_period
from rlmux.policies.search.partition import NodePrices, PipelineDemand, pack_rollouts

Pins = tuple[tuple[int, ...], ...]
_MAX_CACHED = 50_000
"""Sets of rollouts, and of phases, that are kept."""
_PACKED = itemgetter(
    *(
        PipelineDemand._fields.index(name)
        for name in (
            "rollout_s", "num_rollout_nodes", "rollout_bytes", "sync_s", "rollout_switch_s", "rollout_device_bytes"
        )
    )
)  # fmt: skip
"""What of a demand its pins depend on, beside the budget."""
_PHASES = attrgetter("rollout_s", "train_s", "sync_s", "steps_per_cycle", "rollout_nodes", "train_nodes")
"""What of a load the meta-iteration depends on."""


class PackingBook:
    """See the module."""

    def __init__(self) -> None:
        self._pins: dict[Hashable, list[tuple[float, float, Pins | None]]] = {}
        """(least, largest) budget at which each result was found, by what else it depends on."""
        self._periods_s: dict[Hashable, tuple[float, float]] = {}
        """The longest period that was too short for these phases, and the shortest that was not."""

    def pack(
        self, demands: Sequence[PipelineDemand], budget_s: float, prices: NodePrices, *, at_least: int = 1
    ) -> Pins | None:
        """As `pack_rollouts`."""
        key = (at_least, prices.rollout_host_bytes, prices.rollout_device_bytes, *map(_PACKED, demands))
        known = self._pins.get(key)
        if known is None:
            if len(self._pins) > _MAX_CACHED:
                self._pins.clear()
            known = self._pins[key] = []
        for least_s, largest_s, found in known:
            if least_s <= budget_s <= largest_s:
                return found
        pins = pack_rollouts(demands, budget_s, prices, at_least=at_least)
        for number, (least_s, largest_s, found) in enumerate(known):
            if found == pins:
                known[number] = (min(least_s, budget_s), max(largest_s, budget_s), found)
                return pins
        known.append((budget_s, budget_s, pins))
        return pins

    def fits(self, loads: Sequence[PhaseLoad], period_s: float) -> bool:
        """As `fits_period`."""
        key = tuple(map(_PHASES, loads))
        known = self._periods_s.get(key)
        if known is None:
            if len(self._periods_s) > _MAX_CACHED:
                self._periods_s.clear()
            known = (0.0, float("inf"))
        too_short_s, enough_s = known
        if period_s <= too_short_s:
            return False
        if period_s >= enough_s:
            return True
        is_enough = fits_period(loads, period_s)
        self._periods_s[key] = (too_short_s, period_s) if is_enough else (period_s, enough_s)
        return is_enough

"""`optimal`: the cheapest grouping of all pipelines after every change, by exact search.

Moves count for nothing beside dollars, so it shows what placement alone could reach with a strict
meta-iteration. The search is exact while it ends within its limit, which it does for a few dozen pipelines;
where it does not, `worst_gap` says how far from the best the grouping may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmux.core.placement import GroupLoad, PlacementView, Relocation
from rlmux.policies.planning.regrouping import relocations_to, targets_of
from rlmux.policies.rlmux import RlMux, partition_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal(RlMux):
    name: str = "optimal"
    max_search_nodes: int = 4_000
    slo_margin: float = 0.0
    laps: bool = False
    _gaps: list[float] = field(default_factory=lambda: [0.0], repr=False, compare=False)

    @property
    def worst_gap(self) -> float:
        """Largest (cost - proven bound) / cost over all groupings so far; 0 if every one was proven."""
        return max(self._gaps)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        groups: list[GroupLoad] = [group for group in view.groups() if group.budget_s < float("inf")]
        if not groups:
            return ()
        names, found = partition_of(
            groups,
            view,
            usd_per_move=0.001,
            max_search_nodes=self.max_search_nodes,
            lap_finder=None,
            slo_margin=0.0,
        )
        if found is None:
            return ()
        self._gaps.append(1.0 - found.bound_usd / found.cost_usd if found.cost_usd else 0.0)
        return relocations_to(targets_of(found.columns, names), view.sandbox(), max_detours=8)

"""`optimal`: the cheapest grouping of all pipelines after every change, by exact search.

Moves count for nothing beside dollars, so it shows what placement alone could reach with a strict
meta-iteration. The search is exact while it ends within its limit, which it does for a few dozen pipelines;
where it does not, the partition's `gap` bounds the distance from the best grouping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlmux.core.model import PipelineId
from rlmux.core.placement.choice import Relocation
from rlmux.core.placement.view import PlacementView
from rlmux.policies.rlmux import RlMux
from rlmux.policies.search.regrouping import partition_of, relocations_to, targets_of
from rlmux.policies.search.set_partition import Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal(RlMux):
    name: str = "optimal"
    max_search_nodes: int = 4_000
    slo_margin: float = 0.0
    varies_steps_per_cycle: bool = False
    slowness_price: float = 0.0

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        names, found = self.cheapest(view)
        if found is None:
            return ()
        with view.trial() as ledger:
            return relocations_to(targets_of(found.groups, names), ledger, max_detours=8)

    def cheapest(self, view: PlacementView) -> tuple[list[PipelineId], Partition | None]:
        """All pipelines that have an SLO, and their cheapest partition if it is cheaper than now."""
        groups = [group for group in view.groups() if group.budget_s < math.inf]
        if not groups:
            return [], None
        return partition_of(
            groups,
            view,
            usd_per_move=0.001,
            max_search_nodes=self.max_search_nodes,
            step_finder=None,
            slo_margin=0.0,
        )

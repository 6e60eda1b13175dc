"""A policy without its relocations: pipelines stay on the nodes that they were admitted to.

For a bill to compare with. What a relocation saved is no figure of one run: the nodes that it freed were held by others
afterwards, who else would have held different ones.
"""

from __future__ import annotations

import copy

from rlmux.core.decision.policy import Policy
from rlmux.core.placement.view import PlacementView


def without_moves(policy: Policy) -> Policy:
    """The same policy, which places, dispatches and takes turns as before and relocates nothing, for an SLO neither."""
    kind = type(policy)
    staying = copy.copy(policy)  # a class of its own keeps every further ability of the policy, whichever it has
    object.__setattr__(staying, "__class__", type(kind.__name__, (kind,), {"__slots__": (), "rebalance": _nothing}))
    return staying


def _nothing(self: Policy, view: PlacementView) -> tuple[()]:
    return ()

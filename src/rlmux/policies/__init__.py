"""The policies, by the name a user types: one file a policy, the one-rule baselines together.

`planning/` holds the algorithms they share. To add a policy, write its file and its line here; `core/policy.py` says
what it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.policy import Policy
from rlmux.core.sharing import SharingTable
from rlmux.policies.baselines import Colocated, Fifo, GapRatio, Gavel, MostIdle, RandomGroups, Solo, Split
from rlmux.policies.jigsaw import Jigsaw
from rlmux.policies.optimal import Optimal
from rlmux.policies.rlmux import RlMux
from rlmux.policies.rollmux import RollMux
from rlmux.policies.static_sharing import mux_all, mux_rollouts, mux_training, serial

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "solo": Solo,
    "colocated": Colocated,
    "split": Split,
    "fifo": Fifo,
    "gap-ratio": GapRatio,
    "gavel": Gavel,
    "random": RandomGroups,
    "most-idle": MostIdle,
    "rollmux": RollMux,
    "jigsaw": Jigsaw,
    "serial": serial,
    "mux-rollouts": mux_rollouts,
    "mux-training": mux_training,
    "mux-all": mux_all,
    "rlmux": RlMux,
    "optimal": Optimal,
}
"""Maker of each policy, by the name that a user types."""


def make_policy(name: str, *, seed: int = 0, sharing: SharingTable | None = None, **options: Any) -> Policy:
    """The policy of that name with these options: the one way to make a policy.

    `seed` is used by a policy that draws lots, `sharing` by one that runs sub-stages side by side; other policies
    ignore them (`policy.sharing` is then None). Raises UserError for a name or an option that is unknown.
    """
    if name not in POLICIES:
        near = get_close_matches(name, POLICIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"policy {name!r} is unknown; accepted: {', '.join(POLICIES)}{hint}")
    policy: Any = POLICIES[name]()
    known = [item.name for item in fields(policy)] if is_dataclass(policy) else []
    for key in options:
        if key not in known:
            raise UserError(f"policy {name!r} has no option {key!r}; accepted: {', '.join(known)}")
    if "seed" in known:
        options = {"seed": seed, **options}
    made: Policy = replace(policy, **options)
    return made if sharing is None else with_sharing(made, sharing)


def with_sharing(policy: Policy, sharing: SharingTable) -> Policy:
    """The same policy with this table; the policy itself where it gives devices whole."""
    if policy.sharing is None:
        return policy
    known: Any = policy
    made: Policy = replace(known, sharing=sharing)
    return made

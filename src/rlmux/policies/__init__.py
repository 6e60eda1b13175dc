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
"""By the name a user types."""


def make_policy(name: str, *, seed: int = 0, **options: Any) -> Policy:
    """The policy of that name with these options; one that draws lots does so from `seed`."""
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
    made: Policy = replace(policy, **options) if options else policy
    return made

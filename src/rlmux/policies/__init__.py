"""The policies, by the name a user types: one file a policy, the one-rule baselines together.

`search/` and `lookahead/` hold the algorithms they share. To add a policy, write its file and its line here;
`core/policy.py` has the interface. A policy outside rlmux is a plug-in (`user_policy.py`), named `module:Class` or by
an entry point.

Reading order: baselines, rollmux, jigsaw, rlmux, optimal, static_sharing, gavel, max_min_fairness, time_slice_clock,
time_slice_shares, user_policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rlmux import plugins
from rlmux.core.errors import UserError
from rlmux.core.policy import Policy
from rlmux.core.steps.colocation import SharingTable
from rlmux.policies.baselines import Colocated, Fifo, GapRatio, GavelSteps, MostIdle, RandomGroups, Solo, Split
from rlmux.policies.gavel import gavel
from rlmux.policies.jigsaw import Jigsaw
from rlmux.policies.optimal import Optimal
from rlmux.policies.rlmux import RlMux
from rlmux.policies.rollmux import RollMux
from rlmux.policies.static_sharing import mux_all, mux_rollouts, mux_training, serial
from rlmux.policies.user_policy import Checked, user_policy

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "solo": Solo,
    "colocated": Colocated,
    "split": Split,
    "fifo": Fifo,
    "gap-ratio": GapRatio,
    "gavel": gavel,
    "gavel-steps": GavelSteps,
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


def check_policy(name: str) -> None:
    """Raises UserError for a name that is neither built in nor a plug-in that could be one. Nothing is imported."""
    if name not in POLICIES and not plugins.is_plugin("policy", name):
        plugins.find("policy", name, tuple(POLICIES))


def make_policy(name: str, *, seed: int = 0, sharing: SharingTable | None = None, **options: Any) -> Policy:
    """The policy of that name with these options: the one way to make a policy.

    `seed` is used by a policy that draws lots, `sharing` by one that runs sub-stages side by side; other policies
    ignore them (`policy.sharing` is then None). Raises UserError for a name or an option that is unknown.
    """
    if name not in POLICIES:
        of_user = user_policy(name, tuple(POLICIES))
        made: Policy = replace(of_user, wrapped=_with_options(of_user.wrapped, name, seed, options))
    else:
        made = _with_options(POLICIES[name](), name, seed, options)
    return made if sharing is None else with_sharing(made, sharing)


def _with_options(policy: Any, name: str, seed: int, options: Mapping[str, Any]) -> Policy:
    known = [item.name for item in fields(policy)] if is_dataclass(policy) else []
    for key in options:
        if key not in known:
            raise UserError(f"policy {name!r} has no option {key!r}; accepted: {', '.join(known)}")
    drawing = {"seed": seed} if "seed" in known else {}
    made: Policy = replace(policy, **{**drawing, **options})
    return made


def with_sharing(policy: Policy, sharing: SharingTable) -> Policy:
    """The same policy with this table; the policy itself where it gives devices whole."""
    if policy.sharing is None:
        return policy
    if isinstance(policy, Checked):
        return policy.with_sharing(sharing)
    known: Any = policy
    made: Policy = replace(known, sharing=sharing)
    return made

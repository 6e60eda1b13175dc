"""The policies, by the name a user types: one file a policy, the one-rule baselines together.

`search/` and `lookahead/` hold the algorithms they share. To add a policy, write its file and its line here;
`core/decision/policy.py` has the interface. A policy outside rlmux is a plug-in (`user_policy.py`), named
`module:Class` or by an entry point.

The name of a built-in policy may switch mechanisms off: `rlmux-no-tails`, `rlmux-no-tails-no-fill`. Such a policy is an
ablation, and shows what the mechanism is worth.

Reading order: baselines, rollmux, jigsaw, rlmux, optimal, static_sharing, gavel, max_min_fairness, time_slice_clock,
time_slice_shares, user_policy, without_moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rlmux import plugins
from rlmux.core.decision.policy import Policy
from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingTable
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
MECHANISMS = ("tails", "fractions", "fill")
"""Options that switch a mechanism of a policy on; each policy has some of them or none."""
_WITHOUT = "-no-"
"""Precedes each mechanism that a name switches off."""


def check_policy(name: str) -> None:
    """Raises UserError for a name that is neither built in nor a plug-in that could be one. Nothing is imported."""
    if split_name(name)[0] not in POLICIES and not plugins.is_plugin("policy", name):
        plugins.find("policy", name, tuple(POLICIES))


def is_plugin(name: str) -> bool:
    """Whether a plug-in may have this name, which no built-in policy has. Nothing is imported."""
    return name.partition(_WITHOUT)[0] not in POLICIES and plugins.is_plugin("policy", name)


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """(the policy, the mechanisms that the name switches off): "rlmux-no-tails" is ("rlmux", ("tails",)).

    A plug-in has no mechanisms, and its name is never split. Raises UserError for a mechanism that a built-in policy
    does not have.
    """
    policy, *off = name.split(_WITHOUT)
    if policy not in POLICIES:
        return name, ()
    known = _mechanisms_of(policy)
    for mechanism in off:
        if mechanism not in known:
            raise UserError(f"policy {policy!r} has no mechanism {mechanism!r}; accepted: {', '.join(known) or 'none'}")
    return policy, tuple(off)


def with_ablations(names: Sequence[str], mechanisms: Sequence[str]) -> tuple[str, ...]:
    """The policies, each followed by its ablations: without each of these mechanisms, then without all of them.

        solo, rlmux; tails, fill  ─▶  solo, rlmux, rlmux-no-tails, rlmux-no-fill, rlmux-no-tails-no-fill

    "all" stands for every mechanism. Raises UserError for a mechanism that none of the policies has.
    """
    named = {name: split_name(name) for name in names}
    on_in = {
        name: [each for each in _mechanisms_of(policy) if each not in off] for name, (policy, off) in named.items()
    }
    known = [each for each in MECHANISMS if any(each in on for on in on_in.values())]
    for mechanism in mechanisms:
        if mechanism not in known and (mechanism != "all" or not known):
            listed = ", ".join(map(repr, names))
            none = f"policy {listed} has" if len(names) == 1 else f"policies {listed} have"
            raise UserError(f"--ablate {mechanism}: {none} no such mechanism; accepted: {', '.join(known) or 'none'}")
    ablated: list[str] = []
    for name, on in on_in.items():
        off = [each for each in on if each in mechanisms or "all" in mechanisms]
        ablated += [name, *(name + _WITHOUT + each for each in off)]
        if len(off) > 1:
            ablated.append(_WITHOUT.join((name, *off)))
    return tuple(dict.fromkeys(ablated))


def _mechanisms_of(policy: str) -> list[str]:
    known = _options_of(POLICIES[policy]()) if policy in POLICIES else ()
    return [each for each in MECHANISMS if each in known]


def make_policy(name: str, *, seed: int = 0, sharing: SharingTable | None = None, **options: Any) -> Policy:
    """The policy of that name with these options: the one way to make a policy.

    The name may switch mechanisms off (`split_name`). `seed` is used by a policy that draws lots, `sharing` by one that
    runs sub-stages side by side; other policies ignore them (`policy.sharing` is then None). Raises UserError for a
    name or an option that is unknown.
    """
    policy, off = split_name(name)
    if policy not in POLICIES:
        of_user = user_policy(name, tuple(POLICIES))
        made: Policy = replace(of_user, wrapped=_with_options(of_user.wrapped, name, seed, options))
    else:
        switched_off = {"name": name, **dict.fromkeys(off, False)} if off else {}
        made = _with_options(POLICIES[policy](), name, seed, {**switched_off, **options})
    return made if sharing is None else with_sharing(made, sharing)


def _with_options(policy: Any, name: str, seed: int, options: Mapping[str, Any]) -> Policy:
    known = _options_of(policy)
    for key in options:
        if key not in known:
            raise UserError(f"policy {name!r} has no option {key!r}; accepted: {', '.join(known)}")
    drawing = {"seed": seed} if "seed" in known else {}
    made: Policy = replace(policy, **{**drawing, **options})
    return made


def _options_of(policy: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(policy)) if is_dataclass(policy) else ()


def with_sharing(policy: Policy, sharing: SharingTable) -> Policy:
    """The same policy with this table; the policy itself where it gives devices whole."""
    if policy.sharing is None:
        return policy
    if isinstance(policy, Checked):
        return policy.with_sharing(sharing)
    known: Any = policy
    made: Policy = replace(known, sharing=sharing)
    return made

"""A policy's name may switch its mechanisms off, and an ablation is such a name."""

from __future__ import annotations

import pytest

from rlmux.core.errors import UserError
from rlmux.policies import check_policy, make_policy, with_ablations
from rlmux.policies.rlmux import RlMux


def test_a_name_switches_mechanisms_off_and_stays_the_policys_name():
    name = "rlmux-no-tails-no-fill"
    assert make_policy(name) == RlMux(name=name, tails=False, fractions=True, fill=False)


@pytest.mark.parametrize("name", ["rollmux-no-fill", "solo-no-tails", "rlmux-no-name", "rlmux-no-"])
def test_a_mechanism_that_the_policy_does_not_have_is_refused(name):
    for ask in (check_policy, make_policy):
        with pytest.raises(UserError, match=r"has no mechanism .*; accepted: "):
            ask(name)


def test_a_name_that_is_no_policys_is_unknown_with_and_without_mechanisms():
    with pytest.raises(UserError, match="policy 'rolmux-no-tails' is unknown"):
        check_policy("rolmux-no-tails")


def test_each_mechanism_is_off_alone_and_then_all_together():
    assert with_ablations(["solo", "rlmux", "rollmux"], ["fill", "tails"]) == (
        "solo",
        "rlmux", "rlmux-no-tails", "rlmux-no-fill", "rlmux-no-tails-no-fill",
        "rollmux", "rollmux-no-tails",
    )  # fmt: skip
    assert with_ablations(["rollmux"], ["all"]) == ("rollmux", "rollmux-no-tails")
    assert with_ablations(["rlmux-no-tails"], ["fill"]) == ("rlmux-no-tails", "rlmux-no-tails-no-fill")
    assert with_ablations(["my_module:Own", "solo"], []) == ("my_module:Own", "solo")


def test_a_plug_in_has_no_mechanisms():
    with pytest.raises(UserError, match="--ablate tails: policy 'my_module:Own' has no such mechanism; accepted: none"):
        with_ablations(["my_module:Own"], ["tails"])

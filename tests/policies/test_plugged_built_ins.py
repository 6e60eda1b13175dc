"""A policy decides alike by its own name and as a user's `module:Class`: there is one door for both."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from rlmux.policies import POLICIES, make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads import catalog

QUICK = ("micro-a", "micro-c")
SEARCHING = ("jigsaw", "optimal")
"""Policies whose simulations take seconds."""
CASES = [
    pytest.param(
        name,
        workload,
        marks=[pytest.mark.slow]
        * (name in SEARCHING or workload not in QUICK or (name, workload) == ("rlmux", "micro-c")),
    )
    for name in POLICIES
    for workload in (*QUICK, "micro-b")
]


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of makers, as a user's would be."""
    module = ModuleType("plugged_built_ins")
    for name, make in POLICIES.items():
        setattr(module, name.replace("-", "_"), make)
    monkeypatch.setitem(sys.modules, "plugged_built_ins", module)


def outcomes(name: str, workload: Any) -> list[Any]:
    """The simulation under the built-in policy and under the same class as a plug-in, without name and speed."""
    names = (name, f"plugged_built_ins:{name.replace('-', '_')}")
    results = [simulate(workload, make_policy(each)) for each in names]
    return [replace(each, policy="", wall_s=0.0, decision_ms=None) for each in results]


@pytest.mark.parametrize(("name", "workload"), CASES)
def test_a_built_in_policy_as_a_plug_in_decides_as_by_its_name(name: str, workload: str) -> None:
    own, as_plug_in = outcomes(name, catalog.load(workload, seed=0))
    assert own == as_plug_in


@pytest.mark.parametrize("name", ["rollmux", "rlmux"])
def test_tails_leave_their_devices_under_a_plug_in_too(name: str) -> None:
    with_tails, without = (catalog.load(each, seed=0) for each in ("weave:tails=copied", "weave"))
    own, as_plug_in = outcomes(name, replace(with_tails, arrivals=with_tails.arrivals[:8]))
    assert own == as_plug_in
    other = simulate(replace(without, arrivals=without.arrivals[:8]), make_policy(name))
    assert own.cost_usd != other.cost_usd, "tails make no difference here"

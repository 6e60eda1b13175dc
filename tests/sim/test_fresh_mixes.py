"""Mixes drawn at random: their numbers change from run to run, and are printed where a claim does not hold."""

from __future__ import annotations

import math
import os
import random

import pytest
from fresh_mixes import POLICIES, judge, mix

from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate

NUM_MIXES = 400 if os.environ.get("RLMUX_EXAMPLES") == "all" else 40
MOST_DEARER, MOST_MISSED = 0.15, 0.025
"""Part of the mixes that may be dearer, and SLOs that may be missed for each mix. 1,000 mixes had 0.09 and 0.005: a run
of 40 exceeds the limits below by chance once in some thousand."""
LEAST_GAIN = 0.98
"""Mean gain over the cheaper of `solo` and `rollmux`; it was 1.03."""


BROKE_ONCE = {"a head that fits beside a pipeline only once that one begins": 600727172}


@pytest.fixture(scope="module")
def first() -> int:
    number = random.SystemRandom().randrange(10**9)
    print(f"python benchmarks/fresh_mixes.py --seed {number} --mixes {NUM_MIXES}")
    return number


@pytest.fixture(scope="module")
def judged(first):
    return judge([mix(number) for number in range(first, first + NUM_MIXES)])


def test_rlmux_misses_hardly_an_slo_that_solo_keeps(judged):
    missed = [(one.mix.seed, one.missed) for one in judged if one.missed]
    assert sum(len(names) for _, names in missed) <= max(4, MOST_MISSED * NUM_MIXES), missed


def test_rlmux_is_seldom_dearer_than_the_cheaper_of_solo_and_rollmux(judged):
    dearer = [(one.mix.seed, one.dearer) for one in judged if one.is_dearer]
    assert len(dearer) <= max(10, MOST_DEARER * NUM_MIXES), dearer
    gains = [-math.log1p(one.dearer) for one in judged if math.isfinite(one.dearer)]
    assert math.fsum(gains) > math.log(LEAST_GAIN) * len(gains), (judged[0].mix.seed, gains)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("offset", range(5))
def test_every_pipeline_of_a_fresh_mix_ends_and_no_invariant_breaks(first, policy, offset):
    made = mix(first + NUM_MIXES + offset)
    result = simulate(made, make_policy(policy), checks=True)
    assert all(one.left_s is not None and not one.refused for one in result.pipelines), made.seed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("number", BROKE_ONCE.values(), ids=BROKE_ONCE.keys())
def test_a_mix_that_once_broke_an_invariant_breaks_none(number, policy):
    assert simulate(mix(number), make_policy(policy), checks=True).pipelines

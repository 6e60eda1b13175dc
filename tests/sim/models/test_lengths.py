"""Length distributions: drawn lengths look like the run they come from, and depend on the generator alone."""

from __future__ import annotations

import numpy as np
import pytest

from rlmux.core.errors import UserError
from rlmux.sim.models.lengths import (
    PROBABILITIES,
    LengthDistribution,
    finish_curve,
    group_correlation,
    length_distribution,
    length_distribution_names,
)


@pytest.mark.parametrize("run", length_distribution_names())
def test_samples_keep_mean_cap_and_group_likeness(run):
    lengths_of = length_distribution(run)
    drawn = lengths_of.sample(np.random.default_rng(3), 8192)
    assert drawn.min() >= 1
    assert drawn.max() <= lengths_of.quantiles[-1]
    assert drawn.mean() == pytest.approx(lengths_of.mean, rel=0.12)
    is_mostly_capped = lengths_of.quantiles[PROBABILITIES.index(0.5)] > 0.95 * lengths_of.quantiles[-1]
    if not is_mostly_capped:  # equal lengths have no order to compare
        likeness = group_correlation(drawn.astype(float), 4)
        assert likeness == pytest.approx(lengths_of.group_correlation, abs=0.08)


def test_same_generator_same_lengths():
    lengths_of = length_distribution("math_qwen3_4b")
    first = lengths_of.sample(np.random.default_rng(5), 100)
    assert (first == lengths_of.sample(np.random.default_rng(5), 100)).all()
    assert (first != lengths_of.sample(np.random.default_rng(6), 100)).any()


def test_a_summary_of_observed_lengths_can_be_drawn_from():
    observed = np.random.default_rng(0).lognormal(6, 1, 4000)
    lengths_of = LengthDistribution.from_lengths("mine", observed, group_size=4)
    assert lengths_of.group_correlation < 0.05
    drawn = lengths_of.sample(np.random.default_rng(1), 4000)
    assert np.quantile(drawn, 0.99) == pytest.approx(np.quantile(observed, 0.99), rel=0.15)


def test_finish_curves_rise_to_one_and_have_a_tail():
    curve = finish_curve("7B")
    assert len(curve) == 128
    assert list(curve) == sorted(curve)
    assert curve[-1] == 1.0
    assert curve[int(0.8 * 128)] < 0.35


def test_wrong_names_and_numbers_are_refused():
    with pytest.raises(UserError, match="known: gsm8k_llama3_1_8b"):
        length_distribution("nowhere")
    with pytest.raises(UserError, match="known: 14B, 7B"):
        finish_curve("1B")
    with pytest.raises(UserError, match="rising order"):
        LengthDistribution(name="x", quantiles=(1.0, 2.0))
    with pytest.raises(UserError, match="no lengths"):
        LengthDistribution.from_lengths("x", [])

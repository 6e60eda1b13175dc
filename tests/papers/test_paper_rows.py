"""A row cannot flatter: its range holds the published figure, and a cause is put to the test."""

from __future__ import annotations

import pytest

from rlmux.papers.paper_rows import MissCause, PaperRow, row_over, within, within_points


def make_row(ours, cause=None, published=2.0, accepted=(1.9, 2.1), **more):
    return PaperRow(section="s", figure="f", published=published, ours=ours, accepted=accepted, cause=cause, **more)


def test_a_range_without_the_published_figure_is_refused():
    with pytest.raises(ValueError, match=r"f: accepted \(1\.0, 1\.5\) does not contain 2\.0"):
        make_row(1.2, accepted=(1.0, 1.5))


def test_a_range_without_the_replayed_figure_is_refused_where_nothing_is_published():
    with pytest.raises(ValueError, match=r"does not contain 3\.0"):
        make_row(2.0, published=None, replay=3.0)


@pytest.mark.parametrize(
    ("without", "kind"),
    [(None, "conjecture"), (1.95, "computed"), (1.6, "computed in part"), (2.7, "computed in part"), (1.4, "refuted")],
)
def test_a_cause_is_computed_a_conjecture_or_refuted(without, kind):
    row = make_row(1.5, MissCause(text="why", ours_without=without)).as_dict()
    assert (row["reached"], row["cause"], row["cause_is"], row["ours_without_cause"]) == (False, "why", kind, without)


def test_a_missed_row_without_a_cause_says_that_none_is_known():
    row = make_row(1.5).as_dict()
    assert (row["cause"], row["cause_is"]) == ("not known", "unknown")


def test_a_row_that_is_reached_names_no_cause():
    row = make_row(2.05, MissCause(text="why", ours_without=2.0)).as_dict()
    assert (row["reached"], row["cause"], row["ours_without_cause"]) == (True, "", None)


def test_deviation_is_from_the_published_figure_else_from_the_replay():
    assert make_row(2.1, replay=1.0).deviation == pytest.approx(5.0)
    assert make_row(2.1, published=None, replay=2.0).deviation == pytest.approx(5.0)
    assert make_row(2.1, published=None).as_dict()["deviation"] == ""
    fraction = make_row(0.55, published=0.5, accepted=within_points(0.5, 5), is_fraction=True)
    assert fraction.as_dict()["deviation"] == "+5.0 points"


def test_a_row_over_values_is_their_mean_between_the_least_and_the_largest():
    row = row_over([1.0, 3.0], section="s", figure="f", published=2.0, accepted=within(2.0, 0.1))
    assert (row.low, row.ours, row.high) == (1.0, 2.0, 3.0)

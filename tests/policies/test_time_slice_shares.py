"""Max-min shares of time: by hand, against every vertex of small programs, and fair where nothing differs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.errors import UserError
from rlmux.policies.search import linear_program
from rlmux.policies.search.linear_program import LinearProgram, require_solver, solve_with_glop
from rlmux.policies.time_slice_shares import Column, Demand, max_min_shares

TYPES = ("fast", "slow")


def demand(*steps_per_s: float, **fields) -> Demand:
    """A pipeline that takes one node of either type."""
    columns = tuple(Column(steps_per_s=one, nodes={name: 1}) for one, name in zip(steps_per_s, TYPES, strict=True))
    return Demand(columns=columns, **fields)


def shares(*demands: Demand, fast: float = 1, slow: float = 1):
    return max_min_shares(demands, {"fast": fast, "slow": slow}, solve_with_glop)


def test_two_types_and_three_pipelines_are_shared_as_by_hand():
    """The first and the last are twice as fast on one type, the second on neither: x = 0.6 solves 4/3 x = 2 (1 - x)."""
    found = shares(demand(2, 1), demand(1, 1), demand(1, 2))
    np.testing.assert_allclose(found, [(0.6, 0.0), (0.4, 0.4), (0.0, 0.6)], atol=1e-6)


def test_alike_pipelines_get_alike_parts_of_a_crowded_type():
    found = max_min_shares([demand(1, 1)] * 4, {"fast": 1, "slow": 1}, solve_with_glop)
    assert [sum(row) for row in found] == pytest.approx([0.5] * 4, abs=1e-6)


def test_what_one_cannot_use_goes_to_another():
    """A pipeline never gets more than all of its time; the other's minimum does not hold it back."""
    found = shares(demand(1, 1), demand(1, 1), fast=2, slow=0.5)
    assert [sum(row) for row in found] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_twice_the_weight_is_twice_the_progress():
    found = max_min_shares([demand(1, 1, weight=2.0), demand(1, 1)], {"fast": 0.5, "slow": 0.25}, solve_with_glop)
    assert [sum(row) for row in found] == pytest.approx([0.5, 0.25], abs=1e-6)


def test_a_configuration_takes_nodes_of_both_pools():
    pair = Column(steps_per_s=1.0, nodes={"rollout": 1, "train": 1})
    alone = Column(steps_per_s=0.5, nodes={"train": 1})
    one = Demand(columns=(pair, alone))
    found = max_min_shares([one, one], {"rollout": 1, "train": 2}, solve_with_glop)
    assert sum(row[0] for row in found) == pytest.approx(1.0, abs=1e-6)
    assert [row[0] + 0.5 * row[1] for row in found] == pytest.approx([0.75, 0.75], abs=1e-6)


def test_an_unbounded_pool_is_never_short():
    found = max_min_shares([demand(2, 1)] * 3, {"fast": math.inf, "slow": 1}, solve_with_glop)
    np.testing.assert_allclose(found, [(1.0, 0.0)] * 3, atol=1e-6)


def test_ties_go_to_what_comes_first_and_the_same_question_has_the_same_answer():
    found = shares(demand(1, 1), fast=1, slow=1)
    np.testing.assert_allclose(found, [(1.0, 0.0)], atol=1e-6)
    assert found == shares(demand(1, 1), fast=1, slow=1)


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    fast=st.integers(1, 2),
    slow=st.integers(1, 2),
)
@settings(max_examples=examples(25), deadline=None, derandomize=True)
def test_no_vertex_has_a_better_minimum_nor_with_it_a_better_sum(steps, fast, slow):
    found = shares(*(demand(*one) for one in steps), fast=fast, slow=slow)
    norms = [1.0 / (a * fast + b * slow) * (fast + slow) for a, b in steps]
    progress = np.array([norm * (a * x + b * y) for norm, (a, b), (x, y) in zip(norms, steps, found, strict=True)])
    best, best_sum = best_by_vertices(steps, norms, fast, slow)
    assert progress.min() == pytest.approx(best, rel=1e-6)
    assert progress.sum() == pytest.approx(best_sum, rel=1e-5)


def best_by_vertices(steps, norms, fast, slow) -> tuple[float, float]:
    """(the best minimum, the best sum beside it), by trying every vertex of the polytope."""
    size = 2 * len(steps)
    gains = np.zeros((len(steps), size))
    rows, bounds = [], []
    for at, ((a, b), norm) in enumerate(zip(steps, norms, strict=True)):
        gains[at, 2 * at : 2 * at + 2] = norm * a, norm * b
        rows.append(np.repeat(np.eye(len(steps))[at], 2))
        bounds.append(1.0)
    rows += [np.tile([1.0, 0.0], len(steps)), np.tile([0.0, 1.0], len(steps))]
    bounds += [fast, slow]
    least_rows = np.hstack([-gains, np.ones((len(steps), 1))])  # t <= gain: t is the last variable
    polytope = np.vstack([np.hstack([np.array(rows), np.zeros((len(rows), 1))]), least_rows, -np.eye(size + 1)])
    limits = np.array([*bounds, *[0.0] * len(steps), *[0.0] * (size + 1)])
    best = max(vertex[-1] for vertex in vertices(polytope, limits))
    kept = np.vstack([np.array(rows), -gains, -np.eye(size)])
    floors = np.array([*bounds, *[-best * (1 - 1e-9)] * len(steps), *[0.0] * size])
    return best, max(gains.sum(axis=0) @ vertex for vertex in vertices(kept, floors))


def vertices(polytope, limits):
    size = polytope.shape[1]
    chosen = np.array(list(itertools.combinations(range(len(polytope)), size)))
    matrices = polytope[chosen]
    is_regular = np.abs(np.linalg.det(matrices)) > 1e-9
    points = np.linalg.solve(matrices[is_regular], limits[chosen[is_regular]][..., None])[..., 0]
    return points[(points @ polytope.T <= limits + 1e-7).all(axis=1)]


def test_a_program_without_an_optimum_is_an_error():
    with pytest.raises(ValueError, match="no optimum"):
        solve_with_glop(LinearProgram(gains=(1.0,), rows=()))


def test_without_the_solver_one_line_says_which_extra_has_it(monkeypatch):
    monkeypatch.setattr(linear_program, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^policy 'gavel' needs OR-tools: pip install 'rlmux\[solver\]'$"):
        require_solver("policy 'gavel'")

"""Linear programs: what a policy wants solved, and GLOP of OR-tools, which solves it.

    maximise  gains · x     where  row · x <= bound  for every row,  x >= 0

Needs the `solver` extra, imported where a program is solved. The same program gives the same answer: GLOP is a simplex
method on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from rlmux.core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """A program in as many variables as it has gains; see the module."""

    gains: tuple[float, ...]
    """Coefficient of each variable in what is maximised."""
    rows: tuple[tuple[Mapping[int, float], float], ...]
    """Coefficients by the number of the variable, and what their sum may be at most."""


Solver = Callable[[LinearProgram], tuple[float, ...]]
"""Gives the value of each variable at the optimum."""


def require_solver(what: str) -> None:
    """Raises UserError where OR-tools is missing; `what` needs it. Nothing is imported."""
    if find_spec("ortools") is None:
        raise UserError(f"{what} needs OR-tools: pip install 'rlmux[solver]'")


def solve_with_glop(program: LinearProgram) -> tuple[float, ...]:
    """The optimum. Raises ValueError for a program without one."""
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    variables = [solver.NumVar(0.0, solver.infinity(), "") for _ in program.gains]
    for coefficients, bound in program.rows:
        row = solver.Constraint(-solver.infinity(), bound)
        for index, value in coefficients.items():
            row.SetCoefficient(variables[index], value)
    objective = solver.Objective()
    for variable, gain in zip(variables, program.gains, strict=True):
        objective.SetCoefficient(variable, gain)
    objective.SetMaximization()
    status = solver.Solve()
    if status != pywraplp.Solver.OPTIMAL:
        raise ValueError(f"a program of {len(variables)} variables has no optimum (status {status})")
    return tuple(max(0.0, variable.solution_value()) for variable in variables)

"""What a run measured of its steps: estimates to plan with, and how far a plan's were off.

summary.json ──▶ read_recorded ──▶ Estimated        the run's medians, with their ranges
file and summary ──▶ plan_errors ──▶ rows           planned | measured, of each phase
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.config import Purpose
from rlmux.config.figures import Estimated, FigureOrigin, StepFigure
from rlmux.config.load import parse_spec
from rlmux.config.tree import EstimateConfig
from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json
from rlmux.profiling.roofline_estimates import RooflineEstimates

PHASES = ("rollout_s", "train_s")


def read_recorded(folder: Path) -> Mapping[str, Estimated]:
    """The measured estimates of a run's pipelines, by name; those with too few steps are absent.

    Raises UserError for a folder without a summary.
    """
    path = folder / "summary.json"
    try:
        pipelines = dict(parse_json(path.read_bytes())["pipelines"])
    except (OSError, ValueError, KeyError, TypeError):
        text = f"--from-run {folder}: no {path.name} of a run; accepted: the folder of a finished run"
        raise UserError(text) from None
    measured = {name: _measured(row) for name, row in pipelines.items()}
    return {name: _estimated(found, folder) for name, found in measured.items() if found is not None}


def _measured(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the run learned of a pipeline's phases; None where it trains nothing, or ended too soon."""
    found: dict[str, Any] | None = row.get("estimate")
    if not found or found["source"] != "learned" or "low" not in found or not all(found[name] for name in PHASES):
        return None
    return found


def _estimated(found: Mapping[str, Any], folder: Path) -> Estimated:
    basis = f"{found['num_steps']} steps of {folder}"
    figures = tuple(
        StepFigure(
            name=name, seconds=found[name], low=found["low"][name], high=found["high"][name],
            origin=FigureOrigin.RECORDED, basis=basis,
        )
        for name in PHASES
    )  # fmt: skip
    return Estimated(estimate=EstimateConfig(**{figure.name: figure.seconds for figure in figures}), figures=figures)


def plan_errors(resolved: str, summary: Mapping[str, Any], gpu: str | None) -> Sequence[dict[str, Any]]:
    """Each phase as `plan` has it for the run's file, and as the run measured it; empty where it has no estimate.

    `gpu`: GPU of pools without one. `error`: planned over measured seconds, minus 1.
    """
    estimate_of = RooflineEstimates(gpu=gpu).of
    try:
        spec = parse_spec(resolved, source="file", folder=Path(), purpose=Purpose.PLAN, estimate_of=estimate_of)
    except UserError:
        return []
    rows = []
    for pipeline in spec.pipelines:
        found = _measured(summary["pipelines"].get(pipeline.name, {}))
        for figure in pipeline.figures if found else ():
            if found and figure.name in PHASES:
                measured_s = found[figure.name]
                rows.append(
                    {
                        "pipeline": pipeline.name, "figure": figure.name, "planned_s": figure.seconds,
                        "low_s": figure.low, "high_s": figure.high, "origin": str(figure.origin),
                        "measured_s": measured_s, "error": figure.seconds / measured_s - 1.0,
                    }
                )  # fmt: skip
    return rows

"""Estimates from the logs of other frameworks, and the file of pipelines with them that `plan` takes.

    LOG ──trainer_logs──▶ TrainerLog ──estimate_of──▶ LoggedEstimate ──file_text──▶ YAML

A step counts if it has both a rollout and an update. The first of them is a warm-up. Where rollouts of later steps
overlap training, the log has only the seconds that training waited for them, and no figure is made of these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from rlmux.core.errors import UserError
from rlmux.profiling.trainer_logs import FRAMEWORK_BY_PREFIX, TrainerLog, read_log

FIGURES = ("rollout_s", "train_s", "sync_s")
_STALENESS = "/sample_staleness_theta_max"
"""AReaL's, in versions: the largest of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Where a framework has the seconds of a step, without the beginning that all its keys have."""

    figures: Mapping[str, Sequence[str]]
    update: str
    """Only a step with it trained."""
    step: str | None
    """All of a step."""
    overlapping: frozenset[str] = frozenset()
    """Only trainers whose rollouts overlap training have them."""
    is_colocated: bool = False
    """Both phases on the same devices, in every trainer that does not overlap."""


_KEYS = {
    "verl": _Keys(
        figures={
            "rollout_s": ("gen",),
            "train_s": ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
            "sync_s": ("update_weights",),
        },
        update="update_actor",
        step="step",
        overlapping=frozenset(
            {
                *("generate_async", "sync_rollout_weights", "wait_for_enough_samples", "timing_s/param_sync"),
                *("switch_wait", "switch_to_trainer", "switch_to_rollout"),
            }
        ),
        is_colocated=True,
    ),
    "AReaL": _Keys(
        figures={
            "rollout_s": ("rollout",),
            "train_s": (
                *("critic_values", "ref_logp", "teacher_logp", "recompute_logp", "compute_advantage"),
                *("train_step", "critic_train_step"),
            ),
            "sync_s": ("update_weights",),
        },
        update="train_step",
        step=None,
    ),
    "SkyRL": _Keys(
        figures={
            "rollout_s": ("generate",),
            "train_s": (
                *("convert_to_training_input", "fwd_logprobs_values_reward", "apply_reward_kl_penalty"),
                *("compute_advantages_and_returns", "train_critic_and_policy"),
            ),
            "sync_s": ("sync_weights",),
        },
        update="train_critic_and_policy",
        step="step",
        overlapping=frozenset({"wait_for_generation_buffer", "run_training"}),
    ),
}
_PREFIXES = {framework: prefix for prefix, framework in FRAMEWORK_BY_PREFIX.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEstimate:
    """One pipeline, from one log or from the logs of one run."""

    name: str
    framework: str
    paths: tuple[Path, ...]
    seconds: Mapping[str, Sequence[float]]
    """Of each step, by figure."""
    num_left_out: int
    """Steps without a rollout or an update, beside the warm-up."""
    rest_s: float | None
    """Mean seconds of a step that are in no figure: checkpoints, evaluation inside a step; None if not logged."""
    num_gpus: int | None
    """None where the log does not show it."""
    is_colocated: bool

    @property
    def estimate(self) -> dict[str, float]:
        """Means, as keys of the file."""
        means = {figure: _rounded(fmean(self.seconds[figure])) for figure in FIGURES}
        if self.is_colocated:
            means |= {f"colocated_{figure}": means[figure] for figure in ("rollout_s", "train_s")}
        return means

    @property
    def noise(self) -> float:
        """Coefficient of variation of a step's rollout and training together."""
        steps = [sum(pair) for pair in zip(self.seconds["rollout_s"], self.seconds["train_s"], strict=True)]
        return _rounded(pstdev(steps) / fmean(steps))

    def to_json(self) -> dict[str, Any]:
        """What `--json` has of it."""
        return {
            "name": self.name,
            "framework": self.framework,
            "logs": [str(path) for path in self.paths],
            "steps": len(self.seconds["rollout_s"]),
            "warm_up_steps": 1,
            "steps_left_out": self.num_left_out,
            "gpus": self.num_gpus,
            "estimate": self.estimate,
            "spread": {figure: _spread(self.seconds[figure]) for figure in FIGURES},
            "rest_s": self.rest_s,
            "noise": self.noise,
        }


def read_estimates(
    paths: Sequence[Path], name: str | None = None, rollout_s: float | None = None
) -> list[LoggedEstimate]:
    """One pipeline of each log, named after its file, or with `name` one of all of them. `rollout_s`: seconds of a
    rollout where the log cannot have them. Raises UserError."""
    logs = [read_log(path) for path in paths]
    if name is None:
        names = _names(paths)
        return [estimate_of(each, [log], rollout_s) for each, log in zip(names, logs, strict=True)]
    if _as_name(name) != name:
        raise UserError(f"--name {name!r}: accepted: 1 to 64 letters, digits, '-' and '_'")
    frameworks = sorted({log.framework for log in logs})
    if len(frameworks) > 1:
        raise UserError(f"--name {name} joins logs of {' and '.join(frameworks)}; accepted: the logs of one run")
    return [estimate_of(name, logs, rollout_s)]


def estimate_of(name: str, logs: Sequence[TrainerLog], rollout_s: float | None = None) -> LoggedEstimate:
    """The estimate of the logs of one run; a step counts as the last log has it. Raises UserError for fewer than two
    steps with a rollout and an update, and for rollouts that go on during training if no `rollout_s` is given."""
    framework, paths = logs[0].framework, tuple(log.path for log in logs)
    keys, prefix = _KEYS[framework], _PREFIXES[framework]
    shown = ", ".join(map(str, paths))
    steps = {number: values for log in logs for number, values in log.steps.items()}
    needed = [prefix + keys.update] + ([prefix + keys.figures["rollout_s"][0]] if rollout_s is None else [])
    modes = {log.trainer_mode for log in logs}
    if rollout_s is None and (reason := _overlap(framework, modes, steps.values())):
        raise UserError(
            f"{shown}: {reason}: rollouts overlap training, and the log has only the seconds that training waited for "
            "them; accepted: the log of a trainer without overlap, or --rollout-s with the seconds of a rollout"
        )
    whole = [values for values in steps.values() if all(key in values for key in needed)]
    if len(whole) < 2:
        raise UserError(
            f"{shown}: {len(whole)} steps of {framework} with {' and '.join(needed)}; accepted: 2 or more, of which "
            "the first is a warm-up"
        )
    counted = whole[1:]
    seconds = {
        figure: [sum(values.get(prefix + key, 0.0) for key in own) for values in counted]
        for figure, own in keys.figures.items()
    }
    rests = [
        values[prefix + keys.step] - sum(seconds[figure][number] for figure in FIGURES)
        for number, values in enumerate(counted)
        if keys.step is not None and prefix + keys.step in values
    ]
    if rollout_s is not None:
        seconds["rollout_s"] = [rollout_s] * len(counted)
    for figure in ("rollout_s", "train_s"):
        if fmean(seconds[figure]) <= 0.0:
            raise UserError(f"{shown}: the mean of {figure} is 0; accepted: more than 0")
    return LoggedEstimate(
        name=name,
        framework=framework,
        paths=paths,
        seconds=seconds,
        num_left_out=len(steps) - len(whole),
        rest_s=_rounded(max(0.0, fmean(rests))) if rests and rollout_s is None else None,
        num_gpus=_num_gpus(counted),
        is_colocated=keys.is_colocated and rollout_s is None,
    )


def _overlap(framework: str, modes: set[str], steps: Iterable[Mapping[str, float]]) -> str:
    """How the log shows that rollouts overlap training; empty where they do not."""
    keys, prefix = _KEYS[framework], _PREFIXES[framework]
    found = sorted({key for values in steps for key in values if key.removeprefix(prefix) in keys.overlapping})
    if found:
        return f"{found[0]} is of an asynchronous trainer of {framework}"
    if "separate_async" in modes:
        return "trainer_mode is separate_async"
    if framework == "AReaL":
        for values in steps:
            staleness = [value for key, value in values.items() if key.endswith(_STALENESS)]
            if "timeperf/rollout_offload" not in values and (not staleness or max(staleness) > 0.0):
                return "AReaL is asynchronous, and neither timeperf/rollout_offload nor a staleness of 0 is logged"
    return ""


def _num_gpus(steps: Sequence[Mapping[str, float]]) -> int | None:
    """By verl's throughput, which is of each GPU."""
    counts = [
        values["perf/total_num_tokens"] / (values["perf/time_per_step"] * values["perf/throughput"])
        for values in steps
        if all(values.get(f"perf/{key}", 0.0) > 0.0 for key in ("total_num_tokens", "time_per_step", "throughput"))
    ]
    count = median(counts) if counts else 0.0
    return round(count) if count > 0.5 and abs(count - round(count)) < 0.02 * count else None


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    at_90 = sorted(seconds)[math.ceil(0.9 * len(seconds)) - 1]
    return {"mean": _rounded(fmean(seconds)), "median": _rounded(median(seconds)), "p90": _rounded(at_90)}


def _as_name(text: str) -> str:
    """The nearest name that a pipeline can have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[:64].rstrip("-_") or "job"


def _names(paths: Sequence[Path]) -> list[str]:
    """After the files; after their folders too where names would be equal. Raises UserError for a file given twice."""
    names = [_as_name(path.stem) for path in paths]
    if len(set(names)) < len(names):
        names = [_as_name(f"{path.absolute().parent.name}-{path.stem}") for path in paths]
    twice = next((index for index, name in enumerate(names) if names.index(name) < index), None)
    if twice is not None:
        first = paths[names.index(names[twice])]
        raise UserError(
            f"{first} and {paths[twice]} would both be {names[twice]!r}; accepted: file names that differ, or --name "
            "for the logs of one run"
        )
    return names


# ------------------------------------------------------------------ the file


def file_text(estimates: Sequence[LoggedEstimate]) -> str:
    """A file with nodes for one pipeline, which all share. Raises UserError for GPU counts that no node fits."""
    known = {each.name: each.num_gpus for each in estimates if each.num_gpus is not None}
    gpus_per_node = math.gcd(*known.values()) if known else 1
    nodes = {each.name: known.get(each.name, gpus_per_node) // gpus_per_node for each in estimates}
    if any(number & (number - 1) for number in nodes.values()):
        counts = ", ".join(f"{name} {count}" for name, count in known.items())
        raise UserError(f"GPUs of the jobs: {counts}; accepted: counts of which one is 1, 2, 4, ... times another")
    unknown = [each.name for each in estimates if each.num_gpus is None]
    varying = max(each.noise for each in estimates)
    lines = [
        "# Solo seconds of a step, read from logs: means, without the first step.",
        f"# Steps that vary as much as these: rlmux simulate FILE:noise={min(2.0, varying):g}",
    ]
    if unknown:
        lines.append(f"# The log does not show the GPUs of {', '.join(unknown)}: set gpus_per_node and prices.")
    size = f"nodes: {max(nodes.values())}, gpus_per_node: {gpus_per_node}"
    lines += ["cluster:", "  pools:", *(f"    {phase}: {{{size}}}" for phase in ("rollout", "train"))]
    lines += ["policy: rollmux", "pipelines:"]
    for each in estimates:
        lines += _pipeline_lines(each, nodes[each.name])
    return "\n".join(lines) + "\n"


def _pipeline_lines(estimate: LoggedEstimate, num_nodes: int) -> list[str]:
    num_steps = len(estimate.seconds["rollout_s"])
    left_out = f", {estimate.num_left_out} without a rollout or an update" if estimate.num_left_out else ""
    logs = ", ".join(path.name for path in estimate.paths)
    lines = [f"  # {logs} ({estimate.framework}): {num_steps} steps; left out: the first{left_out}"]
    for figure in FIGURES:
        spread = _spread(estimate.seconds[figure])
        lines.append(f"  # {figure}: " + ", ".join(f"{name} {value:g}" for name, value in spread.items()))
    if estimate.rest_s is not None:
        lines.append(f"  # in none of these: {estimate.rest_s:g} s of a step")
    lines.append(f"  - name: {estimate.name}")
    lines.append(f"    steps: {num_steps}")
    if num_nodes > 1:
        lines += [f"    {phase}: {{workers: {num_nodes}}}" for phase in ("rollout", "train")]
    means = ", ".join(f"{key}: {value:g}" for key, value in estimate.estimate.items())
    lines.append(f"    estimate: {{{means}}}")
    return lines

"""From the words of a command line to the values the other rooms take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlmux import plugins
from rlmux.api.files import PlanBy, load_file, load_workload, look_for_plugin
from rlmux.config import Purpose, Spec
from rlmux.core.errors import UserError

if TYPE_CHECKING:
    from rlmux.config.broker_file import BrokerSpec
    from rlmux.sim.api import WorkloadMaker
    from rlmux.sim.models.neighbour_slowdown import Neighbours
    from rlmux.sim.workloads.arrivals import Workload

BACKENDS = ("local", "ray")
PAPERS = ("rollmux", "jigsawrl", "rivals")
MAX_SEEDS = 10_000
"""Simulations of a policy that one command runs at most."""


def load(
    file: str,
    sets: Sequence[str] | None = None,
    policy: str | None = None,
    *,
    purpose: Purpose = Purpose.RUN,
    cluster_of: Spec | None = None,
    profile: Path | None = None,
    plan_by: PlanBy = PlanBy(),
) -> Spec:
    """The file, checked for what is to be done with it, by default to train. `cluster_of`: the run it is meant for.
    `profile`: has the estimates of pipelines without one. `plan_by`: to plan, what other estimates are made of."""
    if policy is not None:
        check_policy("--policy", policy)
    return load_file(
        file, purpose=purpose, overrides=sets or (), policy=policy, cluster_of=cluster_of, profile=profile,
        plan_by=plan_by, on_warning=print_notice,
    )  # fmt: skip


def print_notice(text: str) -> None:
    """Print a message on stderr."""
    print(f"rlmux: {text}", file=sys.stderr)


def load_for_broker(file: str, sets: Sequence[str] | None, policy: str | None) -> BrokerSpec:
    """A broker's file."""
    from rlmux.config.broker_file import load_broker_spec
    from rlmux.policies import POLICIES

    if policy is not None:
        check_policy("--policy", policy)
    spec = load_broker_spec(file, overrides=sets or (), policies=list(POLICIES))
    spec = spec if policy is None else replace(spec, policy=policy)
    look_for_plugin(spec.policy, Path(file).absolute().parent)
    return spec


def policy_names(text: str, ablate: str | None = None) -> tuple[str, ...]:
    """The names of a comma-separated list, each of them a policy, none twice, with their ablations.

    `all` stands for every built-in policy but `optimal`, whose search of a large workload has no end.
    """
    from rlmux.policies import POLICIES, with_ablations

    every = [name for name in POLICIES if name != "optimal"]
    names = tuple(dict.fromkeys(each for name in _listed(text) for each in (every if name == "all" else [name])))
    for name in names:
        check_policy("--policies", name)
    return with_ablations(names, () if ablate is None else _listed(ablate))


def _listed(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list, none twice; an empty list is one empty word."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())) or ("",)


def seed_numbers(text: str) -> tuple[int, ...]:
    """Seeds 0 to N - 1 of `N`; those from A to B, both included, of `A-B`."""
    first, dash, last = text.strip().partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else int(first) > 0):
        numbers = range(int(first), int(last) + 1) if dash else range(int(first))
        if 0 < len(numbers[: MAX_SEEDS + 1]) <= MAX_SEEDS:
            return tuple(numbers)
    raise UserError(
        f"--seeds {text!r}: accepted: how many, from 1 to {MAX_SEEDS:,}, or the first and the last, such as 20-24"
    )


def check_policy(option: str, name: str) -> None:
    """Raises UserError for a name that is neither built in nor a plug-in's, whose module is looked for here too."""
    from rlmux.policies import POLICIES, is_plugin, split_name

    if is_plugin(name):
        plugins.look_in(Path.cwd())
    else:
        check_choice(option, split_name(name)[0], list(POLICIES))


def backend_name(text: str) -> Literal["local", "ray"]:
    check_choice("--backend", text, BACKENDS)
    return "ray" if text == "ray" else "local"


def check_paper(paper: str) -> None:
    check_choice("PAPER", paper, PAPERS)


def check_choice(what: str, value: str, known: Sequence[str]) -> None:
    """Raises UserError for a value that is not one of `known`."""
    if value not in known:
        close = get_close_matches(value, known, n=1)
        hint = f"nearest: {close[0]}; " if close else ""
        raise UserError(f"{what} {value!r}: {hint}accepted: {', '.join(known)}")


def workload_or_run(
    text: str | None, run: Path | None, sets: Sequence[str] | None, profile: Path | None = None
) -> Workload | WorkloadMaker | str:
    """What is to be simulated: a workload, or the pipelines of a finished run as they were measured."""
    if (text is None) == (run is None):
        raise UserError("accepted: either FILE|WORKLOAD or --from-run DIR")
    if run is None:
        assert text is not None
        return load_workload(text, sets or (), print_notice, profile=profile)
    if sets:
        raise UserError(f"--set {sets[0]}: only a YAML file takes overrides, and a run is as it was")
    from rlmux.runtime.records import folders
    from rlmux.sim.workloads.recorded import recorded_workload

    folders.check_run(run)
    return recorded_workload(run, None if profile is None else _neighbours(profile))


def recorded_for_split(run: Path | None, split: int | None) -> Workload | None:
    """The finished run whose completions predict rollouts on other devices; None without one, or without splits."""
    if run is None or split is None:
        return None
    from rlmux.runtime.records import folders
    from rlmux.sim.workloads.recorded import recorded_workload

    folders.check_run(run)
    return recorded_workload(run)


def _neighbours(profile: Path) -> Neighbours | None:
    """Slowdowns by busy neighbours, as far as the profile has them."""
    from rlmux.profiling.interference_probe import fractions_here  # brings torch along, to look at the devices
    from rlmux.sim.models.neighbour_slowdown import load_neighbours

    neighbours, warnings = load_neighbours(profile, fractions_here().device)
    for warning in warnings:
        print_notice(warning)
    return neighbours


def measured(run: Path) -> dict[str, object]:
    """What the run itself took, beside what is predicted."""
    from rlmux.report.reports import read_timeline

    timeline = read_timeline(run)
    return {"policy": timeline.header.get("policy"), "makespan_s": timeline.makespan_s}


def bases_in(spec: Spec) -> list[dict[str, object]]:
    """The frozen bases of the file's adapters in shared memory, each once, with its bytes; none where devices are GPUs,
    which have them."""
    from rlmux.rl.memory.adapter_base import bases_of
    from rlmux.runtime.memory.memory_budget import has_gpu_sized_devices

    if has_gpu_sized_devices(spec.cluster):
        return []
    found = bases_of(pipeline.training for pipeline in spec.pipelines if pipeline.training is not None)
    return [{"base": name, "gb": num_bytes / 1e9, "pipelines": names} for name, (num_bytes, names) in found.items()]

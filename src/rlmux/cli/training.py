"""Hands a spec to the runtime, and a run's folder back to it.

The run's log carries the resolved file, so that a run can go on from its folder alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlmux.cli.live import Live
from rlmux.config import Spec
from rlmux.config.load import parse_spec
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster
from rlmux.core.policy import Policy
from rlmux.policies import POLICIES
from rlmux.report.log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import LOCAL, MakeBackend, RunResult, resume_pipelines, run_pipelines
from rlmux.runtime.run_api import ParseSubmission, submitted_to


def start(
    spec: Spec,
    folder: Path,
    *,
    is_overwriting: bool,
    is_quiet: bool,
    is_kept_open: bool = False,
    backend: str = LOCAL,
    address: str | None = None,
    profile: Path | None = None,
) -> RunResult:
    """A new run. `address`: of a Ray cluster. `profile`: what was measured of sharing these devices."""
    make_backend = backend_maker(backend, address, spec.cluster)
    policy, costs = _profiled(spec.policy, spec.cluster, profile)
    _make_importable(spec.code_folder)
    with Live(spec, is_quiet=is_quiet) as live:
        return run_pipelines(
            spec.cluster,
            [costs(one) for one in submissions(spec)],
            policy,
            folder,
            spec=header(spec),
            is_overwriting=is_overwriting,
            listeners=[live],
            parse=_parser(spec, costs),
            is_kept_open=is_kept_open,
            backend_name=backend,
            make_backend=make_backend,
        )


def go_on(
    folder: Path,
    *,
    is_quiet: bool,
    is_kept_open: bool = False,
    address: str | None = None,
    profile: Path | None = None,
) -> RunResult:
    """The rest of a run that was stopped or killed, with what was submitted to it, on the backend it had."""
    with LogReader(folder) as log:
        backend = str(log.header.get("backend", LOCAL))
    spec = spec_of(folder)
    make_backend = backend_maker(backend, address, spec.cluster)
    policy, costs = _profiled(spec.policy, spec.cluster, profile)
    _make_importable(spec.code_folder)
    parse = _parser(spec, costs)
    given = [costs(one) for one in submissions(spec)]
    for submitted in submitted_to(folder):
        late = parse(submitted.resolved, submitted.source)
        given += [replace(one, submit_at_s=submitted.at_s + one.submit_at_s) for one in late]
    with Live(spec, is_quiet=is_quiet) as live:
        return resume_pipelines(
            spec.cluster,
            given,
            policy,
            folder,
            listeners=[live],
            parse=parse,
            is_kept_open=is_kept_open,
            backend_name=backend,
            make_backend=make_backend,
        )


def backend_maker(backend: str, address: str | None, cluster: Cluster) -> MakeBackend:
    """Raises UserError, before anything is made, where the backend cannot be had: its package is not installed, it
    takes no address, nobody answers there, or there is less than the cluster needs."""
    if backend == LOCAL:
        if address is not None:
            raise UserError(f"--address {address}: only --backend ray takes one")
        return local_backend
    try:
        from rlmux.runtime.ray_backend import join_cluster, ray_backend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--backend ray: ray is not installed; install it with: pip install 'rlmux[ray]'") from None
    join_cluster(cluster, address)
    return partial(ray_backend, address=address)


CountSwitches = Callable[[Submission], Submission]
"""A submission, its pipeline told what its switches take."""


def _profiled(name: str, cluster: Cluster, profile: Path | None) -> tuple[Policy, CountSwitches]:
    """The policy, and what makes switches known. What of the profile cannot be used is told on stderr, with what is
    used instead."""
    if profile is None:
        return POLICIES[name](), lambda submission: submission
    from rlmux.cli import switch_costs
    from rlmux.cli.profiling import fractions_here, policy_named  # brings torch along, to look at the devices

    policy, warnings = policy_named(name, profile)
    costs, more = switch_costs.load(profile, fractions_here().device)
    for warning in (*warnings, *more):
        print(f"rlmux: {warning}", file=sys.stderr)
    return policy, lambda submission: costs.applied_to(submission, cluster)


def _parser(run: Spec, costs: CountSwitches) -> ParseSubmission:
    """Reads what is submitted to this run: its cluster holds, whatever cluster the text names."""

    def parse(text: str, source: str) -> list[Submission]:
        spec = parse_spec(text, source=source, folder=run.code_folder, cluster_of=run)
        _make_importable(spec.code_folder, is_late=True)
        _check_reward_modules(spec)
        return [costs(one) for one in submissions(spec)]

    return parse


def submissions(spec: Spec) -> list[Submission]:
    """The file's pipelines as the runtime takes them."""
    return [
        Submission(pipeline=given.pipeline, config=given.config, submit_at_s=given.submit_at_s)
        for given in spec.pipelines
    ]


def header(spec: Spec) -> Mapping[str, Any]:
    """What the log keeps of the file."""
    return {"source": spec.source, "resolved": spec.resolved}


def spec_of(folder: Path) -> Spec:
    """What a run's log keeps of the file that began it."""
    with LogReader(folder) as log:
        header = log.header
    written = header.get("spec") or {}
    if "resolved" not in written:
        raise UserError(f"{folder}: its log keeps no file to go on from; accepted: a folder that `rlmux run` made")
    spec = parse_spec(written["resolved"], source=f"{folder} ({written['source']})", folder=folder.absolute())
    return replace(spec, policy=str(header["policy"]))


def _make_importable(folder: Path, *, is_late: bool = False) -> None:
    """Reward modules lie here. Worker processes are given this process's module search path.

    Late ones go behind the others: a pipeline that comes later changes nothing for those before it.
    """
    if str(folder) not in sys.path:
        sys.path.insert(len(sys.path) if is_late else 0, str(folder))
        importlib.invalidate_caches()


def _check_reward_modules(spec: Spec) -> None:
    """Raises UserError for a reward module that another folder's module of the same name hides."""
    for given in spec.pipelines:
        module = (given.config.task.reward or "").partition(":")[0].partition(".")[0]
        own = [path for path in (spec.code_folder / f"{module}.py", spec.code_folder / module) if path.exists()]
        found = importlib.util.find_spec(module) if module and own else None
        if found is not None and found.origin and not Path(found.origin).is_relative_to(spec.code_folder):
            raise UserError(
                f"pipeline {given.name}: task.reward: {own[0]} is hidden by {found.origin}, which this run uses "
                "already; accepted: a module with a name of its own"
            )

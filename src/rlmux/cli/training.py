"""Hands a spec to the runtime, and a run's folder back to it.

The run's log carries the resolved file, so that a run can go on from its folder alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmux.cli.live import Live
from rlmux.core.errors import UserError
from rlmux.core.policies import POLICIES
from rlmux.report.log import LogReader
from rlmux.runtime.backend import Submission
from rlmux.runtime.run import RunResult, resume_pipelines, run_pipelines
from rlmux.spec import Spec
from rlmux.spec.load import parse_spec


def start(spec: Spec, folder: Path, *, is_overwriting: bool, is_quiet: bool) -> RunResult:
    """A new run."""
    _make_importable(spec.code_folder)
    with Live(spec, is_quiet=is_quiet) as live:
        return run_pipelines(
            spec.cluster,
            submissions(spec),
            POLICIES[spec.policy](),
            folder,
            spec=header(spec),
            is_overwriting=is_overwriting,
            listeners=[live],
        )


def go_on(folder: Path, *, is_quiet: bool) -> RunResult:
    """The rest of a run that was stopped or killed."""
    with LogReader(folder) as log:
        written = log.header
    spec = _spec_of(written, folder)
    _make_importable(spec.code_folder)
    with Live(spec, is_quiet=is_quiet) as live:
        return resume_pipelines(spec.cluster, submissions(spec), POLICIES[spec.policy](), folder, listeners=[live])


def submissions(spec: Spec) -> list[Submission]:
    """The file's pipelines as the runtime takes them."""
    return [
        Submission(pipeline=given.pipeline, plan=given.plan, submit_at_s=given.submit_at_s) for given in spec.pipelines
    ]


def header(spec: Spec) -> Mapping[str, Any]:
    """What the log keeps of the file."""
    return {"source": spec.source, "resolved": spec.resolved}


def _spec_of(header: Mapping[str, Any], folder: Path) -> Spec:
    written = header.get("spec") or {}
    if "resolved" not in written:
        raise UserError(f"{folder}: its log keeps no file to go on from; accepted: a folder that `rlmux run` made")
    spec = parse_spec(written["resolved"], source=f"{folder} ({written['source']})", folder=folder.absolute())
    return replace(spec, policy=str(header["policy"]))


def _make_importable(folder: Path) -> None:
    """Reward modules lie here. Worker processes are given this process's module search path."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

"""Commands that train: run, compare, resume, chaos."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmux.cli.commands.options import (
    Ablate,
    Address,
    BackendName,
    File,
    Folder,
    Json,
    KeepOpen,
    Out,
    Overwrite,
    PolicyName,
    PolicyNames,
    ProfileFile,
    Resumes,
    Retry,
    Rounds,
    Salvage,
    Sets,
)
from rlmux.core.errors import LogError, UserError

if TYPE_CHECKING:
    from rlmux.api.run_handle import Run
    from rlmux.config import Spec
    from rlmux.runtime.run import RunResult


def run(
    file: File,
    policy: PolicyName = None,
    backend: BackendName = "local",
    profile: ProfileFile = None,
    address: Address = None,
    out: Out = None,
    overwrite: Overwrite = False,
    resumes: Resumes = False,
    keep_open: KeepOpen = False,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Train the file's pipelines on this machine or on a Ray cluster.

    \b
    Example: rlmux run examples/01_two_pipelines.yaml --policy rollmux
             rlmux run examples/01_two_pipelines.yaml --set 'pipelines.*.steps=10'
             rlmux run examples/01_two_pipelines.yaml --out runs/two --resume
    """
    if resumes:
        if _has_run(file, out, overwrite, policy, profile, sets):
            resume(Path(out or ""), address=address, keep_open=keep_open, profile=profile, json=json)
            return
        overwrite = True  # of a start that was killed before its log was written
    with _warming_up(backend):
        from rlmux.api import commands
        from rlmux.cli import inputs
        from rlmux.cli.live import Live

        if policy is not None:
            inputs.check_policy("--policy", policy)
        ended = commands.run(
            file,
            policy=policy,
            overrides=sets or (),
            out=out,
            overwrite=overwrite,
            backend=inputs.backend_name(backend),
            address=address,
            profile=profile,
            keep_open=keep_open,
            display=partial(Live, is_quiet=json),
            on_warning=inputs.print_notice,
        )
    _end(ended, json)


def _warming_up(backend: str) -> AbstractContextManager[None]:
    """Start workers' imports before our own and the file's."""
    from rlmux.runtime.workers.processes import warming_up

    return warming_up() if backend == "local" else nullcontext()


def _has_run(
    file: str, out: str | None, overwrite: bool, policy: str | None, profile: Path | None, sets: list[str] | None
) -> bool:
    """Whether `--resume` finds a run of the file in `--out`.

    Raises UserError for a run of something else, LogError for a damaged log.
    """
    from rlmux.cli import inputs
    from rlmux.runtime import launch
    from rlmux.runtime.records import folders

    if out is None or overwrite:
        raise UserError("--resume: accepted with --out DIR, and without --overwrite")
    folder = Path(out)
    if not (folder / folders.RUN_LOG).is_file():
        return False
    given = inputs.load(file, sets, policy, profile=profile)
    try:
        begun = launch.spec_of(folder)
    except LogError:
        if any(not path.name.startswith((".", folders.RUN_LOG)) for path in folder.iterdir()):
            raise
        return False  # no worker had started
    if (given.resolved, given.policy) != (begun.resolved, begun.policy):
        raise UserError(f"--out {out}: holds a run of another file or policy; accepted: rlmux resume {out}")
    return True


def compare(
    file: File,
    policies: PolicyNames = "solo,colocated,rollmux",
    ablate: Ablate = None,
    rounds: Rounds = 1,
    backend: BackendName = "local",
    profile: ProfileFile = None,
    address: Address = None,
    out: Out = None,
    overwrite: Overwrite = False,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Train the file under several policies and compare them.

    Policies run one after another, with the same seeds and devices; ratios are relative to the first policy.

    \b
    Example: rlmux compare examples/01_two_pipelines.yaml
             rlmux compare examples/01_two_pipelines.yaml --policies solo,rollmux
             rlmux compare examples/13_both_grains.yaml --policies rlmux --ablate all --rounds 3
    """
    from rlmux.api import commands
    from rlmux.cli import inputs, tables
    from rlmux.cli.live import Live

    names, started = inputs.policy_names(policies, ablate), count()

    def display(spec: Spec) -> Live:
        if not json:
            number = next(started)
            of_round = f", round {number // len(names) + 1} of {rounds}" if rounds > 1 else ""
            inputs.print_notice(f"policy {spec.policy} ({number % len(names) + 1} of {len(names)}){of_round}")
        return Live(spec, is_quiet=json)

    table = commands.compare(
        file,
        policies=names,
        rounds=rounds,
        overrides=sets or (),
        out=out,
        overwrite=overwrite,
        backend=inputs.backend_name(backend),
        address=address,
        profile=profile,
        display=display,
        on_warning=inputs.print_notice,
    )
    tables.show_comparison(table, as_json=json)


def resume(
    folder: Folder,
    address: Address = None,
    keep_open: KeepOpen = False,
    profile: ProfileFile = None,
    retry: Retry = None,
    salvage: Salvage = False,
    json: Json = False,
) -> None:
    """Resume a stopped or crashed run.

    Every pipeline resumes from its newest checkpoint and ends with the same weights as an undisturbed run.
    A failed pipeline resumes with --retry, once its cause is fixed.

    \b
    Example: rlmux resume runs/demo
    """
    from rlmux.runtime.records import folders

    folders.check_run(folder, may_be_damaged=salvage)
    if salvage:
        _salvage(folder)
    if folders.is_hosted(folder):
        parent = folder.absolute().parent
        raise UserError(f"{folder}: a lane that its server runs; accepted: rlmux serve FILE --out {parent}")

    from rlmux.api.run_handle import open_run
    from rlmux.cli import inputs
    from rlmux.cli.live import Live

    with folders.salvage_hint(folder):
        ended = open_run(folder).resume(
            retry=retry or (),
            address=address,
            profile=profile,
            keep_open=keep_open,
            display=partial(Live, is_quiet=json, is_resuming=True),
            on_warning=inputs.print_notice,
        )
    _end(ended, json)


def _salvage(folder: Path) -> None:
    """Rebuild the log and print what is missing."""
    from rlmux.runtime import launch
    from rlmux.runtime.records import end_records

    salvaged = end_records.salvage(folder)
    lines = ["its log is whole: nothing to salvage"] if salvaged is None else salvaged.lines()
    known = [given.name for given in launch.spec_of(folder).pipelines]
    for line in [*lines, *end_records.unknown_pipelines(folder, known)]:
        typer.echo(f"rlmux: {folder}: {line}", err=True)


def chaos(
    file: File,
    kills: Annotated[int, typer.Option("--kills", min=1, help="Number of kills in all.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the kinds and moments of the kills.")] = 0,
    policy: PolicyName = None,
    out: Out = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Kill parts of a run at random and compare the weights.

    Runs the file once undisturbed, then with random SIGKILLs of workers and controller and a resume after each.

    \b
    Example: rlmux chaos examples/01_two_pipelines.yaml --kills 20 --seed 1
             rlmux chaos examples/01_two_pipelines.yaml --set 'pipelines.*.steps=20'
    """
    from rlmux.cli import inputs
    from rlmux.runtime.records import folders

    spec = inputs.load(file, sets, policy)
    from rlmux.cli import chaos as chaos_display
    from rlmux.runtime.checks.chaos_kills import run_chaos

    commands = chaos_display.commands_of(file, policy=spec.policy, sets=sets or ())
    report_progress = chaos_display.progress_printer(is_quiet=json)
    with folders.chosen(out, f"{Path(file).stem}-chaos") as folder:
        result = run_chaos(commands, folder, num_kills=kills, seed=seed, print_line=report_progress)
    chaos_display.show_chaos(result, folder, as_json=json)
    raise typer.Exit(0 if result.is_equal and not result.orphans else 1)


def _planned(result: RunResult) -> Sequence[dict[str, Any]]:
    """What `plan` would have said of each phase, beside what was measured."""
    from rlmux.profiling.recorded_steps import plan_errors
    from rlmux.runtime import launch
    from rlmux.runtime.gpus_here import name_of_gpu

    return plan_errors(launch.spec_of(result.folder).resolved, result.summary, name_of_gpu())


def _end(ended: Run, as_json: bool) -> None:
    """Show a run that ended or was stopped, and exit accordingly."""
    from rlmux.cli import inputs, output, tables, verification
    from rlmux.cli.exit_codes import INTERRUPTED

    result = ended.result
    assert result is not None, "it was trained in this process"
    summary = result.summary if as_json else {**result.summary, "planned": _planned(result)}
    if result.was_over:
        inputs.print_notice("nothing to resume: every pipeline is over")
    for tracker, problem in result.trackers.items():
        inputs.print_notice(f"{tracker} {problem}")
    if result.is_complete:
        tables.show_run(summary, result.folder, as_json=as_json)
        failed = [name for name, row in result.summary["pipelines"].items() if row["status"] == "failed"]
        if failed and not as_json:
            retries = " ".join(f"--retry {name}" for name in failed)
            typer.echo(f"rlmux: once the cause is mended: rlmux resume {result.folder} {retries}", err=True)
        if not as_json and (receipt := verification.receipt(result.summary, result.folder)):
            inputs.print_notice(receipt)
        raise typer.Exit(tables.exit_code(result.summary))
    try:
        tables.show_run(summary, result.folder, as_json=as_json)
        typer.echo(f"rlmux: stopped; resume with: rlmux resume {result.folder}", err=True)
    except OSError:  # what closed the output may have stopped the run, too
        output.abandon(sys.stdout, sys.stderr)
    raise typer.Exit(INTERRUPTED)

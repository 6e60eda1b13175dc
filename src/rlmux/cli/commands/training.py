"""Commands that train: run, compare, resume, chaos."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmux.cli.commands.options import (
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
    Retry,
    Salvage,
    Sets,
)
from rlmux.core.errors import UserError

if TYPE_CHECKING:
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
    keep_open: KeepOpen = False,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Train the file's pipelines here or on a Ray cluster.

    \b
    Example: rlmux run examples/01_two_pipelines.yaml --policy rollmux --set 'pipelines.*.steps=10'
    """
    from rlmux.cli import inputs
    from rlmux.runtime import folders

    inputs.check_backend(backend)
    spec = inputs.load_for_run(file, sets, policy, may_be_empty=keep_open)
    with folders.chosen(out, f"{Path(file).stem}-{spec.policy}") as folder:
        result = _start(
            spec,
            folder,
            profile=profile,
            backend=backend,
            address=address,
            is_quiet=json,
            is_overwriting=overwrite,
            is_kept_open=keep_open,
        )
        _end(result, json)


def compare(
    file: File,
    policies: PolicyNames = "solo,colocated,rollmux",
    backend: BackendName = "local",
    profile: ProfileFile = None,
    address: Address = None,
    out: Out = None,
    overwrite: Overwrite = False,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Train under several policies, and compare them.

    Every policy gets the same file and seeds, one after another on the same devices; ratios are to the first policy.

    \b
    Example: rlmux compare examples/01_two_pipelines.yaml --policies solo,colocated,rollmux
    """
    from rlmux.cli import inputs
    from rlmux.runtime import folders

    inputs.check_backend(backend)
    names = inputs.policy_names(policies)
    spec = inputs.load_for_run(file, sets, None)
    from rlmux.cli import tables
    from rlmux.runtime import comparison

    def start(one: Spec, into: Path) -> RunResult:
        if not json:
            place = f"{names.index(one.policy) + 1} of {len(names)}"
            typer.echo(f"rlmux: policy {one.policy} ({place})", err=True)
        return _start(one, into, profile=profile, backend=backend, address=address, is_quiet=json)

    with folders.chosen(out, f"{Path(file).stem}-compare") as folder:
        table = comparison.run_each(spec, names, folder, start, is_overwriting=overwrite)
    tables.show_comparison(table, as_json=json)


def _start(
    spec: Spec,
    folder: Path,
    *,
    profile: Path | None,
    backend: str,
    address: str | None,
    is_quiet: bool,
    is_overwriting: bool = False,
    is_kept_open: bool = False,
) -> RunResult:
    """Train a file's pipelines in a new folder, and show how it goes."""
    from rlmux.cli import inputs
    from rlmux.cli.live import Live
    from rlmux.runtime import launch

    chosen, estimate_switch = inputs.policy_and_switches(spec, profile)
    with Live(spec, is_quiet=is_quiet) as live:
        return launch.start_run(
            spec,
            folder,
            policy=chosen,
            estimate_switch=estimate_switch,
            listeners=[live],
            is_overwriting=is_overwriting,
            is_kept_open=is_kept_open,
            backend=backend,
            address=address,
        )


def resume(
    folder: Folder,
    address: Address = None,
    keep_open: KeepOpen = False,
    profile: ProfileFile = None,
    retry: Retry = None,
    salvage: Salvage = False,
    json: Json = False,
) -> None:
    """Continue a run that was stopped or that crashed.

    Every pipeline goes on from its newest checkpoint; the weights come out as if nothing had happened.
    One that failed goes on with --retry, once the cause is mended.

    \b
    Example: rlmux resume runs/demo
    """
    from rlmux.runtime import folders

    folders.check_run(folder, may_be_damaged=salvage)
    if salvage:
        _salvage(folder)
    if folders.is_of_server(folder):
        words = {"address": address, "keep-open": keep_open, "profile": profile, "retry": retry, "json": json}
        _serve_again(folder, [f"--{word}" for word, value in words.items() if value])
        return

    from rlmux.cli import inputs
    from rlmux.cli.live import Live
    from rlmux.runtime import launch
    from rlmux.runtime.preflight import complaints_about

    with folders.telling_of_salvage(folder):
        spec = launch.spec_of(folder)
        chosen, estimate_switch = inputs.policy_and_switches(spec, profile)
        with Live(spec, is_quiet=json, is_resuming=True) as live:
            result = launch.resume_run(
                spec,
                folder,
                policy=chosen,
                estimate_switch=estimate_switch,
                listeners=[live],
                is_kept_open=keep_open,
                address=address,
                retry=retry or (),
                check_training=complaints_about,
            )
    if result.was_over:
        typer.echo("rlmux: nothing to resume: every pipeline is over", err=True)
    _end(result, json)


def _serve_again(folder: Path, given: Sequence[str]) -> None:
    """A server goes on where its clients know it. Raises UserError for options of runs."""
    from rlmux.cli.commands import serving

    if given:
        raise UserError(f"{given[0]}: {folder} is the folder of a server; accepted: rlmux serve --resume {folder}")
    serving.go_on(folder)


def _salvage(folder: Path) -> None:
    """Rebuild the log, and say what is missing."""
    from rlmux.runtime import launch, salvage

    salvaged = salvage.salvage(folder)
    lines = ["its log is whole: nothing to salvage"] if salvaged is None else salvaged.lines()
    known = [given.name for given in launch.spec_of(folder).pipelines]
    for line in [*lines, *salvage.unknown_pipelines(folder, known)]:
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
    """Kill parts of a run at random; compare the weights.

    Runs the file undisturbed once, then with SIGKILLs of workers and the controller, resumed each time.

    \b
    Example: rlmux chaos examples/01_two_pipelines.yaml --kills 20 --seed 1 --set 'pipelines.*.steps=20'
    """
    from rlmux.cli import inputs
    from rlmux.runtime import folders

    spec = inputs.load_for_run(file, sets, policy)
    from rlmux.cli import chaos as chaos_display
    from rlmux.runtime.chaos import run_chaos

    commands = chaos_display.commands_of(file, policy=spec.policy, sets=sets or ())
    say = chaos_display.speaker(is_quiet=json)
    with folders.chosen(out, f"{Path(file).stem}-chaos") as folder:
        result = run_chaos(commands, folder, num_kills=kills, seed=seed, say=say)
    chaos_display.show_chaos(result, folder, as_json=json)
    raise typer.Exit(0 if result.is_equal and not result.orphans else 1)


def _end(result: RunResult, as_json: bool) -> None:
    """Show a run that ended or was stopped, and exit accordingly."""
    from rlmux.cli import output, tables
    from rlmux.cli.exit_codes import INTERRUPTED

    if result.is_complete:
        tables.show_run(result.summary, result.folder, as_json=as_json)
        failed = [name for name, one in result.summary["pipelines"].items() if one["status"] == "failed"]
        if failed and not as_json:
            retries = " ".join(f"--retry {name}" for name in failed)
            typer.echo(f"rlmux: once the cause is mended: rlmux resume {result.folder} {retries}", err=True)
        raise typer.Exit(tables.exit_code(result.summary))
    try:
        tables.show_run(result.summary, result.folder, as_json=as_json)
        typer.echo(f"rlmux: stopped; resume with: rlmux resume {result.folder}", err=True)
    except OSError:  # what closed the output may have stopped the run, too
        output.abandon(sys.stdout, sys.stderr)
    raise typer.Exit(INTERRUPTED)

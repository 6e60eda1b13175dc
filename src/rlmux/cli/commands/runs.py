"""Commands on one run: its report, its pipelines and their state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlmux.cli.commands.options import File, Folder, Json, Place, PlaceOrOwn, Sets
from rlmux.core.errors import UserError

PipelineName = Annotated[str, typer.Argument(metavar="NAME", help="Name of one of its pipelines.")]


def report(
    folder: Folder,
    graph: Annotated[
        str | None,
        typer.Option(
            "--graph", metavar="NAME:STEP", help="Draw the sub-stages of one step, as planned and as it went."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's summary, timeline and trace from its log.

    The folder gets summary.json, trace.json (for ui.perfetto.dev) and timeline.html (for any browser).

    \b
    Example: rlmux report runs/demo
    """
    from rlmux.cli import tables
    from rlmux.runtime.records import folders

    folders.check_run(folder)
    with folders.salvage_hint(folder):
        if graph is not None:
            from rlmux.report.figures.graph_svg import write_graph
            from rlmux.runtime.launch import scheduler_of

            typer.echo(write_graph(folder, graph, partial(scheduler_of, folder)))
            return

        from rlmux.report.reports import write_report

        tables.show_run(write_report(folder), folder, as_json=json)


def submit(
    file: File,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIR|URL",
            help="Folder of a running run, or http://HOST:PORT/lanes/NAME of a server; by default your own service.",
        ),
    ] = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Add the file's pipelines to a running run, or to a service.

    The run keeps its own cluster, policy and shares. A server receives the file's code and rows too, and accepts a
    submission exactly once, even across restarts.

    \b
    Example: rlmux submit examples/04_tool_use.yaml --to runs/demo
    """
    from rlmux.cli import remote
    from rlmux.client.own_service import own_url

    raise typer.Exit(remote.submit(file, to or own_url(), sets, as_json=json))


def cancel(place: Place, name: PipelineName) -> None:
    """Cancel one pipeline of a running run.

    The pipeline ends at its next safe point and keeps its checkpoints; the others take over its devices.

    \b
    Example: rlmux cancel runs/demo sort
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.send_command(place, 'cancel', name)}")


def retry(
    place: Place,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of failed pipelines.")],
    json: Json = False,
) -> None:
    """Retry failed pipelines of a running run, from their newest checkpoints.

    Each waits for its turn like a submission. Once the run has ended: rlmux resume DIR --retry NAME.

    \b
    Example: rlmux retry runs/demo sort
    """
    from rlmux.cli import remote

    raise typer.Exit(remote.retry(place, names, as_json=json))


def remove(
    place: Place,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Names of pipelines that have ended; without: the whole run."),
    ] = None,
    only: Annotated[
        Literal["checkpoints", "samples"] | None,
        typer.Option("--only", metavar="checkpoints|samples", help="Remove these alone; by default all files."),
    ] = None,
    lane: Annotated[
        str | None, typer.Option("--lane", metavar="NAME", help="A lane that the server's file no longer names.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the bytes; remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove a whole run or lane without a question.")] = False,
    json: Json = False,
) -> None:
    """Remove the files of ended pipelines, of a run or of a lane.

    The log keeps the steps, use and cost of a removed pipeline, with who removed it and when. A run's folder is removed
    with its log.

    \b
    Example: rlmux remove runs/demo sort --only checkpoints
             rlmux remove runs/demo --yes
    """
    from rlmux.cli import remote

    if names and lane is None:
        raise typer.Exit(remote.remove(place, names, only or "all", is_dry=dry_run, as_json=json))
    if names or only is not None:
        raise UserError(f"{place}: accepted: names of pipelines with or without --only, or --lane alone")
    remote.remove_whole(place, lane, is_sure=yes, is_dry=dry_run, as_json=json)


def stop(
    place: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a run, a server, a lane or a broker.")],
    json: Json = False,
) -> None:
    """Stop a run, server, lane or broker, as Ctrl-C would, and wait for its end.

    Finished work is kept; the output names the command that resumes it. Lanes keep running without their server.

    \b
    Example: rlmux stop runs/demo
    """
    from rlmux.cli import remote

    remote.stop(place, as_json=json)


def why(place: Place, name: PipelineName, json: Json = False) -> None:
    """Explain why a pipeline waits, or where the time of its steps goes.

    Waiting: what would start it now. Running or over: seconds of a step alone, and what each cause adds.

    \b
    Example: rlmux why runs/demo sort
    """
    from rlmux.cli import remote

    remote.show_why(place, name, as_json=json)


def hold(place: Place, name: PipelineName) -> None:
    """Keep a waiting pipeline from starting until `release`.

    \b
    Example: rlmux hold runs/demo sort
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.send_command(place, 'hold', name)}")


def release(place: Place, name: PipelineName) -> None:
    """Allow a held pipeline to start.

    \b
    Example: rlmux release runs/demo sort
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.send_command(place, 'release', name)}")


def rank(
    place: Place,
    name: PipelineName,
    rank: Annotated[int, typer.Argument(metavar="RANK", help="Lower ranks are placed first.")],
) -> None:
    """Move a waiting pipeline forward or back among its user's pipelines.

    \b
    Example: rlmux rank runs/demo sort -3
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.send_command(place, 'rank', name, rank=rank)}")


def park(place: Place, name: PipelineName) -> None:
    """Checkpoint a pipeline at its next step boundary and free its devices.

    It waits until it is unparked, and trains the same weights as if it had never been parked.

    \b
    Example: rlmux park runs/demo sort
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.send_command(place, 'park', name)}")


def notice(
    folder: Folder,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node, such as rollout-0.")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="Seconds until the node is lost; unfinished steps there restart.")
    ] = 120.0,
    back: Annotated[bool, typer.Option("--back", help="The node is back, or stays.")] = False,
) -> None:
    """Announce that a node will be lost, so that its pipelines leave it.

    Nothing new is placed there. Pipelines leave at their next step boundaries and resume elsewhere from a checkpoint,
    with the same weights.

    \b
    Example: rlmux notice runs/demo rollout-0 --seconds 120
    """
    from rlmux.cli import remote

    place = str(folder)
    outcome = (
        remote.send_command(place, "node_back", node)
        if back
        else remote.send_command(place, "notice", node, seconds=seconds)
    )
    typer.echo(f"{node}: {outcome}")


def unpark(place: Place, name: PipelineName) -> None:
    """Resume a parked pipeline.

    \b
    Example: rlmux unpark runs/demo sort
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.send_command(place, 'unpark', name)}")


def usage(
    place: PlaceOrOwn = None,
    shares: Annotated[
        str | None, typer.Option("--set", metavar="FILE", help="Apply the section shares of this file.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Device-hours from then on: a period such as 30d, or a date."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="End of --since; by default now.")
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="KEY", help="Rows: project, user, pipeline, cause, lane or pool.")
    ] = "project",
    json: Json = False,
) -> None:
    """Show the usage of users and projects against their fair shares; with --since, where device time went.

    With --since, DIR may be a folder with runs and services in it: all lanes and old runs count.

    \b
    Example: rlmux usage runs/demo
             rlmux usage runs --since 30d --by pipeline
    """
    from rlmux.cli import lookups, remote

    place = place or _own()
    if since is not None:
        if shares is not None:
            raise UserError("--set: accepted without --since")
        lookups.show_spent(place, since, until, by, as_json=json)
        return
    if until is not None:
        raise UserError("--until: accepted with --since")
    if shares is not None:
        remote.set_shares(place, shares)
    remote.show_usage(place, as_json=json)


def status(
    place: PlaceOrOwn = None,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once, on a terminal too.")] = False,
    all: Annotated[bool, typer.Option("--all", help="Show removed pipelines too.")] = False,
    json: Json = False,
) -> None:
    """Show a run's pipelines and the holder of each device.

    On a terminal the tables are redrawn while the run lasts; Ctrl-C does not stop the run.

    \b
    Example: rlmux status runs/demo
    """
    from rlmux.cli import remote
    from rlmux.runtime.records import folders

    place = place or _own()
    with folders.salvage_hint(Path(place)):
        remote.show_status(place, as_json=json, is_once=once, with_removed=all)


def _own() -> str:
    """Address of this user's service, for a command without a place. Raises UserError unless it runs."""
    from rlmux.client.own_service import own_url

    return own_url("DIR|URL")


def logs(
    place: Place,
    name: PipelineName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the pipeline is over.")] = False,
) -> None:
    """Print the output of a pipeline's processes, tracebacks included.

    \b
    Example: rlmux logs runs/demo sort -f
    """
    from rlmux.cli import remote

    remote.show_logs(place, name, is_following=follow)


def verify(
    folder: Folder,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of its pipelines; by default all.")] = None,
    all_steps: Annotated[
        bool, typer.Option("--all", help="Verify every step; takes as long as training alone.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sample of steps.")] = 0,
    json: Json = False,
) -> None:
    """Retrain steps of a finished run's pipelines alone and compare weights.

    By default about 1 step in 20, from the checkpoints that the run kept. "equal at 4 of 80 steps" says that sharing
    changed nothing there, --all that it changed nothing. Exit code 1 if a step or a checkpoint differs.

    \b
    Example: rlmux verify runs/demo sort
             rlmux verify runs/demo --all
    """
    from rlmux.runtime.records import folders

    folders.check_run(folder)
    from rlmux.cli import inputs, verification

    verify_run = verification.chosen(folder, sample_seed=None if all_steps else seed)
    report_progress = (lambda text: None) if json else inputs.print_notice
    verdicts = verify_run(folder, [] if name is None else [name], print_line=report_progress)
    raise typer.Exit(verification.show(verdicts, as_json=json))

"""Every command: its words, the function of another room that does the work, and the display of what came out.

Imports are made when a command runs, so that `--help`, `simulate` and `plan` stay light.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmux.core.errors import UserError

if TYPE_CHECKING:
    from rlmux.config import Spec
    from rlmux.runtime.run import RunResult

app = typer.Typer(
    name="rlmux",
    help="Run many LLM RL post-training pipelines together on the GPUs you have.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

File = Annotated[str, typer.Argument(metavar="FILE", help="YAML file with cluster and pipelines (docs/spec.md).")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Lay a value over the file's; may be repeated."),
]
PolicyName = Annotated[str | None, typer.Option("--policy", help="Policy that decides; by default the file's own.")]
PolicyNames = Annotated[str, typer.Option("--policies", help="Policies to compare, separated by commas.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys, and nothing else, on stdout.")]
Out = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Folder to make; by default runs/FILE-POLICY-TIME."),
]
Pictures = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write pictures (SVG, PNG) and a page there.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")]
KeepOpen = Annotated[bool, typer.Option("--keep-open", help="When all pipelines are over, wait for more until Ctrl-C.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="File that `rlmux profile` wrote here: what sharing a device and switches cost.",
    ),
]
BackendName = Annotated[str, typer.Option("--backend", help="Where workers live: local, ray.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Address of a Ray cluster; by default this machine's own."),
]


@app.callback(invoke_without_command=True)
def _no_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
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
    """Train the file's pipelines, for real, on this machine or a Ray cluster.

    \b
    Example: rlmux run examples/01_two_pipelines.yaml --policy rollmux --set 'pipelines.*.steps=10'
    """
    from rlmux.cli import folders, inputs

    inputs.check_backend(backend)
    spec = inputs.load_for_run(file, sets, policy)
    folder = folders.choose(out, f"{Path(file).stem}-{spec.policy}")

    from rlmux.cli.live import Live
    from rlmux.runtime import launch

    chosen, estimate_switch = inputs.policy_and_switches(spec.policy, profile)
    with Live(spec, is_quiet=json) as live:
        result = launch.start_run(
            spec,
            folder,
            policy=chosen,
            estimate_switch=estimate_switch,
            listeners=[live],
            is_overwriting=overwrite,
            is_kept_open=keep_open,
            backend=backend,
            address=address,
        )
    _end(result, json)


@app.command()
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
    """Train under each of several policies: a table of ratios.

    Every policy gets the same file and seeds, one after another on this machine; ratios are to the first one.

    \b
    Example: rlmux compare examples/01_two_pipelines.yaml --policies solo,colocated,rollmux
    """
    from rlmux.cli import folders, inputs

    inputs.check_backend(backend)
    names = inputs.policy_names(policies)
    spec = inputs.load_for_run(file, sets, None)
    folder = folders.choose(out, f"{Path(file).stem}-compare")

    from rlmux.cli import tables
    from rlmux.cli.live import Live
    from rlmux.runtime import comparison, launch

    def start(one: Spec, into: Path) -> RunResult:
        chosen, estimate_switch = inputs.policy_and_switches(one.policy, profile)
        with Live(one, is_quiet=json) as live:
            return launch.start_run(
                one,
                into,
                policy=chosen,
                estimate_switch=estimate_switch,
                listeners=[live],
                backend=backend,
                address=address,
            )

    table = comparison.run_each(spec, names, folder, start, is_overwriting=overwrite)
    tables.show_comparison(table, as_json=json)


@app.command()
def simulate(
    workload: Annotated[
        str | None,
        typer.Argument(metavar="FILE|WORKLOAD", help="YAML file, CSV file, or a workload by name, such as weave."),
    ] = None,
    policies: PolicyNames = "solo,colocated,rollmux",
    from_run: Annotated[
        Path | None,
        typer.Option("--from-run", metavar="DIR", help="Instead: a finished run, with the seconds measured in it."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="With --from-run: what busy neighbours cost (`rlmux profile`)."),
    ] = None,
    count_decisions: Annotated[
        bool, typer.Option("--count-decisions", help="Decisions take the time that they take here, not none.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds; figures are means over them.")] = 1,
    out: Pictures = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Simulate a workload under each policy: cost, slowdowns, GPUs.

    Needs no GPU and no torch. With --from-run: what that run would have taken under other policies.

    \b
    Example: rlmux simulate weave --policies solo,rollmux --seeds 5
    """
    from rlmux.cli import inputs, progress, tables

    names = inputs.policy_names(policies)
    made = inputs.workload_or_run(workload, from_run, sets, profile)

    from rlmux.sim import api

    with progress.bar("simulations", is_quiet=json) as report_progress:
        result = api.simulate(
            made,
            policies=names,
            num_seeds=seeds,
            progress=report_progress,
            out=out,
            counts_decisions=count_decisions,
        )
    if from_run is not None:
        result["measured"] = inputs.measured(from_run)
    tables.show_simulation(result, as_json=json)


@app.command()
def plan(file: File, policy: PolicyName = None, sets: Sets = None, json: Json = False) -> None:
    """Show placement, predicted slowdowns and cost per hour.

    Starts nothing.

    \b
    Example: rlmux plan examples/07_cluster_what_if.yaml --policy rollmux
    """
    from rlmux.cli import inputs, tables

    spec = inputs.load_for_plan(file, sets, policy)

    from rlmux.sim import api

    tables.show_plan(api.plan(inputs.workload_of(spec), policy=spec.policy), as_json=json)


@app.command()
def report(
    folder: Folder,
    graph: Annotated[
        str | None, typer.Option("--graph", metavar="NAME:STEP", help="Draw the sub-stages of one step as SVG.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's summary, timeline and trace from its log.

    The folder gets summary.json, trace.json (for ui.perfetto.dev) and timeline.html (for any browser).

    \b
    Example: rlmux report runs/demo
    """
    from rlmux.cli import folders, tables

    folders.check_run(folder)
    if graph is not None:
        from rlmux.report.graph_svg import write_graph

        typer.echo(write_graph(folder, graph))
        return

    from rlmux.report.api import write_report

    tables.show_run(write_report(folder), folder, as_json=json)


@app.command()
def resume(
    folder: Folder,
    address: Address = None,
    keep_open: KeepOpen = False,
    profile: ProfileFile = None,
    json: Json = False,
) -> None:
    """Continue a run that was stopped or that crashed.

    The weights come out as if nothing had happened.

    \b
    Example: rlmux resume runs/demo
    """
    from rlmux.cli import folders

    folders.check_run(folder)

    from rlmux.cli import inputs
    from rlmux.cli.live import Live
    from rlmux.runtime import launch

    spec = launch.spec_of(folder)
    chosen, estimate_switch = inputs.policy_and_switches(spec.policy, profile)
    with Live(spec, is_quiet=json) as live:
        result = launch.resume_run(
            spec,
            folder,
            policy=chosen,
            estimate_switch=estimate_switch,
            listeners=[live],
            is_kept_open=keep_open,
            address=address,
        )
    if result.was_over:
        typer.echo("rlmux: nothing to resume: every pipeline is over", err=True)
    _end(result, json)


@app.command()
def submit(
    file: File,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder of a run that goes on.")],
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Add the file's pipelines to a run while it runs.

    The run's cluster and policy hold, whatever the file says of them.

    \b
    Example: rlmux submit examples/04_tool_use.yaml --to runs/demo
    """
    from rlmux.cli import remote

    raise typer.Exit(remote.show_submission(remote.submit(file, to, sets), as_json=json))


@app.command()
def cancel(
    folder: Folder, name: Annotated[str, typer.Argument(metavar="NAME", help="Name of one of its pipelines.")]
) -> None:
    """End one pipeline of a run that goes on.

    It ends at its next safe point and keeps its checkpoints; the others take over what it held.

    \b
    Example: rlmux cancel runs/demo sort
    """
    from rlmux.cli import remote

    typer.echo(f"{name}: {remote.cancel(folder, name)['outcome']}")


@app.command()
def status(
    folder: Folder,
    once: Annotated[bool, typer.Option("--once", help="Print it once, on a terminal too.")] = False,
    json: Json = False,
) -> None:
    """Show how a run stands: its pipelines, and who holds each device.

    On a terminal it is redrawn while the run goes on; Ctrl-C leaves the run alone.

    \b
    Example: rlmux status runs/demo
    """
    from rlmux.cli import remote

    remote.show_status(folder, as_json=json, is_once=once)


@app.command()
def logs(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of one of its pipelines.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the pipeline is over.")] = False,
) -> None:
    """Print what a pipeline's processes printed, tracebacks of your code included.

    \b
    Example: rlmux logs runs/demo sort -f
    """
    from rlmux.cli import remote

    remote.show_logs(folder, name, is_following=follow)


@app.command()
def chaos(
    file: File,
    kills: Annotated[int, typer.Option("--kills", min=1, help="How many kills in all.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides kinds and moments of the kills.")] = 0,
    policy: PolicyName = None,
    out: Out = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Kill parts of a run at random; compare the weights.

    Runs the file undisturbed once, then with SIGKILLs of workers, hosts and the controller, resumed each time.

    \b
    Example: rlmux chaos examples/01_two_pipelines.yaml --kills 20 --seed 1 --set 'pipelines.*.steps=20'
    """
    from rlmux.cli import folders, inputs

    spec = inputs.load_for_run(file, sets, policy)
    folder = folders.choose(out, f"{Path(file).stem}-chaos")

    from rlmux.cli import chaos as chaos_display
    from rlmux.runtime.chaos import run_chaos

    commands = chaos_display.commands_of(file, policy=spec.policy, sets=sets or ())
    say = chaos_display.speaker(is_quiet=json)
    result = run_chaos(commands, folder, num_kills=kills, seed=seed, say=say)
    chaos_display.show_chaos(result, folder, as_json=json)
    raise typer.Exit(0 if result.is_equal and not result.orphans else 1)


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine can do, and what is missing.

    Whatever is missing comes with what that means and what to do about it.

    \b
    Example: rlmux doctor
    """
    from rlmux.cli.doctor import examine, show

    show(examine(), as_json=json)


@app.command()
def profile(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Whose switches to measure; without, a usual pipeline's.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="A short look, too noisy to plan with.")] = False,
    json: Json = False,
) -> None:
    """Measure how two pieces of work slow each other, and what switches between pipelines cost.

    Every pair of prefill, decoding, log-probs and updates on one device, at every share of it that can be made here;
    decoding and updates on two neighbouring devices. Then how long the file's own states take to leave the device for
    host memory or disk, and to come back.

    \b
    Example: rlmux profile examples/01_two_pipelines.yaml --out profile.json
    """
    from rlmux.cli import inputs, profile_tables, progress
    from rlmux.profiling import interference, neighbours
    from rlmux.profiling.profile_file import Profile
    from rlmux.profiling.switch_times import measure_switches, usual_config

    interference.check_device(device)
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise UserError(f"--out {out}: accepted: a file in a folder that exists")
    configs = [one.config for one in inputs.load_for_run(file, None, None).pipelines] if file else []
    configs = configs or [usual_config(device)]
    effort = interference.QUICK if quick else {}
    with progress.bar("pairs", is_quiet=json) as report_progress:
        table = interference.measure_interference(device, progress=report_progress, **effort)
    with progress.bar("neighbours", is_quiet=json) as report_progress:
        ratios = neighbours.measure_neighbours(device, progress=report_progress, **effort)
    with progress.bar("switches", is_quiet=json) as report_progress:
        switches = measure_switches(configs, device, folder, num_rounds=1 if quick else 5, progress=report_progress)
    measured = Profile(table=table, switches=switches, neighbours=neighbours.neighbours_of(device, ratios))
    measured.save(out)
    without = neighbours.missing_neighbours(device)
    profile_tables.show(measured, out, as_json=json, without_neighbours=without)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="rollmux or jigsawrl.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds; figures are means over them.")] = 5,
    out: Pictures = None,
    json: Json = False,
) -> None:
    """Recompute a paper's figures: published, ours, deviation.

    \b
    Example: rlmux reproduce rollmux --seeds 5
    """
    from rlmux.cli import inputs, progress, tables

    inputs.check_paper(paper)

    from rlmux import papers

    with progress.bar("simulations", is_quiet=json) as report_progress:
        result = papers.reproduce(paper, num_seeds=seeds, progress=report_progress, out=out)
    tables.show_reproduction(result, as_json=json)


@app.command()
def version() -> None:
    """Print the version.

    \b
    Example: rlmux version
    """
    from importlib.metadata import version as installed_version

    typer.echo(f"rlmux {installed_version('rlmux')}")


def _end(result: RunResult, as_json: bool) -> None:
    """Show a run that ended or was stopped, and exit accordingly."""
    from rlmux.cli import tables
    from rlmux.cli.exit_codes import INTERRUPTED

    tables.show_run(result.summary, result.folder, as_json=as_json)
    if not result.is_complete:
        typer.echo(f"rlmux: stopped; resume with: rlmux resume {result.folder}", err=True)
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(tables.exit_code(result.summary))

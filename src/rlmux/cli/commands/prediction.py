"""Commands that train nothing: simulate, plan, estimate, whatif, reproduce."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rlmux.cli.commands.options import Ablate, Estimates, File, Folder, Json, Pictures, PolicyName, PolicyNames, Sets
from rlmux.core.errors import UserError


def simulate(
    workload: Annotated[
        str | None,
        typer.Argument(metavar="FILE|WORKLOAD", help="YAML file, CSV file, or a workload by name, such as weave."),
    ] = None,
    policies: PolicyNames = "solo,colocated,rollmux",
    ablate: Ablate = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from-run", metavar="DIR", help="Simulate a finished run instead, from its measured seconds."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Estimates of `rlmux profile` for pipelines without one; with --from-run: what busy neighbours cost.",
        ),
    ] = None,
    count_decisions: Annotated[
        bool, typer.Option("--count-decisions", help="Count the seconds that decisions take here, instead of none.")
    ] = False,
    moves_saved: Annotated[
        bool,
        typer.Option("--moves-saved", help="Simulate again without relocations, for the dollars that they saved."),
    ] = False,
    spot: Annotated[
        Path | None,
        typer.Option("--spot", metavar="FILE", help="Spot prices and reclaims of nodes (docs/how-it-works/spot.md)."),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", help="Number of seeds, or those from A to B as A-B; figures are means over them.")
    ] = "1",
    out: Pictures = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Simulate a workload under each policy and compare cost, slowdowns and GPUs.

    Needs no GPU and no torch. With --from-run it predicts a finished run under other policies.

    \b
    Example: rlmux simulate weave --policies solo,rollmux --seeds 5
             rlmux simulate pair --policies rlmux --ablate tails,fractions
    """
    from rlmux.api.commands import with_worth
    from rlmux.cli import inputs, progress, tables

    names, numbers = inputs.policy_names(policies, ablate), inputs.seed_numbers(seeds)
    made = inputs.workload_or_run(workload, from_run, sets, profile)

    from rlmux.sim import api

    on_spot = made if spot is None else api.with_spot(made, spot)

    with progress.bar("simulations", is_quiet=json) as report_progress:
        simulated = api.simulate(
            on_spot,
            policies=names,
            seeds=numbers,
            progress=report_progress,
            out=out,
            counts_decisions=count_decisions,
            prices_moves=moves_saved,
        )
    result = with_worth(simulated)
    if from_run is not None:
        result["measured"] = inputs.measured(from_run)
    tables.show_simulation(result, as_json=json)


def plan(
    file: File,
    policy: PolicyName = None,
    split: Annotated[
        int | None,
        typer.Option(
            "--split", metavar="N", min=2, help="Also: the best split of N nodes for each pipeline by itself."
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from-run", metavar="DIR", help="Seconds that a run of pipelines of these names measured."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write a picture of the costs there (SVG, PNG).")
    ] = None,
    profile: Estimates = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME", help="GPU of pools that name none, such as H100; by default this machine's."
        ),
    ] = None,
    answer_tokens: Annotated[
        float | None,
        typer.Option("--answer-tokens", metavar="N", min=1, help="Mean tokens of an answer, if known: closer seconds."),
    ] = None,
    sets: Sets = None,
    json: Json = False,
) -> int:
    """Show placements, predicted slowdowns, cost per hour with its parts, seconds of each step, and worker memory.

    Starts nothing. Seconds that neither the file nor --profile has are computed from the sizes of models and GPUs, each
    with its range and basis. Exit code 1 if a pipeline is refused because it can never run there. A worker that needs
    more memory than its device has is an error, as in `run`.

    \b
    Example: rlmux plan examples/07_cluster_what_if.yaml --policy rollmux
             rlmux plan examples/14_eight_gpus.yaml --gpu h100
    """
    from rlmux.api.files import PlanBy
    from rlmux.cli import inputs, memory_rows, tables
    from rlmux.config import Purpose

    spec = inputs.load(
        file,
        sets,
        policy,
        purpose=Purpose.PLAN,
        profile=profile,
        plan_by=PlanBy(run=from_run, gpu=gpu, answer_tokens=answer_tokens),
    )
    recorded = inputs.recorded_for_split(from_run, split)

    from rlmux.sim import api
    from rlmux.sim.workloads.spec_file import workload_of

    made = workload_of(spec)
    planned = api.plan(made, policy=spec.policy, out=out)
    if split is not None:
        from rlmux.sim.split_search import splits

        planned["splits"] = splits(made, split, recorded)
    planned["bases"] = inputs.bases_in(spec)
    planned["figures"] = {each.name: [asdict(figure) for figure in each.figures] for each in spec.pipelines}
    planned["memory"] = memory_rows.memory_of(spec)
    planned["notes"] = [*planned["notes"], *memory_rows.notes_of(spec)]
    tables.show_plan(planned, as_json=json)
    return tables.exit_code_of_plan(planned)


def estimate(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Logs of verl, AReaL or SkyRL, or W&B histories of them.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="All logs are of one pipeline of this name.")
    ] = None,
    rollout_s: Annotated[
        float | None,
        typer.Option(
            "--rollout-s", metavar="SECONDS", help="Seconds of a rollout, where steps overlap and no log has them."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print a file for `plan` and `simulate` with the step times in other frameworks' logs.

    Reads the console output of verl, AReaL and SkyRL, verl's file logger, and W&B histories as CSV or JSON. Each log is
    a pipeline, named after its file. The cluster is one node for each phase, which the pipelines share.

    \b
    Example: rlmux estimate a.log b.log > jobs.yaml
             rlmux plan jobs.yaml
    """
    from rlmux.profiling import logged_estimates

    if rollout_s is not None and not 0.0 < rollout_s < math.inf:
        raise UserError(f"--rollout-s {rollout_s:g}: accepted: seconds, more than 0")
    estimates = logged_estimates.read_estimates(logs, name, rollout_s)
    text = logged_estimates.file_text(estimates)
    if json:
        from rlmux.cli import tables

        tables.print_json({"pipelines": [each.to_json() for each in estimates]})
        return
    typer.echo(text, nl=False)


def whatif(
    folder: Folder,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="YAML file whose pipelines would be submitted now.")
    ] = None,
    add: Annotated[int | None, typer.Option("--add", min=1, help="Number of copies of --like to add.")] = None,
    like: Annotated[str | None, typer.Option("--like", metavar="NAME", help="Pipeline that --add copies.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="NAME", help="Cancel this pipeline; may be repeated.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Policy of the changed run.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a cluster key; may be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Predict the rest of a running run, unchanged and with a change.

    Simulates each pipeline's remaining steps from its measured ones. The run does not change.

    \b
    Example: rlmux whatif runs/demo --add 40 --like sort
             rlmux whatif runs/demo --set cluster.pools.rollout.devices=2
    """
    from rlmux.cli import what_if

    result = what_if.answer(
        folder, file=file, like=like, number=add, removed=remove or (), policy=policy, sets=sets or ()
    )
    what_if.show(result, as_json=json)


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="rollmux, jigsawrl, or rivals of both.")],
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=10_000, help="Number of seeds; figures are means over them.")
    ] = 5,
    out: Pictures = None,
    json: Json = False,
) -> None:
    """Recompute a paper's figures and show their deviation from the published ones.

    \b
    Example: rlmux reproduce rollmux --seeds 5
    """
    from rlmux.cli import inputs, progress, tables

    inputs.check_paper(paper)

    from rlmux import papers

    with progress.bar("simulations", is_quiet=json) as report_progress:
        result = papers.reproduce(paper, num_seeds=seeds, progress=report_progress, out=out)
    tables.show_reproduction(result, as_json=json)

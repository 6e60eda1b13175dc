"""Commands about this machine: doctor, profile, version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlmux.cli.commands.options import Json
from rlmux.core.errors import UserError


def doctor(
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="Probe a rollout engine: rlmux, vllm or sglang.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Python of the environment that has the engine.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="A server of --model that runs already.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FOLDER", help="Checkpoint to probe with; else a tiny new one."),
    ] = None,
    trajectories: Annotated[
        int, typer.Option("--trajectories", help="Trajectories of the probe; batches go up to as many.")
    ] = 64,
    json: Json = False,
) -> None:
    """Report what this machine supports and what is missing.

    Each missing feature comes with its effect and its fix. With --engine, the command probes a rollout engine's
    features and determinism on this machine.

    \b
    Example: rlmux doctor
    """
    if engine is not None:
        from rlmux.cli import doctor_engine
        from rlmux.profiling.engine_probe import probe_on_this_machine

        config = doctor_engine.probed_config(engine, python, url, model, trajectories)
        doctor_engine.show(probe_on_this_machine(config, trajectories), as_json=json)
        return
    if any((python, url, model)):
        raise UserError("--python, --url and --model go with --engine; accepted: --engine rlmux, vllm or sglang")
    from rlmux.cli.doctor import examine, show

    show(examine(), as_json=json)


def profile(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="File whose pipelines to measure; by default a usual one."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device to measure: cpu or cuda; by default a GPU, or else a core.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Measure briefly: too noisy to plan with.")] = False,
    json: Json = False,
) -> None:
    """Measure the steps of the file's pipelines, and what device sharing, switches and migrations cost on this machine.

    Runs each pipeline of the file alone, once as it is and once with answers that all reach the token limit: estimates
    for `run`, `plan` and `simulate` with --profile. Then measures how each pair of prefill, decoding, log-probs and
    updates slow each other: on one device, at every device fraction that can be made here, and decoding and updates on
    two neighbouring devices. Triples of them share one device at thirds, if their pairs gain by sharing. Then how long
    the file's own states take to leave the device for host memory or disk, and to come back, and how long a KV cache
    takes to be copied to another engine, or recomputed there.

    \b
    Example: rlmux profile examples/01_two_pipelines.yaml --out profile.json
    """
    from time import perf_counter

    from rlmux.cli import inputs, profile_tables, progress
    from rlmux.profiling import interference_probe, neighbours
    from rlmux.profiling.migration_times import measure_migrations
    from rlmux.profiling.profile_file import Profile
    from rlmux.profiling.step_times import measure_steps
    from rlmux.profiling.switch_times import measure_switches, usual_config

    start_s = perf_counter()
    device = device or interference_probe.usual_device()
    interference_probe.check_device(device)
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise UserError(f"--out {out}: accepted: a file in a folder that exists")
    spec = inputs.load(file) if file else None
    configs = [usual_config(device)] if spec is None else [pipeline.config for pipeline in spec.pipelines]
    estimates = {}
    if spec is not None:
        with progress.bar("steps", is_quiet=json) as report_progress:
            estimates = measure_steps(spec, device, folder, num_steps=1 if quick else 3, progress=report_progress)
    effort = interference_probe.QUICK if quick else {}
    with progress.bar("pairs and triples", is_quiet=json) as report_progress:
        table = interference_probe.measure_interference(device, progress=report_progress, **effort)
    with progress.bar("neighbours", is_quiet=json) as report_progress:
        ratios = neighbours.measure_neighbours(device, progress=report_progress, **effort)
    num_rounds = 1 if quick else 5
    with progress.bar("switches", is_quiet=json) as report_progress:
        switches = measure_switches(configs, device, folder, num_rounds=num_rounds, progress=report_progress)
    with progress.bar("migrations", is_quiet=json) as report_progress:
        migrations = measure_migrations(configs, device, num_rounds=num_rounds, progress=report_progress)
    measured = Profile(
        table=table,
        switches=switches,
        migrations=migrations,
        neighbours=neighbours.neighbours_of(device, ratios),
        estimates=estimates,
        wall_s=perf_counter() - start_s,
    )
    measured.save(out)
    without = neighbours.missing_neighbours(device)
    profile_tables.show(measured, out, as_json=json, without_neighbours=without)


def version() -> None:
    """Print the version.

    \b
    Example: rlmux version
    """
    from importlib.metadata import version as installed_version

    typer.echo(f"rlmux {installed_version('rlmux')}")

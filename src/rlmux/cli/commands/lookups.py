"""Commands that look into a run, in a folder or on a server: queue, samples, alerts, export."""

from __future__ import annotations

from typing import Annotated

import typer

from rlmux.cli.commands.options import Json, Place

PipelineName = Annotated[str, typer.Argument(metavar="NAME", help="Name of one of its pipelines.")]


def queue(place: Place, json: Json = False) -> None:
    """Show a run's waiting pipelines in scheduling order, and why each waits.

    \b
    Example: rlmux queue runs/demo
    """
    from rlmux.cli import lookups

    lookups.show_queue(place, as_json=json)


def samples(
    place: Place,
    name: PipelineName,
    at: Annotated[
        str | None, typer.Option("--at", metavar="STEP/PROMPT/SAMPLE", help="Print this sample with its text.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, max=2**20, help="Only this step.")] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=0, max=2**20, help="Only this prompt of its step.")
    ] = None,
    least: Annotated[float | None, typer.Option("--least", help="Smallest reward.")] = None,
    most: Annotated[float | None, typer.Option("--most", help="Largest reward.")] = None,
    stop: Annotated[str | None, typer.Option("--stop", help="Stop, length, failed, turns or time.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Words that follow one another in the text.")] = None,
    sort: Annotated[
        str, typer.Option("--sort", help="step, reward or tokens; prefix - sorts in descending order.")
    ] = "-step",
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="Largest number of samples.")] = 20,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="With --at: show special tokens, such as BOS and ends of turns.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a pipeline's prompts, completions and rewards.

    \b
    Example: rlmux samples runs/demo sort --step 61 --most 0.3
    """
    from rlmux.cli import lookups
    from rlmux.core.errors import UserError
    from rlmux.report.samples import SORTS

    if at is not None:
        lookups.show_sample(place, name, at, special_tokens=special_tokens, as_json=json)
        return
    if special_tokens:
        raise UserError("--special-tokens: accepted: with --at STEP/PROMPT/SAMPLE")
    if sort not in SORTS:
        raise UserError(f"--sort {sort!r}: accepted: {', '.join(SORTS)}")
    given = {"step": step, "prompt": prompt, "least": least, "most": most, "stop": stop, "text": text}
    filters = {key: value for key, value in given.items() if value is not None}
    lookups.show_samples(place, name, filters, sort=sort, limit=limit, as_json=json)


def alerts(
    place: Place,
    ack: Annotated[str | None, typer.Option("--ack", metavar="RULE", help="Acknowledge this rule's alerts.")] = None,
    pipeline: Annotated[
        str | None, typer.Option("--pipeline", metavar="NAME", help="Only alerts of this pipeline.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a run's alerts with advice, or acknowledge one.

    \b
    Example: rlmux alerts runs/demo --ack reward_collapse
    """
    from rlmux.cli import lookups

    lookups.show_alerts(place, ack, pipeline, as_json=json)


def export(
    place: Place,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of its pipelines; by default all.")] = None,
    to: Annotated[str, typer.Option("--to", help="Format: jsonl, csv, wandb, mlflow or trackio; or hf.")] = "jsonl",
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="File, or a tracker's folder, which is completed; a new folder for hf."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, max=2**31, help="Step of the weights; by default the newest kept.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep a tracker up to date until the run is over.")] = False,
) -> None:
    """Export the step table, or with --to hf the weights as a Hugging Face model.

    \b
    Example: rlmux export runs/demo sort --to hf --out my_model
    """
    from rlmux.cli import lookups

    if to == lookups.HF and not follow:
        lookups.export_model(place, name, out, step=step, is_merged=merge)
    else:
        lookups.check_no_model_options(to, step=step, is_merged=merge)
        lookups.export(place, name, to, out, is_following=follow)

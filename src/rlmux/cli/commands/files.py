"""Commands about the user's file: init, check, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlmux.cli.commands.options import AnyFile, Json, Sets
from rlmux.core.errors import UserError


def init(
    start: Annotated[
        str, typer.Argument(metavar="START", help="tasks, rows, checkpoint, trl or tinker: what is trained, and how.")
    ] = "tasks",
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="YAML file to write; other files are written beside it.")
    ] = Path("rlmux.yaml"),
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint folder, for START checkpoint.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", help="Rollout engine: rlmux, vllm or sglang; on GPUs a vLLM found."),
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Python of the environment that has the engine.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="NxGB", help="GPUs of a checkpoint's file: 8x80, 8xH100; by default these here."
        ),
    ] = None,
    pipelines: Annotated[
        int | None, typer.Option("--pipelines", metavar="N", min=1, max=8, help="Pipelines that share the GPUs (2).")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train LoRA adapters, not all of the checkpoint.")] = False,
    json: Json = False,
) -> None:
    """Write a commented file for this machine, and print the commands to type next.

    tasks: two tasks that ship. rows: your own rows and reward. checkpoint: your own checkpoint; on GPUs what each is
    for, precision, sharding and cache are chosen by the estimates of `plan`, from config.json alone with --gpus. trl:
    TRL scripts that share a device. tinker: a training loop over the Tinker API. No file is overwritten. On a machine
    with GPUs vLLM samples the answers, where this environment or one on PATH has it.

    \b
    Example: rlmux init rows
             rlmux init checkpoint --model models/Qwen3-0.6B
             rlmux init checkpoint --model models/Qwen3-8B --gpus 8x80 --lora
             rlmux init rows --engine vllm --python /opt/vllm/bin/python
    """
    from rlmux.cli import starting_points

    for_gpus = starting_points.ForGpus(gpus=gpus, num_pipelines=pipelines, has_adapter=lora)
    written = starting_points.write(start, out, model, engine=engine, python=python, for_gpus=for_gpus)
    starting_points.show(written, as_json=json)


def check(file: AnyFile, sets: Sets = None, json: Json = False) -> None:
    """Check a file as `run`, `serve` or `broker` would, and start nothing.

    Every mistake that is found is one line on stderr. The exit code is then 2.

    \b
    Example: rlmux check examples/01_two_pipelines.yaml
             rlmux check examples/serve/lanes.yaml --json
    """
    from rlmux.cli import checked_file
    from rlmux.cli.exit_codes import MISTAKE

    try:
        checked = checked_file.check_file(file, sets or ())
    except UserError as error:
        checked_file.show_mistakes(file, error, as_json=json)
        raise typer.Exit(MISTAKE) from None
    checked_file.show(file, checked, as_json=json)


def schema(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write, in place of stdout.")
    ] = None,
) -> None:
    """Print the JSON schema of the file, with which an editor completes and checks keys.

    The schema covers the files of `run`, `serve` and `broker`. docs/reference/file.md says how an editor finds it.

    \b
    Example: rlmux schema --out rlmux.schema.json
    """
    import json

    from rlmux.config.json_schema import json_schema

    text = json.dumps(json_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; accepted: a file that can be written") from None

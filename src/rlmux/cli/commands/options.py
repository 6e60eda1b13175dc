"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[
    str, typer.Argument(metavar="FILE", help="YAML file with cluster and pipelines (docs/reference/file.md).")
]
AnyFile = Annotated[
    str, typer.Argument(metavar="FILE", help="YAML file of `rlmux run`, `serve` or `broker` (docs/reference/file.md).")
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")]
Place = Annotated[
    str, typer.Argument(metavar="DIR|URL", help="A run's folder, or http://HOST:PORT/lanes/NAME of a server.")
]
PlaceOrOwn = Annotated[
    str | None,
    typer.Argument(
        metavar="[DIR|URL]",
        help="A run's folder, or http://HOST:PORT/lanes/NAME of a server; by default your own service.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; may be repeated."),
]
PolicyName = Annotated[str | None, typer.Option("--policy", help="Scheduling policy; by default the file's.")]
PolicyNames = Annotated[str, typer.Option("--policies", help="Policies to compare, separated by commas, or all.")]
Ablate = Annotated[
    str | None,
    typer.Option(
        "--ablate",
        metavar="MECHANISMS",
        help="Also run the policies without mechanisms: tails, fractions, fill, separated by commas, or all.",
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Runs of each policy, all policies in turn.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON with stable keys on stdout.")]
Out = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Folder to make; by default runs/FILE-POLICY-TIME."),
]
Pictures = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write pictures (SVG, PNG) and a page there.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --out.")]
Resumes = Annotated[
    bool,
    typer.Option("--resume", help="Resume the run of this file that is in --out; without a run there, start one."),
]
Salvage = Annotated[bool, typer.Option("--salvage", help="Rebuild a damaged log from its readable part.")]
Retry = Annotated[
    list[str] | None,
    typer.Option("--retry", metavar="NAME", help="Retry a failed pipeline; may be repeated."),
]
KeepOpen = Annotated[bool, typer.Option("--keep-open", help="Keep the run open for submissions until Ctrl-C.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Measurements of `rlmux profile` on this machine.",
    ),
]
Estimates = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="Estimates of `rlmux profile`, on any machine, for pipelines without one."
    ),
]
BackendName = Annotated[str, typer.Option("--backend", help="Workers' backend: local or ray.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Address of a Ray cluster; by default this machine's own."),
]

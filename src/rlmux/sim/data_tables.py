"""The small tables that travel with the package: one CSV each in `data/`, its source named on the first line.

# source: ...
column,column,...
value,value,...
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files


@cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """Every row of `data/NAME.csv`, as text by column."""
    text = files("rlmux.sim").joinpath("data", f"{name}.csv").read_text("utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


@cache
def source(name: str) -> str:
    """Where the table comes from: its first line, without the mark."""
    text = files("rlmux.sim").joinpath("data", f"{name}.csv").read_text("utf-8")
    return text.partition("\n")[0].removeprefix("# source:").strip()

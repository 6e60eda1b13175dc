"""Traces and tables in docstrings become code blocks on the site.

A docstring of ours shows an aligned picture where it helps. Markdown would run its lines together, so a paragraph in
which a line has three spaces between words is given as it stands.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ALIGNED = re.compile(r"\S {3,}\S")


class Traces(griffe.Extension):
    """Indents aligned paragraphs of every docstring by four columns: Markdown's code block."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(_shown(part) for part in obj.docstring.value.split("\n\n"))


def _shown(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if lines and not lines[0].startswith("    ") and any(_ALIGNED.search(line) for line in lines):
        return "\n".join("    " + line for line in lines)
    return paragraph

"""Pages of the site whose text lies in the project's root: README.md is its front page, CHANGELOG.md its last.

Links into docs/ stay links; links to other files of the project become the names of these files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_FILE_BY_PAGE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
_PICTURE = re.compile(r"(!\[[^]]*\]\()docs/")
_LINK = re.compile(r"(?<!!)\[([^]]+)\]\((?!https?://|#)([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for page, name in _FILE_BY_PAGE.items():
        text = (_ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_for_site(text)))
    return files


def _for_site(text: str) -> str:
    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        return f"[{label}]({target.removeprefix('docs/')})" if target.startswith("docs/") else label

    return _LINK.sub(link, _PICTURE.sub(r"\1", text))

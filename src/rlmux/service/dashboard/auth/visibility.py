"""Visibility filter of one caller and lane: hidden pipelines appear as "another pipeline".

    pipeline is the caller's own, public, or of a project of the caller ─┐
    no people.json, or the role operator or admin ───────────────────────┴─▶ seen
    else ─▶ its row, steps, curves, log and samples: no such pipeline
            its time on devices, its place in the queue: another pipeline
            what its project and user have used: another project, another user

`conceal` replaces the index's tables by filtered views, so that no handler query meets hidden rows; `cover` filters a
controller's responses. `mask` is the router's last check of every response.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlmux.config.load import without_pipelines
from rlmux.service.index.store import IndexReader, dumps

if TYPE_CHECKING:
    from rlmux.service.dashboard.auth.access import Principal

ANOTHER = "another pipeline"
ANOTHER_OF = {"project": "another project", "user": "another user"}
"""Replacements for hidden accounts, by key."""
_WITHHELD = {**ANOTHER_OF, "reason": "not shown"}
"""Replacements for a hidden pipeline's values, by key."""
_CLOSED_WORDS = frozenset(
    (
        "status",
        "kind",
        "cause",
        "stage",
        "phase",
        "what",
        "state",
        "outcome",
        "token",
        "policy",
        "unit",
        "rule",
        "level",
        "visibility",
        "parts",
    )
)
"""Keys with values of our own vocabulary, which may equal a pipeline's name."""
_OF_ONE = ("pipeline", "first")
"""Keys whose values are pipeline names."""
_VIEWS = {
    "pipeline": "SELECT place, name, cover(json) AS json, cover(detail) AS detail, seq FROM main.pipeline "
    "WHERE NOT is_hidden(name)",
    "step": "SELECT pipeline, step, json, seq FROM main.step WHERE NOT is_hidden(pipeline)",
    "device": "SELECT place, name, cover(json) AS json, seq FROM main.device",
    "instant": "SELECT number, cover(json) AS json FROM main.instant "
    "WHERE NOT coalesce(is_hidden(json_extract(json, '$.pipeline')), 0)",
    "pin": "SELECT number, alias(pipeline) AS pipeline, nodes, start_s, end_s FROM main.pin",
}


class Sight:
    """The filter over the indexed pipelines; newer ones stay hidden."""

    def __init__(self, principal: Principal, rows: Iterable[Mapping[str, Any]]) -> None:
        """`rows`: name, user, project and visibility of every pipeline, in log order."""
        self._who = principal
        self._rows = {str(row["name"]): row for row in rows}
        self._aliases: dict[str, str] = {}
        for name, row in self._rows.items():
            if not self.sees(row):
                number = len(self._aliases) + 1
                self._aliases[name] = ANOTHER if number == 1 else f"{ANOTHER} {number}"
        self._hidden = _any_of(self._aliases)
        seen = [row for name, row in self._rows.items() if name not in self._aliases]
        self._seen_accounts = {(row["project"], row["user"]) for row in seen}

    def sees(self, row: Mapping[str, Any]) -> bool:
        """Whether the caller may see a pipeline with this user, project and visibility."""
        return self._who.sees_all or is_close(self._who, row)

    def shows(self, name: str) -> bool:
        """Whether the lane has this pipeline and the caller may see it."""
        return self._who.sees_all or (name in self._rows and name not in self._aliases)

    def hides(self, name: str) -> bool:
        """Whether the lane has this pipeline and hides it from the caller."""
        return name in self._aliases

    def is_close(self, name: str) -> bool:
        """Whether the caller may read the pipeline's samples and log."""
        return self._who.may("admin") or (name in self._rows and is_close(self._who, self._rows[name]))

    @property
    def is_limited(self) -> bool:
        """Whether pipelines may be hidden from the caller."""
        return not self._who.sees_all

    @property
    def hides_some(self) -> bool:
        return bool(self._aliases)

    def alias(self, name: str) -> str:
        return self._aliases.get(name, name if self.shows(name) else ANOTHER)

    def cover(self, value: Any) -> Any:
        """The lane's JSON without hidden names; an unknown name counts as hidden."""
        return self._covered(value, "", has_names=True)

    def mask(self, value: Any) -> Any:
        """JSON or text without hidden names: keys are dropped, values replaced."""
        return self._covered(value, "", has_names=False)

    def _covered(self, value: Any, key: str, *, has_names: bool) -> Any:
        if self._who.sees_all:
            return value
        if isinstance(value, dict):
            value = self._anonymous(value) if has_names else value
            kept = {each: item for each, item in value.items() if each not in self._aliases}
            return {each: self._covered(item, each, has_names=has_names) for each, item in kept.items()}
        if isinstance(value, list | tuple):
            return [self._covered(item, key, has_names=has_names) for item in value]
        if not isinstance(value, str) or key in _CLOSED_WORDS:
            return value
        if has_names and key in _OF_ONE:
            return self.alias(value)
        return value if self._hidden is None else self._hidden.sub(lambda found: self._aliases[found[0]], value)

    def _anonymous(self, row: dict[str, Any]) -> dict[str, Any]:
        """A hidden pipeline's row without its owner, which its reason may name as well."""
        name = row.get("pipeline")
        if not isinstance(name, str) or self.shows(name):
            return row
        return {key: _WITHHELD.get(key, value) for key, value in row.items()}

    def cover_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Usage with the account names that the caller may see. No figure is dropped: they add up to all held device
        time."""
        aliases: dict[str, dict[str, str]] = {key: {} for key in ANOTHER_OF}

        def covered(row: dict[str, Any]) -> dict[str, Any]:
            if self._shows_account(row["project"], row["user"]):
                return row
            return {**row, **{key: _alias_in(aliases[key], str(row[key]), word) for key, word in ANOTHER_OF.items()}}

        return {**usage, "accounts": [covered(row) for row in usage["accounts"]]}

    def _shows_account(self, project: str, user: str) -> bool:
        """Whether the account belongs to the caller, its projects or a visible pipeline."""
        is_own = user == self._who.user and user != ""
        return self._who.sees_all or is_own or project in self._who.projects or (project, user) in self._seen_accounts

    def conceal(self, reader: IndexReader) -> None:
        """Restrict every query of the reader to visible rows."""
        if not self._aliases:
            return
        reader.shadow(
            _VIEWS,
            {
                "is_hidden": lambda name: int(name in self._aliases),
                "alias": self.alias,
                "cover": lambda text: None if text is None else dumps(self.cover(json.loads(text))),
            },
        )
        facts = reader.facts
        alerts = [alert for alert in facts.get("alerts", ()) if alert["pipeline"] not in self._aliases]
        spec = facts.get("spec")
        reader.facts = {
            **facts,
            "lane": self.cover(facts["lane"]),
            "alerts": self.cover(alerts),
            "pipelines": [self.alias(name) for name in facts["pipelines"]],
            "spec": None if spec is None else _only(spec, frozenset(self._rows.keys() - self._aliases.keys())),
        }


@functools.lru_cache(maxsize=32)
def _only(resolved: str, shown: frozenset[str]) -> str:
    """A resolved file with visible pipelines only; cached, since a long file takes seconds to read and write."""
    return without_pipelines(resolved, shown.__contains__)


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of these words; None without names."""
    words = "|".join(sorted(map(re.escape, names), key=lambda word: (-len(word), word)))
    return re.compile(rf"(?<![A-Za-z0-9_-])(?:{words})(?![A-Za-z0-9_-])") if words else None


def _alias_in(aliases: dict[str, str], name: str, word: str) -> str:
    """A stable alias of a name: `word`, `word 2`, ... in order of first use."""
    number = len(aliases) + 1
    return aliases.setdefault(name, word if number == 1 else f"{word} {number}")


def is_close(principal: Principal, row: Mapping[str, Any]) -> bool:
    """Whether a pipeline is the caller's own or open to it: public, of its project, or without a project."""
    if not principal.is_limited or (row["user"] and row["user"] == principal.user):
        return True
    match row.get("visibility"):
        case "public":
            return True
        case "private":
            return False
        case _:
            return not row["project"] or row["project"] in principal.projects

"""What a running controller can be asked, as typed records.

    ask(folder, Cancel(name="sort")) ── {"request": "cancel", "name": "sort"} ──▶ ControlServer ── record_of ─▶ RunApi
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlmux.core.errors import LogError, UserError
from rlmux.log import value_codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Take in the pipelines of a file.

    Answered once each of them is placed, waiting, refused, or known to come later. With an `id` that the log knows,
    nothing is taken: the answer says what became of it.
    """

    text: str
    """The file, defaults and overrides worked in."""
    source: str
    """Its name."""
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether a file would be taken; nothing is."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End a pipeline; strike off one that is still to come."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Keep a waiting pipeline from starting until it is released."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseHold:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Give a waiting pipeline its place among its user's own."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkPipeline:
    """Have a running pipeline give its devices back at its next step boundary; keep a waiting one from starting."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpark:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Why a pipeline waits, and what would start it now."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQueue:
    """Every pipeline that waits, in the order of offers, and what is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountOf:
    """Project and user of a pipeline."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What users and projects have used, and what they are entitled to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetShares:
    """Let the section `shares` of a file hold from now on."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Which process runs this, and what is still to come; everything else is in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The node of that name goes in so many seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """The node of that name is there again, or stays after all."""

    name: str


ControlRequest = (
    Submit | Cancel | Hold | ReleaseHold | Rank | ParkPipeline | Unpark | Why | ListQueue | AccountOf | Usage
    | SetShares | Status | Check | Notice | NodeBack
)  # fmt: skip
_TYPE_BY_NAME: Mapping[str, type[ControlRequest]] = {
    "submit": Submit, "cancel": Cancel, "hold": Hold, "release": ReleaseHold, "rank": Rank, "park": ParkPipeline,
    "unpark": Unpark, "why": Why, "queue": ListQueue, "account": AccountOf, "usage": Usage, "set_shares": SetShares,
    "status": Status, "check": Check, "notice": Notice, "node_back": NodeBack,
}  # fmt: skip
_NAME_BY_TYPE = {kind: name for name, kind in _TYPE_BY_NAME.items()}


def record_of(words: Mapping[str, Any]) -> ControlRequest:
    """The request that a JSON object is. Raises UserError for one that there is not, or with other fields."""
    name = words.get("request")
    kind = _TYPE_BY_NAME.get(name) if isinstance(name, str) else None
    fields = {key: value for key, value in words.items() if key != "request"}
    try:
        if kind is not None:
            record: ControlRequest = value_codec.reader(kind)(fields, f"request {name}")
            return record
    except LogError:
        pass
    raise UserError(f"request {name!r} with {sorted(words)}: accepted: {', '.join(_TYPE_BY_NAME)}")


def words_of(record: ControlRequest) -> dict[str, Any]:
    """The JSON object of a request."""
    fields = {key: value for key, value in asdict(record).items() if value is not None}
    return {"request": _NAME_BY_TYPE[type(record)], **fields}

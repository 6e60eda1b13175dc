"""Requests to a running controller, as typed records.

send_request(folder, Cancel("a")) ─ {"request": "cancel", "name": "a"} ─▶ ControlServer ─ record_of ─▶ RunControl
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlmux.core.errors import LogError, UserError
from rlmux.log import value_codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Submit the pipelines of a file.

    Answered once each pipeline is placed, waiting, refused or scheduled for later. An `id` that is in the log already
    submits nothing: the answer is the outcome of the earlier submission.
    """

    text: str
    """Text of the file, with defaults and overrides."""
    source: str
    """Its name."""
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check whether a file would be accepted; nothing is submitted."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End a pipeline, or drop an upcoming one."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Submit a failed pipeline again, from its newest checkpoint."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Remove files of a pipeline that is over."""

    name: str
    parts: str = "all"
    """`all`, `checkpoints` or `samples`."""
    by: str = ""
    """The user who asks for it."""
    dry_run: bool = False
    """Whether it is only said what would be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Keep a waiting pipeline from starting until it is released."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseHold:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRank:
    """Rank a waiting pipeline among its user's."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkPipeline:
    """Release a running pipeline's devices at its next step boundary; keep a waiting one from starting."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpark:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainWait:
    """Why a pipeline waits, and what would start it now."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQueue:
    """Waiting pipelines in queue order, and upcoming ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountOf:
    """Project and user of a pipeline."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetUsage:
    """Usage and entitlement of users and projects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetShares:
    """Apply the section `shares` of a file from now on."""

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStatus:
    """The run's process and its upcoming pipelines; everything else is in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Notice that a node goes away in `seconds`."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack:
    """Notice that a node is back, or stays after all."""

    name: str


ControlRequest = (
    Submit | Cancel | Retry | Remove | Hold | ReleaseHold | SetRank | ParkPipeline | Unpark | ExplainWait | ListQueue
    | AccountOf | GetUsage | SetShares | GetStatus | Check | Notice | NodeBack
)  # fmt: skip
_TYPE_BY_NAME: Mapping[str, type[ControlRequest]] = {
    "submit": Submit, "cancel": Cancel, "retry": Retry, "remove": Remove, "hold": Hold, "release": ReleaseHold,
    "rank": SetRank, "park": ParkPipeline, "unpark": Unpark, "why": ExplainWait, "queue": ListQueue,
    "account": AccountOf, "usage": GetUsage, "set_shares": SetShares, "status": GetStatus, "check": Check,
    "notice": Notice, "node_back": NodeBack,
}  # fmt: skip
_NAME_BY_TYPE = {kind: name for name, kind in _TYPE_BY_NAME.items()}


def record_of(words: Mapping[str, Any]) -> ControlRequest:
    """Decode a JSON object. Raises UserError for an unknown request or unexpected fields."""
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

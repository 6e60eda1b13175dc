"""Alerts that someone has seen: lines of JSON beside a run's log, of a run that is over too.

    acknowledged.jsonl      {"rule", "pipeline", "step", "by", "at"}        a line each, in the order in which they came

An alert is acknowledged until it is over: one that begins at another step is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError

NAME = "acknowledged.jsonl"


def with_acknowledged(folder: Path, alerts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The alerts, each with `acknowledged`: {by, at}, or None."""
    seen = {_key(line): {"by": line["by"], "at": line["at"]} for line in _lines(folder)}
    return [{**alert, "acknowledged": seen.get(_key(alert))} for alert in alerts]


def acknowledge(
    folder: Path, alerts: Sequence[Mapping[str, Any]], *, rule: str, pipeline: str | None, by: str
) -> list[dict[str, Any]]:
    """Say of the alerts of a rule that they were seen, of one pipeline or of all; returns them.

    Raises UserError where no such alert fires, or the folder cannot be written to.
    """
    chosen = [
        alert for alert in alerts if alert["rule"] == rule and (pipeline is None or alert["pipeline"] == pipeline)
    ]
    if not chosen:
        whose = "" if pipeline is None else f" of {pipeline}"
        firing = ", ".join(
            dict.fromkeys(alert["rule"] + f" of {alert['pipeline']}" * bool(alert["pipeline"]) for alert in alerts)
        )
        raise UserError(f"no alert {rule!r}{whose} fires; accepted: {firing or 'none fires'}")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    lines = [{**{key: alert[key] for key in ("rule", "pipeline", "step")}, "by": by, "at": at} for alert in chosen]
    try:
        with (folder / NAME).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise UserError(f"{folder / NAME}: {error.strerror}; accepted: a folder that can be written to") from None
    return with_acknowledged(folder, chosen)


def _key(alert: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return alert["rule"], alert["pipeline"], alert["step"]


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError), (folder / NAME).open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # the end of a line that was being written
                yield json.loads(line)

"""The document of the API (OpenAPI 3.1), made of the table of addresses that the server has.

table ── method, path, scope, parameters ──┐
MEANT ── what an address is for, its types ┴─▶ paths, components ─▶ GET openapi.json

An address without a row in `MEANT` has no document, and a test says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from rlmux.service.dashboard import shapes, shapes_of_time, shapes_of_use
from rlmux.service.dashboard.door import PREFIX, Address, Asked, get
from rlmux.service.dashboard.problems import MEDIA_TYPE as PROBLEM

PATH = "/openapi.json"
_JSON, _BINARY = "application/json", "application/octet-stream"
_REF = "#/components/schemas/{model}"
_LANE, _PIPELINE, _TIMELINE = "/lanes/{lane}", "/pipelines/{lane}/{name}", "/timeline/{lane}"
Shapes = type[shapes.Shape] | tuple[type[shapes.Shape], ...] | str | None
"""Types of an answer's JSON, any of several; the media type of one that is no JSON; None without a body."""


Refs = Mapping[Any, Mapping[str, Any]]
"""Where the document has each type."""


class Meant(NamedTuple):
    """What an address is for."""

    summary: str
    answer: Shapes
    body: type[shapes.Shape] | None = None
    statuses: Sequence[int] = (200,)


MEANT: Mapping[tuple[str, str], Meant] = {
    ("GET", PATH): Meant("This document", _JSON),
    ("GET", "/health"): Meant("That the server lives; with a token, each lane's state", shapes.Health),
    ("GET", "/version"): Meant("Versions of the program, the API and the log", shapes.Version),
    ("POST", "/login"): Meant("Begin a session, by a ticket or a token", shapes.WhoAmI, shapes.Login),
    ("POST", "/logout"): Meant("End the session", None, shapes.Nothing, (204,)),
    ("GET", "/whoami"): Meant("Who asks, and what that user may do", shapes.WhoAmI),
    ("GET", "/audit"): Meant("Who asked for what, newest first", shapes.Page[shapes.AuditRow]),
    ("GET", "/lanes"): Meant("Every lane", shapes.Listed[shapes.Lane | shapes.NewLane]),
    ("GET", _LANE): Meant("One lane: state, sums by kind and name", (shapes.Lane, shapes.NewLane)),
    ("GET", f"{_LANE}/devices"): Meant("What each device does now", shapes.Listed[shapes.Device]),
    ("GET", f"{_LANE}/cost"): Meant("What the lane cost over time, and would have cost", shapes.Cost),
    ("GET", f"{_LANE}/alerts"): Meant("What is wrong now, by rule", shapes.Listed[shapes.Alert]),
    ("POST", f"{_LANE}/alerts"): Meant("Say that alerts were seen", shapes.AlertsSeen, shapes.Acknowledge),
    ("GET", f"{_LANE}/events"): Meant("Failures, losses, restarts, newest first", shapes.Listed[shapes.Happening]),
    ("GET", f"{_LANE}/whatif"): Meant("How far earlier predictions were off", shapes.Score),
    ("POST", f"{_LANE}/whatif"): Meant("What a change would do to the run", shapes.Answer, shapes.Question),
    ("GET", f"{_LANE}/queue"): Meant("What waits, in the order of offers", shapes.Queue),
    ("GET", f"{_LANE}/usage"): Meant("What users and projects have used", shapes_of_use.Usage),
    ("GET", f"{_LANE}/status"): Meant("What `rlmux status --json` prints", shapes.Status),
    ("GET", f"{_LANE}/spec"): Meant("The file that the run began with", shapes.File),
    ("POST", f"{_LANE}/shares"): Meant("Set what users and projects are entitled to", shapes.Outcome, shapes.File),
    ("GET", "/pipelines"): Meant("Pipelines of all lanes, or of one", shapes.Pipelines),
    ("GET", _PIPELINE): Meant("One pipeline", shapes.Detail),
    ("GET", "/compare"): Meant("Two pipelines, and whether they are the same run", shapes.Compared),
    ("GET", f"{_PIPELINE}/steps"): Meant("The table of its steps", shapes.Page[shapes.Step]),
    ("GET", f"{_PIPELINE}/metrics"): Meant("Curves of its metrics", shapes.Metrics),
    ("GET", f"{_PIPELINE}/logs"): Meant("What its workers printed", shapes.Log),
    ("GET", f"{_PIPELINE}/samples"): Meant("Trajectories that meet what is asked", shapes.Samples),
    ("GET", f"{_PIPELINE}/samples/{{step}}/{{prompt}}/{{sample}}"): Meant("One trajectory with its text", _JSON),
    ("GET", f"{_PIPELINE}/why"): Meant("Why it waits, and what would start it now", shapes.Why),
    **{
        ("POST", f"{_PIPELINE}/{verb}"): Meant(
            f"As `rlmux {verb}`", shapes.Outcome, shapes.Rank if verb == "rank" else shapes.Nothing
        )
        for verb in ("cancel", "hold", "release", "rank", "park", "unpark")
    },
    ("GET", _TIMELINE): Meant("Where the timeline's devices, pipelines and levels are", shapes_of_time.Timeline),
    ("GET", f"{_TIMELINE}/tiles"): Meant("What each device did in each bucket", _BINARY),
    ("GET", f"{_TIMELINE}/intervals"): Meant("Every interval, as columns", _BINARY),
    ("GET", f"{_TIMELINE}/measure"): Meant("Where a window's seconds went", shapes_of_time.Measured),
    ("GET", f"{_TIMELINE}/gap"): Meant("One moment of a device", shapes_of_time.Gap),
    ("GET", "/metrics"): Meant("Figures for Prometheus", "text/plain"),
    ("GET", "/metrics/grafana.json"): Meant("A dashboard for Grafana", _JSON),
    ("GET", "/stream"): Meant("Changes as they come", "text/event-stream"),
    ("POST", "/submissions"): Meant(
        "Submit a file, or check it; needs an Idempotency-Key unless it is checked alone",
        (shapes_of_time.Submitted, shapes_of_time.Checked),
        shapes_of_time.Submission,
        (200, 201, 202),
    ),
    ("GET", "/submissions"): Meant("What was submitted, newest first", shapes_of_time.Submissions),
    ("GET", "/submissions/{id}"): Meant("One submission", shapes_of_time.Submitted),
    ("POST", "/bundles"): Meant("Keep code and data", shapes_of_time.Bundle, None, (200, 201)),
    ("GET", "/bundles/{sha256}"): Meant("Whether a bundle is there", shapes_of_time.Bundle),
}
_WHOLE_PARTS = ("step", "prompt", "sample")
"""Named parts of addresses that are whole numbers."""


def document(addresses: Sequence[Address]) -> dict[str, Any]:
    """The document. Raises KeyError for an address that has no meaning here."""
    used = {shape for one in addresses for shape in _shapes_of(MEANT[one.method, one.path])} | {shapes.Problem}
    ordered = sorted(used, key=lambda shape: shape.__name__)
    refs, found = models_json_schema([(shape, "serialization") for shape in ordered], ref_template=_REF)
    ref_by_shape: Refs = {shape: ref for (shape, _), ref in refs.items()}
    paths: dict[str, dict[str, Any]] = {}
    for one in addresses:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, ref_by_shape)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rlmux serve", "version": version("rlmux")},
        "servers": [{"url": PREFIX}],
        "paths": paths,
        "components": {
            "schemas": found["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "rlmux_PORT"},
            },
        },
    }


class Document:
    """The handler."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = (*addresses, get(PATH, self.answer))
        self._value: dict[str, Any] | None = None

    def answer(self, asked: Asked) -> Any:
        """This document; it is made when it is first asked for."""
        self._value = self._value or document(self.addresses)
        return self._value


def _shapes_of(meant: Meant) -> tuple[type[shapes.Shape], ...]:
    answers = meant.answer if isinstance(meant.answer, tuple) else (meant.answer,)
    return tuple(shape for shape in (*answers, meant.body) if isinstance(shape, type))


def _operation(one: Address, refs: Refs) -> dict[str, Any]:
    meant = MEANT[one.method, one.path]
    made: dict[str, Any] = {
        "operationId": "_".join([one.method.lower(), *re.findall(r"\w+", one.path)]),
        "summary": meant.summary,
        "security": [] if one.scope is None else [{"token": []}, {"session": []}],
        "x-scope": one.scope,
        "parameters": [*_parts(one.path), *_query(one)],
        "responses": {str(status): _answer(meant, refs) for status in meant.statuses},
    }
    made["responses"]["default"] = {
        "description": "What is wrong, and what would be accepted",
        "content": {PROBLEM: {"schema": refs[shapes.Problem]}},
    }
    if one.method != "GET":
        schema = {"type": "string", "format": "binary"} if meant.body is None else refs[meant.body]
        is_needed = meant.body is not shapes.Nothing
        made["requestBody"] = {"required": is_needed, "content": {one.media_type: {"schema": schema}}}
    return made


def _answer(meant: Meant, refs: Refs) -> dict[str, Any]:
    if meant.answer is None:
        return {"description": meant.summary}
    if isinstance(meant.answer, str):
        schema = {"type": "object"} if meant.answer == _JSON else {"type": "string"}
        return {"description": meant.summary, "content": {meant.answer: {"schema": schema}}}
    answers = meant.answer if isinstance(meant.answer, tuple) else (meant.answer,)
    schemas = [dict(refs[shape]) for shape in answers]
    return {
        "description": meant.summary,
        "content": {_JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}},
    }


def _parts(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 0} if name in _WHOLE_PARTS else {"type": "string"},
        }
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query(one: Address) -> list[dict[str, Any]]:
    found = []
    for name, parse in one.asks.items():
        schema = dict(getattr(parse, "schema", {"type": "string"}))
        if name in one.lists:
            schema = {"type": "array", "items": schema}
        found.append({"name": name, "in": "query", "required": False, "schema": schema, "explode": name in one.lists})
    return found

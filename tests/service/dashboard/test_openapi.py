"""The document of the API: what is served is in it, what is in it is served, and answers are as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from tests.service.dashboard.auth.test_visibility import owned_run
from tests.service.lane_here import Endless, Lane
from tests.service.pages_server import Pages

from rlmux.service.dashboard.router import PREFIX
from rlmux.service.dashboard.schemas import run_schemas
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.lanes.submissions import LaneSubmissions

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def faults(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str = "") -> list[str]:
    """What about a value is not as a schema says; keys that the schema does not name are faults."""
    if "$ref" in schema:
        return faults(value, root["components"]["schemas"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema:
        tried = [faults(value, one, root, at) for one in schema["anyOf"]]
        return [] if [] in tried else min(tried, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{at}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    kinds = schema.get("type")
    if kinds is not None and (
        not isinstance(value, TYPES[kinds]) or (isinstance(value, bool) and kinds in ("integer", "number"))
    ):
        return [f"{at}: {value!r} is no {kinds}"]
    if isinstance(value, list):
        return [
            fault
            for number, one in enumerate(value)
            for fault in faults(one, schema.get("items", {}), root, f"{at}[{number}]")
        ]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", "properties" not in schema)
        found = [f"{at}: no {key}" for key in schema.get("required", ()) if key not in value]
        for key, one in value.items():
            if key in known:
                found += faults(one, known[key], root, f"{at}.{key}")
            elif isinstance(others, dict):
                found += faults(one, others, root, f"{at}.{key}")
            elif not others:
                found.append(f"{at}: {key} is not in the document")
        return found
    return []


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """A lane that goes on with one pipeline, one that waits, and one to come."""
    root: Path = tmp_path_factory.mktemp("service") / "root"
    with open_root(root):
        lane = Lane(root, "solo", Endless())
        bundles = Bundles(root)
        submissions = LaneSubmissions({"cpu": lane}, SubmissionLedger(root), bundles)  # type: ignore[dict-item]
        served = Pages(root, lanes=["cpu"], more=(*submissions.addresses(), *bundles.addresses()))
        for name, more in (("first", {}), ("second", {}), ("third", {"submit_at_s": 1e6})):
            assert submit(served, {"name": name, "user": "ann", **more}).status_code == 201
        served.until(lambda: {row["name"] for row in served.get("/pipelines")["items"]} == {"first", "second"})
        yield served
        served.close()
        lane.close()


def submit(served: Pages, pipeline: Mapping[str, Any], **more: Any) -> Any:
    file = {"pipelines": [{"task": "sort", "steps": 9, **pipeline}]}
    body = {"lane": "cpu", "text": json.dumps(file), "source": "a.yaml", **more}
    return served.client.post("/submissions", json=body, headers={"Idempotency-Key": str(hash(str(body)))})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """A run that is over, with a log and samples of one pipeline."""
    folder = owned_run(tmp_path_factory.mktemp("runs") / "demo")
    (folder / "sort").mkdir()
    (folder / "sort" / "workers.log").write_text("one\ntwo\n")
    shown = Pages(folder)
    yield shown
    shown.close()


def answer_schema(root: Mapping[str, Any], method: str, path: str, status: int) -> Mapping[str, Any] | None:
    """The schema of a JSON answer; None for an answer that is no JSON."""
    answers = root["paths"][path][method.lower()]["responses"]
    content = answers[str(status) if str(status) in answers else "default"].get("content", {})
    for media_type in ("application/json", "application/problem+json"):
        if media_type in content:
            return content[media_type]["schema"]
    return None


def test_what_is_served_is_in_the_document_and_nothing_else(service, pages):
    for served in (service, pages):
        root = served.get("/openapi.json")
        routes = {
            (method, path.removeprefix(PREFIX))
            for path, route in served.server.routes
            for method in route.methods - {"HEAD"}
            if path.startswith(PREFIX)
        }
        assert routes == {(method.upper(), path) for path, one in root["paths"].items() for method in one}
        assert root["openapi"].startswith("3.1")
    assert "/submissions" in service.get("/openapi.json")["paths"]
    assert "/submissions" not in pages.get("/openapi.json")["paths"], "a folder takes none"


def test_the_document_hangs_together(service):
    root = service.get("/openapi.json")
    names = {
        ref.rpartition("/")[2] for ref in re.findall(r'"\$ref":"([^"]+)"', json.dumps(root, separators=(",", ":")))
    }
    assert names <= set(root["components"]["schemas"])
    operations = [one for path in root["paths"].values() for one in path.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    for path, methods in root["paths"].items():
        for one in methods.values():
            parts = {each["name"] for each in one.get("parameters", ()) if each["in"] == "path"}
            assert parts == set(re.findall(r"{(\w+)}", path))
    scope_by_path = {(one.method, one.path): one.scope for one in service.dashboard.addresses}
    assert {
        (method.upper(), path): one.get("x-scope")
        for path, methods in root["paths"].items()
        for method, one in methods.items()
    } == scope_by_path


QUERIES = {
    "/compare": "of=demo/sort&of=demo/tools",
    "/search": "q=s",
    "/timeline/{lane}/gap": "device=rollout-0.0&t=3",
}


def test_answers_of_every_address_are_as_the_document_says(service, pages):
    checked = set()
    for served, lane, name in ((pages, "demo", "sort"), (service, "cpu", "second")):
        root = served.get("/openapi.json")
        for path, methods in root["paths"].items():
            schema = answer_schema(root, "GET", path, 200) if "get" in methods and path != "/stream" else None
            if schema is None:
                continue
            query = QUERIES.get(path, "").replace("demo/tools", "demo/sort" if lane == "cpu" else "demo/tools")
            address = path.format(lane=lane, name=name, step=1, prompt=0, sample=0, id="none", sha256="0" * 64)
            answer = served.client.get(f"{address}?{query}")
            schema = answer_schema(root, "GET", path, answer.status_code)
            assert not faults(answer.json(), schema, root), (path, faults(answer.json(), schema, root)[:5])
            checked |= {path} if answer.status_code == 200 else set()
    assert len(checked) > 25, sorted(checked)
    rows = service.get("/submissions")["items"]
    assert len(rows) == 3
    root = service.get("/openapi.json")
    one = service.get(f"/submissions/{rows[0]['id']}")
    assert not faults(one, answer_schema(root, "GET", "/submissions/{id}", 200), root)


def test_answers_to_what_changes_something_are_as_the_document_says(service):
    root = service.get("/openapi.json")
    asked = [
        ("/pipelines/{lane}/{name}/hold", {}, 200),
        ("/pipelines/{lane}/{name}/rank", {"rank": 3}, 200),
        ("/pipelines/{lane}/{name}/rank", {"rank": "3"}, 400),
        ("/pipelines/{lane}/{name}/release", {}, 200),
        ("/lanes/{lane}/shares", {"text": "shares: {users: {ann: {weight: 2}}}", "source": "s"}, 200),
        ("/lanes/{lane}/alerts", {"rule": "none"}, 409),
        ("/login", {"token": service.token}, 200),
        ("/login", {"tocken": "x"}, 400),
        ("/submissions", [], 400),
        ("/submissions", {"lane": "cpu", "text": 3, "source": "a"}, 400),
        ("/submissions", {"lane": "cpu", "text": "a", "source": "a", "more": 3}, 400),
        ("/submissions", {"lane": "cpu", "text": "pipelines: [{name: a}]", "source": "a", "dry_run": True}, 200),
    ]
    for path, body, status in asked:
        answer = service.client.post(path.format(lane="cpu", name="second"), json=body)
        assert answer.status_code == status, answer.text
        schema = answer_schema(root, "POST", path, status)
        assert not faults(answer.json(), schema, root), (path, faults(answer.json(), schema, root))
        sent = root["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert bool(faults(body, sent, root)) == (status == 400), (path, body)
    told = submit(service, {"name": "fourth", "submit_at_s": 1e6})
    assert not faults(told.json(), answer_schema(root, "POST", "/submissions", told.status_code), root)


def test_a_parameter_beyond_what_the_document_says_is_refused(service):
    root, num = service.get("/openapi.json"), 0
    for path, methods in root["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            schema, name = parameter["schema"], parameter["name"]
            good = dict(parse_qsl(QUERIES.get(path, "")))
            schema = schema.get("anyOf", [schema])[0] if parameter["in"] == "query" else {}
            schema = schema.get("items", schema)
            wrong = [schema[key] + more for key, more in (("minimum", -1), ("maximum", 1)) if key in schema]
            wrong += ["none-of-these"] if "enum" in schema else []
            wrong += ["x" * (schema["maxLength"] + 1)] if "maxLength" in schema else []
            for value in wrong:
                answer = service.client.get(
                    path.format(lane="cpu", name="first", step=1, prompt=0, sample=0), params={**good, name: value}
                )
                assert (answer.status_code, answer.json()["where"]) == (400, f"?{name}"), (path, name, value)
                num += 1
    assert num > 30


def test_the_check_itself_tells_right_from_wrong():
    root = {"components": {"schemas": {"Row": run_schemas.AlertsSeen.model_json_schema(ref_template="#/{model}")}}}
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "required": ["a"],
    }
    assert faults({"a": None}, schema, root) == []
    assert faults({"a": 1}, schema, root) == []
    assert faults({"a": "1"}, schema, root)
    assert faults({"a": True}, schema, root)
    assert faults({}, schema, root) == [": no a"]
    assert faults({"a": 1, "b": 2}, schema, root) == [": b is not in the document"]

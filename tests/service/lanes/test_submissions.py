"""A submission is taken exactly once, wherever the server ends between two instructions, and whatever it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from tests.service.lane_here import LANE, Endless, Lane

from rlmux.cli.main import run_command_line
from rlmux.core.errors import RlmuxError
from rlmux.policies.max_min_fairness import FairShares
from rlmux.runtime.control.control_socket import send_request
from rlmux.runtime.control.run_control import submitted_to
from rlmux.service.dashboard.schemas.timeline_schemas import Submission
from rlmux.service.lanes import submissions
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.lanes.data_dir import open_root
from rlmux.service.lanes.submission_ledger import SubmissionLedger
from rlmux.service.problems import ProblemError

BODY = {"lane": "cpu", "source": "a.yaml", "text": "pipelines: [{name: a, task: sort, steps: 1}]"}


class Killed(BaseException):
    """The process ends here."""


def dying(call: Callable[..., Any], when: str, error: type[BaseException] = Killed) -> Callable[..., Any]:
    """The call, with an end before or after it, once."""
    left = [when]

    def instead(*args: Any, **words: Any) -> Any:
        if left == ["before"]:
            left.clear()
            raise error
        result = call(*args, **words)
        if left == ["after"]:
            left.clear()
            raise error
        return result

    return instead


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    with open_root(tmp_path / "root"):
        one = Lane(tmp_path / "root")
        yield one
        one.close()


def server(lane: Lane) -> submissions.LaneSubmissions:
    """What a server makes of the folder when it starts."""
    root = lane.folder.parent
    return submissions.LaneSubmissions({"cpu": lane}, SubmissionLedger(root), Bundles(root))  # type: ignore[dict-item]


def post(server: submissions.LaneSubmissions, body: object = BODY, key: str = "k") -> tuple[int, Any]:
    """(status, what is told)."""
    asked, response = SimpleNamespace(headers={"idempotency-key": key}, principal=None), Response()
    told = server.submit(asked, Submission.model_validate(body), response)  # type: ignore[arg-type]
    return response.status_code, told


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["add", "ask", "take"])
def test_a_server_killed_between_any_two_steps_takes_a_submission_once(lane, monkeypatch, step, when):
    first = server(lane)
    if step == "ask":
        monkeypatch.setattr(submissions, "send_request", dying(send_request, when))
    else:
        monkeypatch.setattr(first._ledger, step, dying(getattr(first._ledger, step), when))
    with pytest.raises(Killed):
        post(first)
    again = server(lane)
    again.deliver("cpu")  # as the lane's thread does when a server starts
    status, told = post(again)  # the client, which got no answer, sends it again
    assert (status, told.state) == (201, "taken")
    assert [one.pipeline for one in told.pipelines] == ["a"]
    assert len(submitted_to(lane.folder)) == 1
    assert len(again._ledger.newest(10)) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_controller_that_ends_before_its_answer_arrives_is_asked_again(lane, monkeypatch, when):
    monkeypatch.setattr(submissions, "send_request", dying(send_request, when, RlmuxError))
    one = server(lane)
    status, kept = post(one)
    assert (status, kept.pipelines[0].outcome) == (202, "accepted")
    one.deliver("cpu")
    assert post(one)[1].state == "taken"
    assert len(submitted_to(lane.folder)) == 1


def test_what_the_controller_refuses_is_refused_each_time_it_is_sent(lane):
    one = server(lane)
    post(one)
    for _ in range(2):
        with pytest.raises(ProblemError, match="pipeline 'a' is in this run already") as refused:
            post(one, key="another")
        assert refused.value.status == 422


def test_over_the_quota_of_what_waits_429_comes_at_once_with_the_numbers_and_is_in_the_audit(
    tmp_path, dashboard, monkeypatch, capsys
):
    root = tmp_path / "root"
    with open_root(root), closing(Lane(root, "solo", Endless(), FairShares())) as lane:
        one = submissions.LaneSubmissions({"cpu": lane}, SubmissionLedger(root), Bundles(root))  # type: ignore[dict-item]
        served = dashboard(root, lanes=["cpu"], more=(*one.addresses(), *Bundles(root).addresses()))
        shares = {"text": "shares: {users: {ann: {quota: {waiting: 1}}}}", "source": "s.yaml"}
        assert served.client.post("/lanes/cpu/shares", json=shares).status_code == 200
        for name in "abc":
            text = f"pipelines: [{{name: {name}, task: sort, steps: 1, user: ann}}]"
            body = {"lane": "cpu", "source": f"{name}.yaml", "text": text}
            answer = served.client.post("/submissions", json=body, headers={"Idempotency-Key": name})
        reason = "over quota: 1 pipelines of ann wait or are to come, with 1 more it is 2 of 1"
        assert (answer.status_code, reason in answer.json()["detail"]) == (429, True), answer.text
        again = served.client.post("/submissions", json=body, headers={"Idempotency-Key": "c"})
        assert (again.status_code, "retry-after" in again.headers) == (429, False)
        newest = served.get("/submissions")["items"][0]
        assert (newest["state"], newest["pipelines"], len(submitted_to(lane.folder))) == ("over_quota", [], 2)
        written = [row for row in served.get("/audit")["items"] if row["path"] == "/api/v1/submissions"]
        assert [row["status"] for row in written] == [429, 429, 201, 201]

        monkeypatch.setenv("RLMUX_TOKEN", served.token)
        file = tmp_path / "d.yaml"
        file.write_text(f"{LANE}\npolicy: solo\npipelines: [{{name: d, task: sort, steps: 1, user: ann}}]\n")
        for place in (served.url, str(lane.folder)):
            assert run_command_line(["submit", str(file), "--to", place]) == 2
            said = capsys.readouterr()
            assert (said.out, said.err.count("\n"), reason in said.err) == ("", 1, True), said.err
        written = [row for row in served.get("/audit")["items"] if row["path"] == "/api/v1/submissions"]
        assert [row["status"] for row in written] == [429, 429, 429, 201, 201], "the command took it for an answer"


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ({**BODY, "lane": "gpu"}, 404, "no lane 'gpu'"),
        ({**BODY, "text": "pipelines: ["}, 400, "a.yaml:1: this is not YAML"),
        ({**BODY, "text": "a: &a [*a, *a]"}, 400, "a.yaml:1: an alias"),
        ({**BODY, "text": "pipelines: []"}, 400, "a.yaml:1: pipelines is an empty list"),
        ({**BODY, "text": "pipelines: [{name: a, task: sort, rollout: {workers: 3}}]"}, 400, "accepted: up to 1"),
        ({**BODY, "text": "#" * 300_000}, 413, "the file is too large"),
        ({**BODY, "bundle": "../cpu"}, 404, "no such bundle"),
        ({**BODY, "bundle": "0" * 64}, 404, "no such bundle"),
        ({**BODY, "text": f"code_folder: ..\n{BODY['text']}"}, 400, "a path leaves the bundle"),
    ],
)
def test_a_bad_submission_is_refused_in_a_line_and_nothing_is_kept(lane, body, status, line):
    one = server(lane)
    with pytest.raises(ProblemError) as refused:
        post(one, body)
    assert refused.value.status == status
    assert line in str(refused.value)
    assert one._ledger.newest(10) == []


@pytest.mark.parametrize("key", ["", "x" * 101, "a\x00b"])
def test_a_key_is_a_line_of_text(lane, key):
    with pytest.raises(ProblemError, match="not a key"):
        post(server(lane), key=key)


def test_a_key_that_came_with_another_body_is_refused(lane):
    one = server(lane)
    post(one)
    with pytest.raises(ProblemError, match="this key came with another body before"):
        post(one, {**BODY, "source": "b.yaml"})

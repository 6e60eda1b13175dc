"""A server as its clients meet it: two at once, killed in the middle, and asked for what it does not serve."""

from __future__ import annotations

import math

import pytest
from tests.service.clients import weights_of
from tests.service.conftest import FILE
from tests.waiting import until

from rlmux.core.actions import Admit, Queue, RunStage
from rlmux.core.events import WorkArrived
from rlmux.log.run_log import LogReader
from rlmux.service.lane_apis import silence_limits

PARAMS = {"max_tokens": 12, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


def program(client, name: str, served, *, stop_after: int | None = None, session: str | None = None) -> dict:
    """Three steps of a client's own loop, each of which samples with the newest weights; what came of each request."""
    session = session or client.ask("create_session", tags=["rlmux.seed=3"], sdk_version="0")["session_id"]
    model, found = client.model(session), {}
    for step in range(3):
        ids = client.train(model, 3 * step + 1, seed=len(name) * 100 + step)
        save = client.ask("save_weights_for_sampler", model_id=model, seq_id=3 * step + 3, sampling_session_seq_id=step)
        if stop_after == step:
            served.kill()
            return {"session": session}
        sampler = client.result(save["request_id"]).json()["sampling_session_id"]
        asked = {"sampling_session_id": sampler, "prompt": PROMPT, "num_samples": 2, "sampling_params": PARAMS}
        for number in (1, 0):  # the later one arrives first
            ids.append(client.ask("asample", seq_id=number, prompt_logprobs=number == 0, **asked)["request_id"])
        found.update({each.partition(":")[2]: client.result(each).content for each in ids})
    last = client.ask("save_weights", model_id=model, seq_id=10, path="end")
    found["weights"] = weights_of(served, client.result(last["request_id"]).json()["path"])
    return found


def test_a_killed_server_goes_on_and_its_clients_get_what_they_would_have_got(serve, connect):
    undisturbed = serve()
    expected = program(connect(undisturbed), "a", undisturbed)
    assert undisturbed.stop() == 0
    killed = serve(has_own_fork_server=True)
    session = program(connect(killed), "a", killed, stop_after=1)["session"]
    resumed = serve(killed)
    assert program(connect(resumed), "a", resumed, session=session) == expected


def test_what_is_malformed_or_not_served_is_refused_by_name_and_disturbs_nothing(serve, connect):
    served = serve()
    client, other = connect(served), connect(served, "tml-other")
    session = client.ask("create_session", sdk_version="0")["session_id"]
    model = client.model(session)
    ids = client.train(model, 1, seed=1)
    refused = [
        (client.post("create_session", tags=["rlmux.x=1"]), 400, "accepted: rlmux.slo"),
        (client.post("create_model", session_id=session, model_seq_id=1, base_model="org/no"), 400, "is not served"),
        (client.post("create_model", session_id="s9", model_seq_id=1, base_model="rlmux/tiny"), 404, "no session"),
        (client.post("create_model", session_id=session), 400, "model_seq_id: Field required"),
        (client.http.post("forward_backward", content=b"\xff"), 400, "not a protobuf request"),
        (client.post("optim_step", model_id=model, seq_id=1), 409, "was another request"),
        (other.post("optim_step", model_id=model, seq_id=3), 404, "no model"),
        (client.post("load_weights", path="x", optimizer=True, model_id=model, seq_id=3), 400, "accepted: tinker://"),
        (client.post("save_weights", model_id=model, seq_id=3, path="../x"), 400, "checkpoint name"),
        (client.post("copy_weights", a=1), 404, "not served by rlmux: POST /tinker/api/v1/copy_weights"),
        (client.http.post("optim_step", content=b"{"), 400, "Invalid JSON"),
        (client.post("retrieve_future", request_id="s9:train:0:1"), 404, "no request"),
        (client.post("retrieve_future", request_id="s9:sample:0:1"), 410, "no request"),
    ]
    for answer, status, text in refused:
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
    assert client.train(model, 1, seed=1) == ids, "a request that is sent again has the same future"
    assert "grad_norm:mean" in client.result(ids[1]).json()["metrics"]
    (served.folder / "models" / "s0-0" / "sampler-3.safetensors").mkdir()
    blocked = client.ask("save_weights_for_sampler", model_id=model, seq_id=3, path="blocked")["request_id"]
    assert "cannot be written" in client.result(blocked).json()["error"]
    assert client.http.get("checkpoints").json()["checkpoints"] == [], "what could not be saved is not listed"
    saved = client.ask("save_weights", model_id=model, seq_id=4, path="saved")["request_id"]
    assert client.result(saved).json()["path"] == f"tinker://{model}/weights/saved"
    client.ask(f"sessions/{session}/finish", reason={"type": "success"})
    assert client.post("session_heartbeat", session_id=session).status_code == 410
    assert served.stop() == 0


@pytest.mark.slow
def test_one_sample_is_served_between_the_bursts_of_a_client_that_asked_for_hundreds(serve, connect):
    served = serve()
    clients = [connect(served, key) for key in ("tml-many", "tml-one")]
    samplers = [base_sampler(client) for client in clients]
    for number in (*range(1, 500), 0):  # none begins before number 0 is there: all are due at once
        sample(clients[0], samplers[0], number)
    assert clients[1].result(sample(clients[1], samplers[1], 0)).status_code == 200
    behind = orders_since_asked(served).index("s1-sampling-0")
    assert behind <= 1, "behind the order that was given at that moment, at most"
    until(
        lambda: "s0-sampling-0" in orders_since_asked(served)[behind:],
        "the flood to go on",
        seen=lambda: orders_since_asked(served),
        process=served.process,
    )


def orders_since_asked(served) -> list[str]:
    """Pipelines of the orders since the second client asked."""
    with LogReader(served.folder) as log:
        said = [entry.value for entry in log.entries() if isinstance(entry.value, RunStage | WorkArrived)]
    asked = next(place for place, one in enumerate(said) if one.pipeline == "s1-sampling-0")
    return [one.pipeline for one in said[asked:] if isinstance(one, RunStage)]


def base_sampler(client) -> str:
    """A sampler of the base model, in a session of its own."""
    session = client.ask("create_session", sdk_version="0")["session_id"]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "rlmux/tiny"}
    return str(client.ask("create_sampling_session", **wanted)["sampling_session_id"])


def sample(client, sampler: str, number: int) -> str:
    """Ask for four long samples; returns the future's id."""
    params = {**PARAMS, "max_tokens": 60, "stop": []}
    wanted = {"sampling_session_id": sampler, "prompt": PROMPT, "num_samples": 4, "sampling_params": params}
    return str(client.ask("asample", seq_id=number, **wanted)["request_id"])


def test_a_model_beyond_the_memory_waits_with_a_reason_and_begins_when_another_has_ended(serve, connect):
    text = FILE.replace("devices: 1}", "devices: 1, host_memory_gb: 0.4}")
    served = serve(text=text)
    client = connect(served)
    sessions = [client.ask("create_session", sdk_version="0")["session_id"] for _ in range(3)]
    models = [client.model(session) for session in sessions]
    assert [client.result(f"{model}:create").json()["model_id"] for model in models[:2]] == models[:2]
    client.ask(f"sessions/{sessions[0]}/finish", reason={"type": "success"})
    assert client.result(f"{models[2]}:create").json()["model_id"] == models[2]
    assert served.stop() == 0
    with LogReader(served.folder) as log:
        of_third = [entry.value for entry in log.entries() if getattr(entry.value, "pipeline", None) == "s2-0"]
    queued, admitted = (next(one for one in of_third if isinstance(one, kind)) for kind in (Queue, Admit))
    assert of_third.index(queued) < of_third.index(admitted)
    assert "it is first in the queue and starts when s0-0 has ended" in queued.reason


def test_no_session_ends_before_its_client_had_the_time_to_find_the_server_that_is_back():
    assert silence_limits(1059.0, 1000.0, 600.0) == (-math.inf, -math.inf)
    assert silence_limits(1060.0, 1000.0, 600.0) == (460.0, 1030.0)
    assert silence_limits(1012.0, 1000.0, 12.0) == (1000.0, 982.0)

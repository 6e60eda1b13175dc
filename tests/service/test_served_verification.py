"""What clients asked of a server is carried out again alone: equal at every step, or what differs is named."""

from __future__ import annotations

import sqlite3

import pytest

from rlmux.core.errors import UserError
from rlmux.service.served_verification import verify_served

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
PARAMS = {"max_tokens": 6, "temperature": 1.0}


@pytest.mark.slow
def test_requests_of_a_client_are_verified_alone_and_a_changed_hash_or_answer_is_named(serve, connect):
    served = serve()
    client = connect(served)
    sessions = [client.ask("create_session", sdk_version="0")["session_id"] for _ in range(2)]
    models = [client.model(session) for session in sessions]
    for step in range(2):
        for place, model in enumerate(models):
            client.train(model, 3 * step + 1, seed=10 * place + step)
        for model in models:
            asked = {"model_id": model, "seq_id": 3 * step + 3, "sampling_session_seq_id": step}
            save = client.ask("save_weights_for_sampler", **asked)["request_id"]
            sampler = client.result(save).json()["sampling_session_id"]
            sample = {"sampling_session_id": sampler, "prompt": PROMPT, "num_samples": 2, "sampling_params": PARAMS}
            answer = client.ask("asample", seq_id=0, **sample)["request_id"]
            assert client.result(answer).status_code == 200
    loaded = verify_a_loaded_model(client, sessions[1], models[0])
    assert served.stop() == 0
    said: list[str] = []
    verdicts = verify_served(served.folder, ["s0-0", loaded], print_line=said.append)
    assert [each.line() for each in verdicts] == [
        "s0-0: equal at all 2 steps (sha256)",
        "s1-1: equal at all 1 steps (sha256)",
    ]
    assert "s0-0: 4 answers are equal" in said
    with pytest.raises(UserError, match="accepted: s0-0, s1-0, s1-1"):
        verify_served(served.folder, ["s7-0"], print_line=said.append)

    with sqlite3.connect(served.folder / "tinker.db") as ledger:
        ledger.execute("UPDATE results SET body = zeroblob(3) WHERE id = ?", (f"{sessions[0]}:sample:1:0",))
        ledger.execute("UPDATE updates SET sha256 = 'a' WHERE model = ? AND number = 5", (models[1],))
    answer, weights = (verify_served(served.folder, [name], print_line=said.append)[0] for name in ("s0-0", "s1-0"))
    assert answer.reason == f"the answer to {sessions[0]}:sample:1:0"
    assert (weights.num_equal, weights.difference.step, weights.difference.logged) == (1, 2, "a")


def verify_a_loaded_model(client, session: str, source: str) -> str:
    """A second model of a session, begun from a checkpoint that a model of another session made."""
    saved = client.result(client.ask("save_weights", model_id=source, seq_id=7, path="kept")["request_id"]).json()[
        "path"
    ]
    load = client.ask("load_weights", session_id=session, model_seq_id=1, path=saved, optimizer=True)
    client.train(load["model_id"], 1, seed=5)
    behind = client.ask("save_weights", model_id=load["model_id"], seq_id=3, path="end")  # the update is kept before
    assert client.result(behind["request_id"]).status_code == 200
    return "s1-1"

"""Programs of the real SDK, unmodified: every call of theirs, two at once, and a server that is killed under them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.service.clients import weights_of

PROGRAMS = Path(__file__).parents[2] / "tinker"
STEPS = 3


def test_the_sdks_own_calls_are_served(serve, program):
    found = program(serve(), PROGRAMS / "surface.py", "rlmux/tiny").line()
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["forward_lengths"] == found["lengths"]
    assert all(
        text.endswith("e") or len(tokens) == 60
        for text, tokens in zip(found["stop_text"], found["stopped"], strict=True)
    )
    assert len({tuple(tokens) for tokens in found["greedy"]}) == 1
    assert found["score_gap"] < 1e-5
    assert found["resumed_equal"]
    assert found["from_path"]
    assert found["listed"] == ["sampler_weights/kept", "weights/half"]
    assert found["last_checkpoint"]
    assert found["left"] == ["sampler_weights/kept"]
    for name, text in {
        "loss": "RequestFailedError: .*accepted: cross_entropy, importance_sampling",
        "after": "RequestFailedError: .*a forward_backward failed",
        "top_p": "BadRequestError: .*top_p is not served: leave it at 1",
        "model": "BadRequestError: .*accepted: rlmux/tiny",
        "path": "NotFoundError: .*no checkpoint",
    }.items():
        assert re.search(text, found["refusals"][name]), found["refusals"][name]


def test_two_clients_at_once_and_a_killed_server_leave_the_weights_each_has_alone(serve, program):
    served = serve()
    alone = {seed: outcome(program(served, *loop(seed)), served) for seed in (1, 2)}
    assert alone[1]["weights"] != alone[2]["weights"]
    assert all(step["gap"] < 2e-6 for one in alone.values() for step in one["steps"])
    together = {seed: program(served, *loop(seed)) for seed in (1, 2)}
    first = {seed: [one.line()] for seed, one in together.items()}
    served.kill()
    resumed = serve(served)
    assert {seed: outcome(one, resumed, first[seed]) for seed, one in together.items()} == alone


def loop(seed: int) -> tuple[object, ...]:
    return PROGRAMS / "loop.py", "rlmux/tiny", seed, STEPS


def outcome(client, served, before: list | None = None) -> dict:
    """What a loop printed at each step, and the hash of the weights that it ended with."""
    steps = list(before or ())
    while len(steps) < STEPS:
        steps.append(client.line())
    return {"steps": steps, "weights": weights_of(served, client.line()["path"])}

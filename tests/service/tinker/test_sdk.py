"""Programs of the real SDK, unmodified: every call of theirs, two at once, and a server that is killed under them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from tests.service.clients import weights_of
from tests.service.conftest import FILE
from tests.waiting import until
from transformers import AutoModelForCausalLM

from rlmux.cli.main import run_command_line
from rlmux.core.actions import Release, RunStage
from rlmux.core.events import StageFinished, StagePaused
from rlmux.log.run_log import LogReader

PROGRAMS = Path(__file__).parents[2] / "tinker"
STEPS = 3
BUDGETED = f"{FILE}      keys: {{tml-test: {{project: lab}}}}\n      projects: {{lab: {{device_hours_a_day: 100}}}}\n"


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


@pytest.mark.slow  # beside the same of an exported model in test_model_export.py
def test_downloaded_weights_are_a_model_that_transformers_loads(serve, program, tmp_path):
    found = program(serve(), PROGRAMS / "download.py", "rlmux/tiny", tmp_path).line()
    (from_state,) = {file.parent for file in (tmp_path / "cli").rglob("config.json")}
    tokens = torch.tensor([found["tokens"]])
    for folder in (tmp_path / "sdk", from_state):
        names = {file.name for file in folder.iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
        assert not names & {"optimizer.safetensors", "state.json"}
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens).logits[0, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert torch.allclose(logprobs, torch.tensor(found["logprobs"]), atol=1e-5)
    assert re.fullmatch(r"tinker://.+/external_weights/mine", found["path"])
    assert found["types"] == {"external_weights/mine": "external", "weights/half": "training"}
    assert "files are not encrypted here" in found["refusals"]["age"]
    assert "has no training state" in found["refusals"]["load"]


@pytest.mark.slow
def test_two_clients_at_once_and_a_killed_server_leave_the_weights_each_has_alone(serve, program):
    check_two_clients_and_a_killed_server(serve(), serve, program)


@pytest.mark.slow
def test_a_client_that_used_up_its_budget_waits_and_goes_on_once_it_is_raised(serve, program):
    served = serve(text=BUDGETED)
    alone = outcome(program(served, *loop(1)), served)
    assert run_command_line(["budget", str(served.folder), "lab", "0.000001"]) == 0
    paused = program(served, *loop(1))
    until(
        lambda: "of 1e-06 device-hours today; goes on at 00:00 UTC" in errors_of(paused),
        "a pause until midnight",
        seen=lambda: errors_of(paused),
        process=paused.process,
    )
    assert paused.process.poll() is None
    assert run_command_line(["budget", str(served.folder), "lab", "none"]) == 0
    assert outcome(paused, served) == alone


@pytest.mark.slow
def test_a_killed_client_disturbs_no_other_and_its_session_times_out_with_all_it_had(serve, program):
    served = serve(text=f"{FILE}      session_timeout_s: 12\n")
    alone = outcome(program(served, *loop(1)), served)
    victim = program(served, PROGRAMS / "loop.py", "rlmux/tiny", 2, 1000)
    victim.line()
    other = program(served, *loop(1))
    victim.line()
    victim.process.kill()
    assert outcome(other, served) == alone
    until(
        lambda: any(isinstance(each, Release) and each.pipeline == "s1-0" for each in said(served)),
        "the release of the killed client's model",
        seen=lambda: said(served)[-20:],
        poll_s=0.2,
    )
    of_victim = [each for each in said(served) if getattr(each, "pipeline", None) == "s1-0"]
    orders = [each.order for each in of_victim if isinstance(each, RunStage)]
    ended = [each.order for each in said(served) if isinstance(each, StageFinished | StagePaused)]
    assert sorted(orders) == sorted(set(orders) & set(ended)), "no order of it was left open"
    assert not any(isinstance(each, RunStage) for each in of_victim[of_victim.index(ended_at(of_victim)) :])


def errors_of(client) -> str:
    """What a program that runs has written to stderr."""
    return os.pread(client.errors.fileno(), 1 << 20, 0).decode()


def said(served) -> list:
    """Events and actions in the server's log so far."""
    with LogReader(served.folder) as log:
        return [entry.value for entry in log.entries()]


def ended_at(of_pipeline: list) -> Release:
    return next(each for each in of_pipeline if isinstance(each, Release))


def check_two_clients_and_a_killed_server(served, serve, program):
    """Two loops end alike alone and together, though the server is killed between their first steps and the others.
    Returns the server that was started again."""
    alone = {seed: outcome(program(served, *loop(seed)), served) for seed in (1, 2)}
    assert alone[1]["weights"] != alone[2]["weights"]
    assert all(step["gap"] < 2e-6 for one in alone.values() for step in one["steps"])
    together = {seed: program(served, *loop(seed)) for seed in (1, 2)}
    first = {seed: [one.line()] for seed, one in together.items()}
    served.kill()
    resumed = serve(served)
    assert {seed: outcome(one, resumed, first[seed]) for seed, one in together.items()} == alone
    return resumed


def loop(seed: int) -> tuple[object, ...]:
    return PROGRAMS / "loop.py", "rlmux/tiny", seed, STEPS


def outcome(client, served, before: list | None = None) -> dict:
    """What a loop printed at each step, and the hash of the weights that it ended with."""
    steps = list(before or ())
    while len(steps) < STEPS:
        steps.append(client.line())
    return {"steps": steps, "weights": weights_of(served, client.line()["path"])}

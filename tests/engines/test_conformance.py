"""What every rollout engine must do, ours and those behind servers: one suite, and servers that misbehave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.server_environments import make_environment, misbehaving

from rlmux.core.errors import IllegalTransitionError, PipelineError, RlmuxError, UserError
from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.model.model_io import MODEL_CLASSES, build_model
from rlmux.engines.model.weights import SHA256, weights_sha256, write_tensors
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.servers import measuring
from rlmux.engines.servers.factory import make_server_engine
from rlmux.engines.servers.http_connection import ServerGoneError
from rlmux.engines.servers.one_server import MAX_LOST
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.rl.config import EngineConfig, ModelConfig, RolloutConfig, TrainingConfig
from rlmux.rl.determinism_class import DeterminismClass, determinism_class_of
from rlmux.rl.types import FinishedTurn, PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply
from rlmux.rl.user_code.engine_check import CLASSES
from rlmux.rl.vocabulary import CharVocabulary

VOCAB_SIZE = CharVocabulary().vocab_size
MODEL = ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)
SERVERS = ["vllm", pytest.param("sglang", marks=pytest.mark.slow)]
ENGINES = ["rlmux", *SERVERS]
NewEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: make_environment(tmp_path_factory.mktemp(name), name) for name in ("vllm", "sglang")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def new_engine(pythons: dict[str, str]) -> Iterator[NewEngine]:
    made: list[ServerRolloutEngine] = []

    def build(
        name: str, *, is_single_turn: bool = True, misbehaves: dict[str, Any] | None = None, dtype: Any = "float32"
    ) -> Any:
        config = config_of(name, pythons, misbehaves or {}, dtype)
        if name == "rlmux":
            return SlotRolloutEngine(
                MODEL, config.rollout, vocab_size=VOCAB_SIZE, seed=0, is_single_turn=is_single_turn
            )
        engine = make_server_engine(config, vocab_size=VOCAB_SIZE, is_single_turn=is_single_turn, device="cpu")
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def config_of(name: str, pythons: dict[str, str], misbehaves: dict[str, Any], dtype: Any = "float32") -> TrainingConfig:
    engine = (
        EngineConfig()
        if name == "rlmux"
        else EngineConfig(
            name=name,
            python=pythons[name],
            args=misbehaving(**misbehaves),  # type: ignore[arg-type]
        )
    )
    rollout = RolloutConfig(num_slots=4, max_new_tokens=12, max_prompt_tokens=12, engine=engine, dtype=dtype)
    return TrainingConfig(name="a", model=MODEL, rollout=rollout)


def requests_of(num: int, *, stops: tuple[int, ...] = (), max_new_tokens: int = 10) -> list[TrajectoryRequest]:
    return [
        TrajectoryRequest(
            id=TrajectoryId(1, number, 0),
            prompt_tokens=tuple(range(1, 3 + number)),
            max_new_tokens=max_new_tokens,
            stop_tokens=stops,
            seed=3,
        )
        for number in range(num)
    ]


def drain(engine: Any, **limits: Any) -> dict[TrajectoryId, FinishedTurn]:
    finished: dict[TrajectoryId, FinishedTurn] = {}
    while True:
        report = engine.run_chunk(**({"max_decode_steps": 1_000_000, "max_seconds": 60.0} | limits))
        finished |= {turn.id: turn for turn in report.finished}
        if not report.num_active and not report.num_waiting:
            break
    return finished


def expected_logprobs(model: Any, request: TrajectoryRequest, tokens: tuple[int, ...]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0]
    logprobs = torch.log_softmax(logits, -1)[len(request.prompt_tokens) - 1 : -1]
    return [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]


def other_weights(path: Path) -> Any:
    model = build_model(MODEL, VOCAB_SIZE, 0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    tensors = dict(model.named_parameters())
    write_tensors(path, tensors, {SHA256: weights_sha256(tensors)})
    return model


# --- the suite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_samples_continues_moves_and_takes_weights_alike(
    new_engine: NewEngine, name: str, tmp_path: Path
) -> None:
    """One engine for all of it, since a server takes a moment to start."""
    engine = new_engine(name)
    requests = requests_of(6)
    whole = drain_of(engine, requests)
    model = build_model(MODEL, VOCAB_SIZE, 0)
    for request in requests:
        turn = whole[request.id]
        assert (len(turn.tokens), turn.stop_reason, set(turn.versions)) == (10, "length", {0})
        assert turn.logprobs == pytest.approx(expected_logprobs(model, request, turn.tokens), abs=1e-4)
    stop = whole[requests[0].id].tokens[4]
    [stopped] = drain_of(engine, [replace(requests[0], stop_tokens=(stop,))]).values()
    assert stopped.stop_reason == "stop"
    assert stopped.tokens[-1] == stop == whole[requests[0].id].tokens[len(stopped.tokens) - 1]

    engine.submit(requests)  # taken half-way, moved, offloaded, loaded: what was sampled stays
    first = engine.run_chunk(max_decode_steps=3, max_seconds=60.0)
    partials = engine.take_partials(None, with_kv=False)
    assert engine.num_unfinished == 0
    assert [partial.request.id for partial in partials] == sorted(partial.request.id for partial in partials)
    engine.offload()
    with pytest.raises(IllegalTransitionError, match="offloaded"):
        engine.run_chunk(max_decode_steps=1, max_seconds=1.0)
    engine.continue_from(partials)
    engine.load()
    found = {turn.id: turn for turn in first.finished} | drain(engine)
    assert {key: turn.tokens for key, turn in found.items()} == {key: turn.tokens for key, turn in whole.items()}

    trained = other_weights(tmp_path / "1.safetensors")
    engine.load_weights(tmp_path / "1.safetensors", 1)
    turn = drain_of(engine, requests)[requests[5].id]
    assert (engine.version, set(turn.versions)) == (1, {1})
    assert turn.logprobs == pytest.approx(expected_logprobs(trained, requests[5], turn.tokens), abs=1e-4)
    with pytest.raises(UserError, match="not in the vocabulary"):
        engine.submit([replace(requests[0], prompt_tokens=(VOCAB_SIZE,))])
    assert engine.is_unused


def drain_of(engine: Any, requests: list[TrajectoryRequest]) -> dict[TrajectoryId, FinishedTurn]:
    engine.submit(requests)
    return drain(engine)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_goes_on_behind_a_reply_and_forgets_what_is_released(new_engine: NewEngine, name: str) -> None:
    engine = new_engine(name, is_single_turn=False)
    stops = tuple(range(0, VOCAB_SIZE, 12))[:8]
    requests = requests_of(4, stops=stops, max_new_tokens=12)
    turns = drain_of(engine, requests)
    waiting = [turn for turn in turns.values() if turn.stop_reason == "stop"]
    waiting.sort(key=lambda turn: len(turn.tokens))  # the first has budget left
    assert waiting, "no turn was stopped: the test has nothing to reply to"
    engine.reply([TurnReply(id=turn.id, tokens=(7, 8)) for turn in waiting[:1]], [turn.id for turn in waiting[1:]])
    later = drain(engine)
    before, after = waiting[0], later[waiting[0].id]
    assert after.tokens[: len(before.tokens) + 2] == (*before.tokens, 7, 8)[: len(after.tokens)]
    assert after.is_sampled[len(before.tokens)] is False
    assert after.num_turns >= 1
    assert set(later) == {before.id}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_keeps_its_bits_is_found_exact(new_engine: NewEngine, name: str) -> None:
    engine = new_engine(name)
    report = probe_rollout(engine)
    assert determinism_class_of(report.checks) is DeterminismClass.EXACT, report
    assert engine.is_unused


# --- servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVERS)
def test_what_a_good_server_can_is_found_and_recalled(
    new_engine: NewEngine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = new_engine(name).capabilities
    assert (found.keeps_held, found.has_positional_noise, found.reloads) == (True, True, True)
    assert (found.names_versions, found.has_checksums, found.frees_memory) == (True, name == "vllm", True)
    assert [remark.partition(":")[0] for remark in found.remarks] == ([] if name == "vllm" else ["has_checksums"])
    monkeypatch.setattr(measuring, "measure", None)
    assert new_engine(name).capabilities == found


@pytest.mark.parametrize(
    ("misbehaves", "missing"),
    [
        ({"ignores_weights": True}, "reloads: it answers that it took other weights"),
        ({"leaks_when_held": True}, "keeps_held: it makes tokens while it is held"),
        ({"restarts_noise": True}, "has_positional_noise: the same seed begins its noise anew"),
        pytest.param(
            {"keeps_memory": True},
            "frees_memory: asleep, it holds as much memory as awake",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_server_only_says_that_it_can_is_found_out(
    new_engine: NewEngine, misbehaves: dict[str, Any], missing: str
) -> None:
    engine = new_engine("vllm", misbehaves=misbehaves)
    assert [remark for remark in engine.capabilities.remarks if remark.startswith(missing)]
    requests = requests_of(5)
    assert len(drain_of(engine, requests)) == 5


def test_a_server_that_cannot_reload_is_started_anew_for_each_version(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("vllm", misbehaves={"ignores_weights": True})
    url = engine.server.url
    trained = other_weights(tmp_path / "1.safetensors")
    engine.load_weights(tmp_path / "1.safetensors", 1)
    assert engine.server.url != url
    request = requests_of(1)[0]
    turn = drain_of(engine, [request])[request.id]
    assert turn.logprobs == pytest.approx(expected_logprobs(trained, request, turn.tokens), abs=1e-4)


def test_a_version_that_comes_while_such_a_server_sleeps_starts_it_anew_and_awake(
    new_engine: NewEngine, tmp_path: Path
) -> None:
    engine = new_engine("vllm", misbehaves={"ignores_weights": True})
    assert (engine.capabilities.frees_memory, engine.capabilities.reloads) == (True, False)
    trained = other_weights(tmp_path / "1.safetensors")
    engine.offload()
    engine.load_weights(tmp_path / "1.safetensors", 1)
    engine.dialect.wake = None  # type: ignore[method-assign]  # the one that slept is not woken to be ended
    engine.load()
    request = requests_of(1)[0]
    turn = drain_of(engine, [request])[request.id]
    assert turn.logprobs == pytest.approx(expected_logprobs(trained, request, turn.tokens), abs=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_weights_of_a_bfloat16_trainer_are_taken_and_compared_in_what_the_server_samples_in(
    new_engine: NewEngine, tmp_path: Path, dtype: str
) -> None:
    engine = new_engine("vllm", dtype=dtype)
    assert engine.capabilities.reloads
    assert engine.capabilities.has_checksums
    trained = other_weights(tmp_path / "1.safetensors")
    tensors = {name: parameter.detach().to(torch.bfloat16) for name, parameter in trained.named_parameters()}
    trained.load_state_dict(tensors, strict=False)
    write_tensors(tmp_path / "1.safetensors", tensors, {SHA256: weights_sha256(tensors)})
    engine.load_weights(tmp_path / "1.safetensors", 1)
    request = requests_of(1)[0]
    turn = drain_of(engine, [request])[request.id]
    assert turn.logprobs == pytest.approx(expected_logprobs(trained, request, turn.tokens), abs=1e-4)


def test_a_server_whose_bits_depend_on_the_batch_is_replayable_at_most(new_engine: NewEngine) -> None:
    engine = new_engine("vllm", misbehaves={"batch_noise": 1e-3})
    checks = {check.name: check.is_equal for check in probe_rollout(engine).checks}
    assert not checks["batches"]


def test_a_server_that_is_busy_forgetful_and_slow_changes_nothing(
    new_engine: NewEngine,
) -> None:
    engine = new_engine("vllm")
    requests = requests_of(6)
    expected = drain_of(engine, requests)
    engine.server.request("POST", "/misbehave", {"busy": 3, "lose": 3, "slow_wake_s": 0.4, "late_memory_s": 0.4})
    engine.submit(requests)
    first = engine.run_chunk(max_decode_steps=2, max_seconds=60.0)
    awake = engine.memory_bytes()
    engine.offload()
    assert engine.resident_bytes() < awake - 10e6
    engine.load()
    assert {turn.id: turn for turn in first.finished} | drain(engine) == expected


def test_a_request_is_given_up_once_it_was_lost_more_than_five_times_without_a_token(new_engine: NewEngine) -> None:
    engine = new_engine("vllm")
    request = requests_of(1)[0]
    expected = drain_of(engine, [request])
    engine.server.request("POST", "/misbehave", {"lose": MAX_LOST, "lose_after": 0})
    assert drain_of(engine, [request]) == expected
    engine.server.request("POST", "/misbehave", {"lose": MAX_LOST + 1, "lose_after": 1})  # each brings a token
    assert drain_of(engine, [request]) == expected
    engine.server.request("POST", "/misbehave", {"lose": MAX_LOST + 1, "lose_after": 0})
    engine.submit([request])
    with pytest.raises(ServerGoneError, match=r"vllm lost .* 6 times: its answer ended without a reason"):
        drain(engine)


def test_a_server_that_leaves_out_logprobs_fails_the_pipeline(new_engine: NewEngine) -> None:
    engine = new_engine("vllm")
    engine.server.request("POST", "/misbehave", {"no_logprobs": True})
    engine.submit(requests_of(1, max_new_tokens=12))
    with pytest.raises(PipelineError, match="0 log-probs for"):
        drain(engine)


def test_weights_of_another_version_than_was_sent_fail_the_pipeline(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("vllm")
    other_weights(tmp_path / "1.safetensors")
    engine.server.request("POST", "/misbehave", {"wrong_version": True})
    with pytest.raises(PipelineError, match="reports weights of version 'before'; accepted: 1"):
        engine.load_weights(tmp_path / "1.safetensors", 1)


def test_a_server_that_sleeps_without_its_weights_gets_them_when_it_wakes(new_engine: NewEngine) -> None:
    engine = new_engine("vllm", misbehaves={"wakes_otherwise": True})
    assert engine.capabilities.drops_weights
    requests = requests_of(3)
    before = drain_of(engine, requests)
    engine.offload()
    engine.load()
    assert drain_of(engine, requests) == before


def test_a_server_that_wakes_with_other_weights_is_found_by_its_canary(new_engine: NewEngine) -> None:
    engine = new_engine("vllm")
    engine.capabilities = replace(engine.capabilities, drops_weights=False)
    engine.offload()
    engine.server.request("POST", "/misbehave", {"wakes_otherwise": True})
    with pytest.raises(PipelineError, match="woke with other weights"):
        engine.load()


def test_a_server_that_dies_is_a_lost_worker_and_ends_whole(new_engine: NewEngine) -> None:
    engine = new_engine("vllm")
    servers = psutil.Process().children(recursive=True)
    engine.submit(requests_of(2))
    for process in servers:
        if "small_server" in " ".join(process.cmdline()) or "api_server" in " ".join(process.cmdline()):
            process.kill()
    with pytest.raises(ServerGoneError):
        drain(engine)


def test_a_worker_that_is_killed_takes_its_server_along(pythons: dict[str, str], tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        engine = make_server_engine(
            config_of("vllm", pythons, {}), vocab_size=VOCAB_SIZE, is_single_turn=True, device="cpu"
        )
        os.write(theirs, f"{engine._process._reaper.pid} {engine._settings.folder}\n".encode())
        time.sleep(600)
    reaper, folder = os.read(ours, 1000).decode().split()
    family = [psutil.Process(int(reaper)), *psutil.Process(int(reaper)).children(recursive=True)]
    assert len(family) >= 2
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert not Path(folder).exists()


def test_a_server_of_another_kind_or_model_is_refused(new_engine: NewEngine) -> None:
    with pytest.raises(RlmuxError, match=r"/version was not answered in JSON: <html>another program</html>"):
        new_engine("vllm", misbehaves={"is_other": True})
    with pytest.raises(RlmuxError, match="2 tokens were requested, 2 came with 0 log-probs"):
        new_engine("vllm", misbehaves={"no_logprobs": True})


def test_a_seed_is_of_the_trajectory_and_where_noise_begins_anew_of_the_position() -> None:
    from rlmux.engines.servers.trajectory import ServedTrajectory

    request = requests_of(1)[0]
    begun = PartialTrajectory(
        request=request,
        tokens=(1, 2),
        is_sampled=(True, True),
        logprobs=(-1.0, -1.0),
        versions=(0, 0),
        pending_tokens=(),
        num_turns=0,
        is_waiting_for_reply=False,
        kv=None,
    )
    fresh, later = ServedTrajectory(request=request), ServedTrajectory.from_partial(begun)
    assert fresh.noise_seed(is_positional=True) == later.noise_seed(is_positional=True)
    assert fresh.noise_seed(is_positional=False) != later.noise_seed(is_positional=False)
    other = ServedTrajectory(request=replace(request, id=TrajectoryId(1, 0, 1)))
    assert other.noise_seed(is_positional=True) != fresh.noise_seed(is_positional=True)


def test_an_environment_is_asked_for_the_class_that_a_new_model_has() -> None:
    assert {architecture: made.__name__ for architecture, (made, _) in MODEL_CLASSES.items()} == CLASSES

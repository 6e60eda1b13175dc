"""How a server gets its weights: by links, through buffers, beside a base; and servers of several GPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.server_environments import make_environment, misbehaving
from tests.waiting import until

from rlmux.core.errors import PipelineError, RlmuxError
from rlmux.engines.adapters.lora import inject_adapter, trained_parameters
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weights import MODEL_FILE, publish_tensors, write_tensors
from rlmux.engines.servers.factory import make_server_engine
from rlmux.engines.servers.http_connection import ServerConnection, ServerGoneError
from rlmux.engines.servers.model_folder import ModelFolder, new_folder
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.engines.servers.transfer import buffer_bytes, pieces
from rlmux.engines.spare_files import retire
from rlmux.rl.config import AdapterConfig, EngineConfig, ModelConfig, RolloutConfig, TrainingConfig
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import CharVocabulary

VOCAB_SIZE = CharVocabulary().vocab_size
MODEL = ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)
ADAPTER = AdapterConfig(rank=2, alpha=4.0)
VERSIONS = ["0.24.0", "0.32.0"]
NewEngine = Callable[..., ServerRolloutEngine]


class FileBuffers:
    """Buffers in a file, as the small server opens them in place of a GPU's."""

    num_handed_out = 0

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.tensors = [torch.empty(num_bytes, dtype=torch.uint8)]
        self._path = folder / "buffer"

    def handles(self) -> dict[str, Any]:
        FileBuffers.num_handed_out += 1
        self._path.write_bytes(self.tensors[0].numpy().tobytes())
        return {"GPU-a": ("file", str(self._path), 0)}

    def release(self) -> None:
        self._path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        version: make_environment(tmp_path_factory.mktemp(version), "vllm", version=version) for version in VERSIONS
    }


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def new_engine(pythons: dict[str, str], tmp_path: Path) -> Iterator[NewEngine]:
    made: list[ServerRolloutEngine] = []

    def build(
        version: str = "0.24.0",
        *,
        misbehaves: dict[str, Any] | None = None,
        adapter: AdapterConfig | None = None,
        has_buffers: bool = False,
        tensor_parallel: int = 1,
        room: int | None = None,
        args: tuple[str, ...] = (),
    ) -> ServerRolloutEngine:
        words = (*misbehaving(**(misbehaves or {})), *args)
        given = EngineConfig(name="vllm", python=pythons[version], args=words)
        rollout = RolloutConfig(
            num_slots=4,
            max_new_tokens=12,
            max_prompt_tokens=40,
            engine=given,
            tensor_parallel=tensor_parallel,
        )
        config = TrainingConfig(name="a", model=MODEL, rollout=rollout, adapter=adapter)
        engine = make_server_engine(
            config,
            vocab_size=VOCAB_SIZE,
            is_single_turn=True,
            device="cpu",
            new_buffers=(lambda size: FileBuffers(tmp_path, room or size)) if has_buffers else None,
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.close()


def requests_of(num: int, *, step: int = 1, prompt: tuple[int, ...] = ()) -> list[TrajectoryRequest]:
    return [
        TrajectoryRequest(
            id=TrajectoryId(step, number, 0),
            prompt_tokens=prompt or tuple(range(1, 3 + number)),
            max_new_tokens=10,
            stop_tokens=(),
            seed=3,
        )
        for number in range(num)
    ]


def sample(engine: ServerRolloutEngine, requests: list[TrajectoryRequest]) -> dict[TrajectoryId, FinishedTurn]:
    engine.submit(requests)
    return drain(engine)


def drain(engine: ServerRolloutEngine) -> dict[TrajectoryId, FinishedTurn]:
    finished: dict[TrajectoryId, FinishedTurn] = {}
    while True:
        report = engine.run_chunk(max_decode_steps=1_000_000, max_seconds=60.0)
        finished |= {turn.id: turn for turn in report.finished}
        if not report.num_active and not report.num_waiting:
            return finished


def assert_is_of(model: Any, engine: ServerRolloutEngine, *, step: int = 1) -> None:
    """The engine samples with the weights of this model."""
    for request in (requests := requests_of(2, step=step)):
        turn = sample(engine, requests)[request.id]
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt_tokens, *turn.tokens]])).logits[0]
        logprobs = torch.log_softmax(logits, -1)[len(request.prompt_tokens) - 1 : -1]
        expected = [float(row[token]) for row, token in zip(logprobs, turn.tokens, strict=True)]
        assert turn.logprobs == pytest.approx(expected, abs=1e-4)


def trained(seed: int) -> Any:
    """The pipeline's model after some training."""
    model = build_model(MODEL, VOCAB_SIZE, 0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


# --- links ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[ModelFolder]:
    path = new_folder()
    yield ModelFolder(path, MODEL, VOCAB_SIZE, 0, "bfloat16")
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_a_new_model_is_written_once_in_the_dtype_of_sampling(folder: ModelFolder) -> None:
    assert {tensor.dtype for tensor in folder.tensors.values()} == {torch.bfloat16}
    assert sorted(file.name for file in folder.path.iterdir()) == ["config.json", MODEL_FILE]


def test_a_version_has_a_second_name_and_is_not_written_over_while_it_is_shown(folder: ModelFolder) -> None:
    published = new_folder()
    first, second = trained(1), trained(2)
    publish_tensors(published / "1.safetensors", dict(first.named_parameters()), {"version": "1"})
    folder.show(published / "1.safetensors", 1)
    assert (folder.path / MODEL_FILE).stat().st_ino == (published / "1.safetensors").stat().st_ino
    retire(published / "1.safetensors")
    publish_tensors(published / "2.safetensors", dict(second.named_parameters()), {"version": "2"})
    assert torch.equal(folder.tensors["model.norm.weight"], first.model.norm.weight)
    folder.show(published / "2.safetensors", 2)
    assert torch.equal(folder.tensors["model.norm.weight"], second.model.norm.weight)
    for file in published.iterdir():
        file.unlink()
    published.rmdir()


def test_a_checkpoint_is_linked_without_its_tokenizer_and_its_defaults_of_sampling(tmp_path: Path) -> None:
    checkpoint, shown = tmp_path / "checkpoint", tmp_path / "shown"
    build_model(MODEL, VOCAB_SIZE, 0).save_pretrained(checkpoint, max_shard_size="20KB")
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "generation_config.json").write_text('{"top_p": 0.5}')
    shown.mkdir()
    folder = ModelFolder(shown, ModelConfig(path=str(checkpoint)), VOCAB_SIZE, 0, "float32")
    names = {file.name for file in shown.iterdir()}
    assert len([name for name in names if name.startswith("model-")]) > 1
    assert names - {name for name in names if name.startswith("model")} == {"config.json"}
    assert all(file.is_symlink() for file in shown.iterdir())
    with torch.inference_mode():
        logits = build_model(MODEL, VOCAB_SIZE, 0)(torch.tensor([[1, 2, 3, 4]])).logits[0, 1:3]
    assert folder.logprobs([1, 2], [3, 4]).tolist() == pytest.approx(
        torch.log_softmax(logits, -1)[[0, 1], [3, 4]].tolist(), abs=1e-5
    )
    model = trained(1)
    write_tensors(tmp_path / "1.safetensors", dict(model.named_parameters()), {"version": "1"})
    folder.show(tmp_path / "1.safetensors", 1)
    assert {file.name for file in shown.iterdir()} == {"config.json", MODEL_FILE}
    assert (checkpoint / "model.safetensors.index.json").exists()


# --- buffers ----------------------------------------------------------------------------------------------------


def test_tensors_go_through_a_buffer_piece_by_piece_and_none_is_cut(tmp_path: Path) -> None:
    tensors = {name: parameter.detach() for name, parameter in trained(1).named_parameters()}
    room = max(tensor.numel() * 4 for tensor in tensors.values())
    assert buffer_bytes(tensors) == sum(tensor.numel() * 4 for tensor in tensors.values())
    found: dict[str, torch.Tensor] = {}
    num_pieces = 0
    for piece in pieces(tensors, FileBuffers(tmp_path, room)):
        assert sum(piece.sizes) <= room
        found |= {name: view.clone() for name, view in piece.views(0)}
        num_pieces += 1
    assert num_pieces > 2
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_takes_every_version_through_buffers_and_reads_no_file(
    new_engine: NewEngine, tmp_path: Path, version: str
) -> None:
    room = VOCAB_SIZE * 32 * 4
    engine = new_engine(version, has_buffers=True, room=room)
    assert engine.capabilities.takes_tensors, engine.capabilities.remarks
    assert (engine.capabilities.names_versions, engine.capabilities.drops_weights) == (version == "0.32.0", True)
    FileBuffers.num_handed_out = 0
    for number in (1, 2):
        model = trained(number)
        path = tmp_path / f"{number}.safetensors"
        write_tensors(path, dict(model.named_parameters()), {"version": str(number)})
        url = engine.server.url
        engine.offload()
        engine.load_weights(path, number)
        engine.load()
        assert engine.server.url == url, "it was not started again"
        assert_is_of(model, engine, step=number)
    assert FileBuffers.num_handed_out > 4
    assert not (tmp_path / "buffer").exists(), "a buffer is given back"


def test_a_server_that_ignores_buffers_reads_files_instead(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine(has_buffers=True, misbehaves={"ignores_transfer": True})
    assert (engine.capabilities.takes_tensors, engine.capabilities.reloads) == (False, True)
    assert [each for each in engine.capabilities.remarks if each.startswith("takes_tensors: it answers that it took")]
    model = trained(1)
    write_tensors(tmp_path / "1.safetensors", dict(model.named_parameters()), {"version": "1"})
    engine.load_weights(tmp_path / "1.safetensors", 1)
    assert_is_of(model, engine)


# --- a server that runs already ---------------------------------------------------------------------------------


@pytest.fixture
def running(pythons: dict[str, str], folder: ModelFolder) -> Iterator[Callable[..., TrainingConfig]]:
    """Starts a server of the model, or of another one, and gives the pipeline that samples with it."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(*words: str, has_others: bool = False) -> TrainingConfig:
        if has_others:
            folder.show_others()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            pythons["0.32.0"],
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--port",
            str(port),
            "--enable-scale-out",
            *words,
        ]
        begun.append(subprocess.Popen([*command, "--model", str(folder.path), "--dtype", "bfloat16"]))
        engine = EngineConfig(name="vllm", url=f"http://127.0.0.1:{port}")
        connection = ServerConnection(str(engine.url))
        until(lambda: connection.is_there("/health"), "the server answers", process=begun[-1])
        rollout = RolloutConfig(num_slots=4, max_new_tokens=12, max_prompt_tokens=12, dtype="bfloat16", engine=engine)
        return TrainingConfig(name="a", model=MODEL, rollout=rollout)

    yield start
    for server in begun:
        server.kill()
        server.wait()


def test_a_server_that_runs_already_shows_that_it_takes_other_weights_and_gets_its_own_back(running) -> None:
    engine = make_server_engine(running(), vocab_size=VOCAB_SIZE, is_single_turn=True, device="cpu")
    assert engine.capabilities.reloads
    assert len(sample(engine, requests_of(2))) == 2
    engine.close()


@pytest.mark.parametrize(
    ("has_others", "complaint"),
    [
        (False, r"does not take new weights; accepted: rollout\.engine\.python"),
        (True, "nats off a forward pass of the pipeline's model; accepted: a server of this model"),
    ],
)
def test_a_server_that_runs_and_keeps_its_weights_or_other_ones_is_refused(running, has_others, complaint) -> None:
    config = running(*misbehaving(ignores_weights=True), has_others=has_others)
    with pytest.raises(PipelineError, match=complaint):
        make_server_engine(config, vocab_size=VOCAB_SIZE, is_single_turn=True, device="cpu")


# --- adapters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_of_an_adapter_has_a_name_and_the_one_before_is_forgotten(
    new_engine: NewEngine, tmp_path: Path, version: str
) -> None:
    engine = new_engine(version, adapter=ADAPTER)
    base = build_model(MODEL, VOCAB_SIZE, 0)
    assert_is_of(base, engine)
    inject_adapter(base, ADAPTER, 0)
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in trained_parameters(base).values():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        path = tmp_path / f"{number}.safetensors"
        write_tensors(path, trained_parameters(base), {"version": str(number)})
        engine.offload()
        engine.load()
        engine.load_weights(path, number)
        assert_is_of(base, engine, step=number)
        assert engine.adapter == f"version-{number}"
    with pytest.raises(RlmuxError, match="'version-1' cannot be found"):
        engine.dialect.unload_adapter(engine.server, "version-1")


def served(engine: ServerRolloutEngine, requests: list[TrajectoryRequest], *, step: int) -> tuple[int, int]:
    """(tokens of prompts, those that were cached) of these requests, counted by the server behind each turn."""
    engine.submit(requests)
    wanted = sum(len(request.prompt_tokens) for request in requests)
    counted = cached = 0
    for later in range(step, step + 20):
        report = engine.run_chunk(max_decode_steps=1_000_000, max_seconds=60.0)
        counted, cached = counted + report.prompt_tokens, cached + report.cached_tokens
        if counted >= wanted:
            break
        engine.submit(requests_of(1, step=later))
    return counted, cached


def samples_of(prompt: int, num: int, *, step: int) -> list[TrajectoryRequest]:
    """Samples of one prompt of 33 tokens: two blocks of the cache, and one more."""
    tokens = tuple(range(prompt, prompt + 33))
    [request] = requests_of(1, step=step, prompt=tokens)
    return [replace(request, id=TrajectoryId(step, prompt, sample)) for sample in range(num)]


def test_samples_of_a_prompt_go_to_the_copy_of_the_model_that_has_it_cached(new_engine: NewEngine) -> None:
    engine = new_engine(args=("--data-parallel-size", "2"))
    engine._num_copies = 2
    counted, cached = served(engine, [*samples_of(1, 3, step=1), *samples_of(2, 3, step=1)], step=2)
    assert counted >= 6 * 33
    assert cached >= 4 * 32


def test_what_the_prefix_cache_served_is_reported_and_is_nothing_of_other_weights(
    new_engine: NewEngine, tmp_path: Path
) -> None:
    engine = new_engine()
    counted, cached = served(engine, samples_of(1, 3, step=1), step=2)
    assert counted >= 3 * 33
    assert cached >= 2 * 32
    model = trained(1)
    write_tensors(tmp_path / "1.safetensors", dict(model.named_parameters()), {"version": "1"})
    engine.load_weights(tmp_path / "1.safetensors", 1)
    _, cached = served(engine, samples_of(1, 1, step=30), step=31)
    assert cached == 0
    assert_is_of(model, engine, step=60)


# --- servers of several GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_a_server_of_several_gpus_is_one_worker_whose_trajectories_outlive_it(
    new_engine: NewEngine, tmp_path: Path, num_gpus: int
) -> None:
    """Paused, moved to another gang, offloaded, killed in one of its members: every trajectory ends as alone."""
    requests = requests_of(6)
    whole = sample(new_engine(), requests)
    engine, other = (new_engine(tensor_parallel=num_gpus) for _ in range(2))
    assert engine._process is not None
    members = [psutil.Process(pid) for pid in sorted(engine._process.pids())]
    assert len(members) == num_gpus
    engine.submit(requests)
    first = engine.run_chunk(max_decode_steps=3, max_seconds=60.0)
    partials = engine.take_partials(None, with_kv=False)
    engine.offload()
    engine.load()
    other.continue_from(partials)
    last = drain(engine)  # what ended while the others were taken
    found = {turn.id: turn for turn in first.finished} | last | drain(other)
    assert {key: turn.tokens for key, turn in found.items()} == {key: turn.tokens for key, turn in whole.items()}

    engine.submit(requests)
    report = engine.run_chunk(max_decode_steps=2, max_seconds=60.0)
    os.kill(members[-1].pid, signal.SIGKILL)

    def sample_again() -> None:
        """A gang that is fast may be through before it notices that a member is gone."""
        drain(engine)
        engine.submit(requests)

    with pytest.raises(ServerGoneError):
        until(sample_again, "a server that notices the loss of a member")
    _, alive = psutil.wait_procs(members, timeout=60)
    assert alive == []
    assert len(report.finished) < len(requests)

"""The small server is like the servers that it stands for: versions, transfers, adapters, prefixes, members."""

from __future__ import annotations

import base64
import http.client
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.data.servers.record_vllm import write_adapter
from tests.server_environments import make_environment, misbehaving
from tests.waiting import until

from rlmux.engines.model.model_io import build_model
from rlmux.engines.servers.process import _free_port
from rlmux.rl.config import ModelConfig
from rlmux.rl.vocabulary import CharVocabulary

pytestmark = pytest.mark.xdist_group("small-server")  # one process starts the servers that tests share
VOCAB_SIZE = CharVocabulary().vocab_size
MODEL = ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)
RECORDED = json.loads((Path(__file__).parents[2] / "data/servers/vllm-0.24.0.json").read_text())
TRANSFER = ("--weight-transfer-config", '{"backend":"ipc"}')
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
QUERIES = "model.layers.0.self_attn.q_proj.weight"
KEYS = "model.layers.0.self_attn.k_proj.weight"


class Fake:
    """One running small server."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: Path, adapter: Path) -> None:
        self.process, self.port, self.model, self.adapter = process, port, model, adapter

    def request(self, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
        with self.answer(method, path, body, headers) as answer:
            return answer.status, as_json(answer.read().decode())

    @contextmanager
    def answer(self, method: str, path: str, body: Any, headers: Any = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def post(self, path: str, body: Any = None) -> Any:
        """The answer of a request that succeeds."""
        status, answer = self.request("POST", path, body)
        assert status == 200, answer
        return answer

    def stream(self, body: Any, between: Callable[[], Any] = lambda: None, headers: Any = None) -> list[Any]:
        """All events of an answer; `between` runs after the first one."""
        events: list[Any] = []
        with self.answer("POST", "/inference/v1/generate", body, headers) as answer:
            assert answer.status == 200
            for line in answer:
                if line.strip():
                    events.append(as_json(line.decode().strip().removeprefix("data:").strip()))
                    if len(events) == 1:
                        between()
        return events

    def sample(self, **more: Any) -> list[float]:
        """Log-probs of a short answer."""
        events = self.stream(generate("sampled", 3, **more))
        return [each["logprob"] for event in events[:-1] for each in event["choices"][0]["logprobs"]["content"]]

    def cached(self, body: dict[str, Any], headers: Any = None) -> int:
        """Cached prompt tokens of an answer, as its usage has them."""
        events = self.stream(body | {"stream_options": {"include_usage": True}}, headers=headers)
        return int(events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"])

    def update(self, tensors: Mapping[str, torch.Tensor], path: Path, **info: Any) -> tuple[int, Any]:
        return self.request("POST", "/update_weights", {"update_info": packed(tensors, path) | info})

    @property
    def is_sleeping(self) -> bool:
        return bool(self.request("GET", "/is_sleeping")[1]["is_sleeping"])

    def members(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def memory_bytes(self) -> float:
        process = psutil.Process(self.process.pid)
        return float(sum(each.memory_info().rss for each in (process, *process.children())))


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def generate(name: str, num: int, tokens: Any = range(1, 9), **more: Any) -> dict[str, Any]:
    sampling = {"seed": 3, "temperature": 1.0, "max_tokens": num, "stop_token_ids": []}
    return {"request_id": name, "token_ids": [*tokens], "stream": True, "sampling_params": sampling, **more}


def packed(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """An update_info whose handle is a file in place of a buffer on a device."""
    path.write_bytes(b"head" + b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values()))
    return {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "tensor_sizes": [tensor.numel() * 4 for tensor in tensors.values()],
        "packed": True,
        "ipc_handles_pickled": pickled({"GPU-a": ("file", str(path), 4)}),
    }


def pickled(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder, and an adapter's for a model of these names."""
    folder = tmp_path_factory.mktemp("files")
    build_model(MODEL, VOCAB_SIZE, 0).save_pretrained(folder / "model")
    write_adapter(folder / "adapter", MODEL)
    return folder / "model", folder / "adapter"


Start = Callable[..., Fake]


@pytest.fixture(scope="module")
def start(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a small server; the module ends it."""
    started: list[subprocess.Popen[str]] = []

    def begin(version: str | None, *flags: str, is_awaited: bool = True, **environment: str) -> Fake:
        python = make_environment(tmp_path_factory.mktemp("environment"), "vllm", version=version)
        port = _free_port()
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--model", str(files[0])]
        variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        process = subprocess.Popen(
            [*command, *flags], env=os.environ | variables | environment, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        fake = Fake(process, port, *files)
        if is_awaited:
            until(
                lambda: fake.request("GET", "/health")[0] == 200,
                "the small server's answer",
                process=process,
                not_yet=(OSError,),
            )
        return fake

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def fake(start: Start) -> Fake:
    """0.24 with everything that can be switched on."""
    return start("0.24.0", "--tokens-only", "--enable-prompt-tokens-details", *TRANSFER, *LORA)


# --- like the recorded server -----------------------------------------------------------------------------------

RECORDED_STARTS = [name for name, found in RECORDED["starts"].items() if "records" in found]


@pytest.mark.parametrize("name", RECORDED_STARTS)
def test_its_answers_have_the_shape_of_those_of_the_real_server(start: Start, name: str) -> None:
    fake = start("0.24.0", *RECORDED["starts"][name]["flags"])
    for record in RECORDED["starts"][name]["records"]:
        replay(fake, record)


def replay(fake: Fake, record: dict[str, Any]) -> None:
    text = json.dumps(record).replace("<model>", str(fake.model)).replace("<adapter>", str(fake.adapter))
    given = json.loads(text)
    if "events" not in record:
        status, answer = fake.request(given["method"], given["path"], given["body"], given.get("headers"))
        assert status == given["status"], (record["name"], answer)
        if given["path"] == "/metrics":
            answer = [line for line in answer.splitlines() if not line.startswith("#")]
        assert shape_of(answer) == shape_of(given["answer"]), record["name"]
        return
    sampling = given["body"]["sampling_params"]
    sampling["max_tokens"] = min(sampling["max_tokens"], 200)  # as many as are under way for a while here
    asides = [threading.Thread(target=replay, args=(fake, each)) for each in record.get("meanwhile", ())]
    for aside in asides:
        aside.start()
    events = fake.stream(given["body"], lambda: [replay(fake, each) for each in record.get("during", ())])
    for aside in asides:
        aside.join()
    for each in (events, given["events"]):
        forget_aborts(each)
    shapes, recorded = ([shape_of(event) for event in each] for each in (events, given["events"]))
    assert set(shapes) <= set(recorded), record["name"]  # tokens that come together are one event
    assert shapes[-2:] == recorded[-2:], record["name"]
    assert endings_of(events) == endings_of(given["events"]), record["name"]


def shape_of(found: Any) -> str:
    """Its keys and types; a list has the shapes of its elements, each once."""
    match found:
        case dict():
            return "{" + ", ".join(f"{key}: {shape_of(found[key])}" for key in sorted(found)) + "}"
        case list():
            return f"[{', '.join(sorted({shape_of(each) for each in found}))}]"
        case "" | "[DONE]":
            return repr(found)
    return type(found).__name__


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    return [choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())]


def endings_of(events: list[Any]) -> set[str]:
    """Reasons of the end that an answer's events name."""
    return {choice["finish_reason"] for choice in choices_of(events) if choice["finish_reason"]}


def forget_aborts(events: list[Any]) -> None:
    """The real server names an abort in the event of a token that it sends along, if there is one: by chance."""
    for choice in choices_of(events):
        if choice["finish_reason"] == "abort":
            choice["finish_reason"] = None


def test_a_flag_of_a_newer_version_is_refused_in_the_words_of_the_real_server(start: Start) -> None:
    recorded = RECORDED["starts"]["scale-out"]
    fake = start("0.24.0", "--enable-scale-out", is_awaited=False)
    _, words = fake.process.communicate(timeout=60)
    assert (fake.process.returncode, words.splitlines()[-1]) == (recorded["exit_code"], recorded["last_line"])


# --- versions ---------------------------------------------------------------------------------------------------


def ended(fake: Fake, path: str, ids: list[str], num: int = 300) -> list[Any]:
    return fake.stream(generate("a", num), lambda: fake.post(path, {"request_ids": ids}))


def test_0_24_aborts_by_its_own_id_and_ends_without_an_abort(fake: Fake) -> None:
    assert len(ended(fake, "/abort_requests", ["a"], num=20)) > 2  # nothing was aborted
    events = ended(fake, "/abort_requests", ["generate-tokens-a"])
    assert endings_of(events) == set()
    assert events[-1] == "[DONE]"
    assert sum(len(event["choices"][0]["token_ids"]) for event in events[:-1]) < 300


@pytest.mark.parametrize("version", ["0.32.0", "0.99.0"])
def test_0_32_and_what_is_newer_name_an_abort_and_their_weights(start: Start, version: str) -> None:
    fake = start(version, "--enable-scale-out", *TRANSFER)
    assert fake.request("GET", "/version") == (200, {"version": version})
    events = ended(fake, "/inference/v1/abort_requests", ["generate-tokens-a"])
    assert endings_of(events) == {"abort"}
    fake.post("/update_weight_version", {"new_version": "4"})
    assert fake.request("GET", "/weight_info") == (200, {"weight_version": "4"})
    choice = fake.stream(generate("b", 2))[-2]["choices"][0]
    assert choice["weight_versions"] == [{"version": "4", "start": 0, "end": 2}]
    assert set(fake.post("/weight_checker", {"action": "checksum"})) == {"checksums"}
    assert fake.post("/sleep?level=1&mode=abort") == {"status": "sleeping", "level": 1}
    assert fake.post("/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert fake.post("/wake_up") == {"status": "awake", "tags": None}


def test_0_32_has_no_scale_out_endpoints_without_one_of_their_flags(start: Start) -> None:
    assert start("0.32.0").request("POST", "/inference/v1/generate", generate("a", 2))[0] == 403
    assert len(start("0.32.0", "--tokens-only").sample()) == 3


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def changed(files: tuple[Path, Path]) -> dict[str, torch.Tensor]:
    """A tensor of the model with other values."""
    return {QUERIES: load_file(files[0] / "model.safetensors")[QUERIES] * -3}


def reload(fake: Fake, folder: Path) -> None:
    fake.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


def test_a_transfer_changes_what_was_sent_at_its_end(fake: Fake, changed: dict[str, torch.Tensor], tmp_path: Path):
    before = fake.sample()
    (tmp_path / "model").mkdir()
    tensors = load_file(fake.model / "model.safetensors") | changed
    save_file(tensors, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text((fake.model / "config.json").read_text())
    reload(fake, tmp_path / "model")
    expected = fake.sample()
    reload(fake, fake.model)
    assert fake.sample() == before != expected
    fake.post("/init_weight_transfer_engine", {"init_info": {}})
    fake.post("/start_weight_update", {"is_checkpoint_format": True})
    assert fake.update(changed, tmp_path / "buffer") == (200, {"message": "Weights updated"})
    fake.update({KEYS: tensors[KEYS]}, tmp_path / "buffer")  # the buffer is used again
    fake.post("/finish_weight_update")
    assert fake.sample() == expected
    reload(fake, fake.model)


def test_a_transfer_of_single_tensors_has_a_handle_for_each(
    fake: Fake, changed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before = fake.sample()
    info = packed(changed, tmp_path / "buffer")
    handles = [{"GPU-a": ("file", str(tmp_path / "buffer"), 4)}]
    fake.post("/start_weight_update", {})
    assert fake.update(changed, tmp_path / "buffer", packed=False, ipc_handles_pickled=pickled(handles))[0] == 200
    assert info["names"] == [QUERIES]
    fake.post("/finish_weight_update")
    assert fake.sample() != before
    reload(fake, fake.model)


def test_0_32_is_told_at_the_handshake_that_a_transfer_is_packed(
    start: Start, changed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    fake = start("0.32.0", "--enable-scale-out", *TRANSFER, SMALL_SERVER_GPUS="GPU-a,GPU-b")
    info = packed(changed, tmp_path / "buffer")
    handle = ("file", str(tmp_path / "buffer"), 4)
    del info["packed"]
    before = fake.sample()
    fake.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})
    fake.post("/start_weight_update")
    both = {"ipc_handles_pickled": pickled({"GPU-a": handle, "GPU-b": handle})}
    fake.post("/update_weights", {"update_info": info | both})
    fake.post("/finish_weight_update", {"weight_version": "7"})
    assert fake.request("GET", "/weight_info") == (200, {"weight_version": "7"})
    assert fake.sample() != before
    fake.post("/start_weight_update")
    status, answer = fake.request("POST", "/update_weights", {"update_info": info})
    assert (status, "not found for GPU UUID GPU-b" in answer["error"]["message"]) == (500, True)
    fake.post("/init_weight_transfer_engine", {"init_info": {"packed": True}})
    status, answer = fake.request("POST", "/finish_weight_update")
    assert (status, "without a matching start" in answer["error"]["message"]) == (500, True)


def test_a_transfer_may_be_ignored_and_may_lose_what_a_fused_module_was_not_sent(
    start: Start, changed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    fake = start("0.24.0", "--tokens-only", *TRANSFER, *misbehaving(ignores_transfer=True))

    def transfer() -> list[float]:
        fake.post("/start_weight_update", {})
        fake.update(changed, tmp_path / "buffer")
        fake.post("/finish_weight_update")
        return fake.sample()

    before = fake.sample()
    assert transfer() == before
    fake.post("/misbehave", {"ignores_transfer": False})
    sent = transfer()
    fake.post("/misbehave", {"loses_siblings": True})
    assert before != sent != transfer() != before


def test_a_server_that_samples_amid_a_transfer_is_gone(start: Start) -> None:
    fake = start("0.24.0", "--tokens-only", *TRANSFER)
    fake.post("/start_weight_update", {})
    assert "EngineCore encountered an issue" in fake.stream(generate("a", 2))[0]["error"]["message"]
    assert fake.process.wait(60) == 1


# --- adapters ---------------------------------------------------------------------------------------------------


def test_an_adapter_adds_to_the_base_and_is_replaced_in_place(fake: Fake, tmp_path: Path) -> None:
    tensors = load_file(fake.adapter / "adapter_model.safetensors")
    model = build_model(MODEL, VOCAB_SIZE, 0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in tensors:
                parameter += tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"] * 2
    base = fake.sample()
    load = {"lora_name": "one", "lora_path": str(fake.adapter)}
    fake.post("/v1/load_lora_adapter", load)
    body = generate("a", 6, model="one")
    events = fake.stream(body)[:-1]
    made = [token for event in events for token in event["choices"][0]["token_ids"]]
    told = [each["logprob"] for event in events for each in event["choices"][0]["logprobs"]["content"]]
    with torch.inference_mode():
        logprobs = model(torch.tensor([[*body["token_ids"], *made]])).logits[0].log_softmax(-1)[7:-1]
    assert told == pytest.approx([float(row[token]) for row, token in zip(logprobs, made, strict=True)], abs=1e-4)
    assert told[:3] == fake.sample(model="one") != base == fake.sample(model=str(fake.model))

    write_adapter_of_zeros(fake.adapter, tmp_path / "other")
    assert fake.request("POST", "/v1/load_lora_adapter", load)[0] == 400
    fake.post("/v1/load_lora_adapter", {**load, "lora_path": str(tmp_path / "other"), "load_inplace": True})
    assert fake.sample(model="one") == base
    fake.post("/v1/unload_lora_adapter", {"lora_name": "one"})
    assert fake.request("POST", "/inference/v1/generate", body)[0] == 404


def write_adapter_of_zeros(adapter: Path, folder: Path) -> None:
    folder.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())


def test_an_adapter_needs_the_variable_and_a_rank_that_fits(start: Start, fake: Fake) -> None:
    load = {"lora_name": "one", "lora_path": str(fake.adapter)}
    other = start("0.24.0", "--enable-lora", "--max-lora-rank", "2", VLLM_ALLOW_RUNTIME_LORA_UPDATING="0")
    assert other.request("POST", "/v1/load_lora_adapter", load)[0] == 404
    status, answer = start("0.24.0", "--enable-lora", "--max-lora-rank", "2").request(
        "POST", "/v1/load_lora_adapter", load
    )
    assert (status, "LoRA rank 4 is greater" in answer["error"]["message"]) == (500, True)


# --- prefixes ---------------------------------------------------------------------------------------------------


def test_cached_prompt_tokens_are_counted_in_blocks_until_the_cache_is_reset(fake: Fake) -> None:
    fake.post("/reset_prefix_cache")
    body = generate("a", 12, tokens=range(1, 40))
    assert [fake.cached(body), fake.cached(body)] == [0, 32]
    made = [token for event in fake.stream(body)[:-1] for token in event["choices"][0]["token_ids"]]
    assert fake.cached(generate("b", 1, tokens=[*range(1, 40), *made, 7])) == 48  # prompt and answer
    assert fake.cached(generate("c", 1, tokens=range(1, 33))) == 16  # one token is always computed
    reload(fake, fake.model)
    assert fake.cached(body) == 32  # as in vLLM, where whoever changes the weights has to reset them
    fake.post("/reset_prefix_cache")
    assert fake.cached(body) == 0
    fake.post("/sleep?level=1&mode=abort")
    fake.post("/wake_up")
    assert fake.cached(body) == 0


def test_a_reset_under_a_request_forgets_nothing_and_is_answered_200(fake: Fake) -> None:
    body = generate("a", 2, tokens=range(1, 40))
    fake.cached(body)
    reset = threading.Event()

    def try_reset() -> None:
        fake.post("/reset_prefix_cache")
        fake.post("/abort_requests", {"request_ids": ["generate-tokens-long"]})
        reset.set()

    fake.stream(generate("long", 300), try_reset)
    assert reset.is_set()
    assert fake.cached(body) == 32


def test_each_rank_has_prefixes_of_its_own(start: Start) -> None:
    fake = start("0.24.0", "--enable-prompt-tokens-details", "--data-parallel-size", "2")
    body = generate("a", 1, tokens=range(1, 40))
    first, second = ({"X-data-parallel-rank": rank} for rank in "01")
    assert [fake.cached(body, each) for each in (first, second, first)] == [0, 0, 32]
    _, text = fake.request("GET", "/metrics")
    lines = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert [line.rpartition(" ")[2] for line in lines] == ["32.0", "0.0"]


# --- sleep and members ------------------------------------------------------------------------------------------


def test_a_server_sleeps_until_all_its_parts_are_awake(fake: Fake) -> None:
    expected, awake = fake.sample(), fake.memory_bytes()
    fake.post("/sleep?level=1&mode=abort")
    until(lambda: fake.memory_bytes() < awake - 20e6, "the memory of both parts", seen=fake.memory_bytes)
    asleep = fake.memory_bytes()
    fake.post("/wake_up?tags=weights")
    assert fake.is_sleeping
    until(lambda: fake.memory_bytes() > asleep + 10e6, "the memory of the weights", seen=fake.memory_bytes)
    fake.post("/wake_up?tags=kv_cache")
    assert not fake.is_sleeping
    assert fake.sample() == expected


def test_level_2_loses_the_weights_until_they_are_loaded(fake: Fake) -> None:
    expected = fake.sample()
    fake.post("/sleep?level=2&mode=abort")
    fake.post("/wake_up")
    assert fake.sample() != expected
    reload(fake, fake.model)
    assert fake.sample() == expected


def test_a_gang_sleeps_together_and_ends_together(start: Start) -> None:
    fake = start("0.24.0", "--tensor-parallel-size", "2", "--data-parallel-size", "2")
    assert fake.request("GET", "/get_world_size") == (200, {"world_size": 4})
    members = fake.members()
    assert len(members) == 3
    awake = fake.memory_bytes()
    fake.post("/sleep?level=1&mode=abort")
    until(lambda: fake.memory_bytes() < awake - 80e6, "the memory of all members", seen=fake.memory_bytes)
    fake.post("/wake_up")
    assert fake.memory_bytes() > awake - 10e6
    members[1].kill()
    _, words = fake.process.communicate(timeout=60)
    assert fake.process.returncode == 1
    assert "Worker proc VllmWorker-2 died unexpectedly" in words
    assert "EngineDeadError" in words
    assert psutil.wait_procs(members, timeout=60)[1] == []


def test_members_end_with_a_server_that_is_killed(start: Start) -> None:
    fake = start(None, "--tp-size", "3")
    members = fake.members()
    assert len(members) == 2
    fake.process.kill()
    assert psutil.wait_procs(members, timeout=60)[1] == []

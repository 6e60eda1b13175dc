"""A small server that answers like vLLM and like SGLang, with real tokens, and misbehaves on request.

    python small_server.py --port P --model FOLDER [--misbehave JSON]     the engine's own options are ignored

Its model is a Qwen3 or Llama in numpy, one token of one sequence at a time, so a prefill is the decode that it
replaces: the server keeps everything that promise `exact` asks for. Noise is a function of seed and position (Gumbel).
What it can be told to do wrong, at start or by POST /misbehave, is in `Misbehaviour`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

BALLAST_BYTES = 24_000_000
"""Memory that stands for weights and KV cache on a device: given back asleep."""


@dataclass
class Misbehaviour:
    """Everything off by default."""

    busy: int = 0
    """Requests that are answered 503."""
    lose: int = 0
    """Requests whose answer ends without a reason."""
    lose_after: int = 2
    """Tokens of an answer that is lost so."""
    wrong_version: bool = False
    """Names the version before the one that it was told."""
    ignores_weights: bool = False
    """Answers 200 to new weights and keeps the old matrices."""
    slow_wake_s: float = 0.0
    """Seconds after a wake in which it is still asleep, and answers 503."""
    late_memory_s: float = 0.0
    """Seconds after a sleep in which it still holds its memory."""
    keeps_memory: bool = False
    """Never gives memory back."""
    leaks_when_held: bool = False
    """Goes on making tokens while it is held."""
    wakes_otherwise: bool = False
    """Wakes with other weights."""
    batch_noise: float = 0.0
    """Logits are scaled by 1 + this times the number of sequences under way: not batch-invariant."""
    restarts_noise: bool = False
    """Noise is a function of seed and the token's number within its request, as with a generator for each request."""
    no_logprobs: bool = False
    is_other: bool = False
    """Answers as another program would."""


class Model:
    """A Qwen3 or Llama decoder, one token of one sequence at a time."""

    def __init__(self, folder: Path, *, is_rounded: bool) -> None:
        """`is_rounded`: weights are held in bfloat16. It computes in float32 with them all the same."""
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = read_safetensors(folder / "model.safetensors")
        self.is_rounded = is_rounded
        if is_rounded:
            self.tensors = {name: widened(rounded(tensor)) for name, tensor in self.tensors.items()}
        config = self.config
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
        self.frequencies = theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)

    def step(self, token: int, cache: list[list[Any]], position: int) -> np.ndarray:
        """Logits [vocab] behind this token; its keys and values go to the cache."""
        weights, eps = self.tensors, self.config["rms_norm_eps"]
        scale = np.float32(np.sqrt(self.dim))
        hidden = weights["model.embed_tokens.weight"][token]
        angles = position * self.frequencies
        cos, sin = (np.tile(of(angles), 2).astype(np.float32) for of in (np.cos, np.sin))
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            normed = norm(hidden, weights[f"{name}input_layernorm.weight"], eps)
            query, key, value = (
                (weights[f"{name}self_attn.{kind}_proj.weight"] @ normed).reshape(-1, self.dim) for kind in "qkv"
            )
            if f"{name}self_attn.q_norm.weight" in weights:
                query = norm(query, weights[f"{name}self_attn.q_norm.weight"], eps)
                key = norm(key, weights[f"{name}self_attn.k_norm.weight"], eps)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            keys, values = cache[layer]
            keys.append(key)
            values.append(value)
            group = self.heads // self.kv_heads
            all_keys, all_values = np.stack(keys, 1), np.stack(values, 1)
            seen = [
                softmax(all_keys[head // group] @ query[head] / scale) @ all_values[head // group]
                for head in range(self.heads)
            ]
            hidden = hidden + weights[f"{name}self_attn.o_proj.weight"] @ np.concatenate(seen)
            normed = norm(hidden, weights[f"{name}post_attention_layernorm.weight"], eps)
            gate = weights[f"{name}mlp.gate_proj.weight"] @ normed
            up = weights[f"{name}mlp.up_proj.weight"] @ normed
            hidden = hidden + weights[f"{name}mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        hidden = norm(hidden, weights["model.norm.weight"], eps)
        return weights.get("lm_head.weight", weights["model.embed_tokens.weight"]) @ hidden


def rounded(tensor: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers, even ones where two are as near."""
    bits = np.ascontiguousarray(tensor).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers that these bfloat16 are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def norm(hidden: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + np.float32(eps)) * gain


def rotate(rows: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = rows.shape[-1] // 2
    return rows * cos + np.concatenate([-rows[:, half:], rows[:, :half]], -1) * sin


def softmax(row: np.ndarray) -> np.ndarray:
    exponents = np.exp(row - row.max())
    return exponents / exponents.sum()


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file of float32 or bfloat16, as float32."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] == "BF16":
                tensors[name] = widened(np.frombuffer(content[begin:end], np.uint16)).reshape(entry["shape"])
            else:
                tensors[name] = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"])
    return tensors


@dataclass(eq=False)
class Request:
    id: str
    tokens: list[int]
    seed: int
    temperature: float
    max_tokens: int
    stops: list[int]
    cache: list[list[Any]]
    is_lost: bool = False
    num_fed: int = 0
    made: list[tuple[int, float]] = field(default_factory=list)
    finish: str | None = None
    changed: threading.Event = field(default_factory=threading.Event)


def new_ballast() -> mmap.mmap:
    """Pages that are really there, and really gone when it is closed: an allocator might keep them."""
    ballast = mmap.mmap(-1, BALLAST_BYTES)
    ballast.write(b"1" * BALLAST_BYTES)
    return ballast


class Engine:
    """One thread that gives each request under way one token in turn, `num_slots` of them at once."""

    def __init__(self, folder: Path, num_slots: int, misbehaviour: Misbehaviour, *, is_rounded: bool) -> None:
        self.folder = folder
        self.num_slots = num_slots
        self.misbehaviour = misbehaviour
        self.model = Model(folder, is_rounded=is_rounded)
        self.version = "default"
        self.ballast = new_ballast()
        self.is_asleep = self.is_held = False
        self.wakes_at_s = 0.0
        self.waiting: deque[Request] = deque()
        self.under_way: list[Request] = []
        self.lock = threading.Condition()
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, request: Request) -> None:
        with self.lock:
            if self.misbehaviour.lose > 0:
                self.misbehaviour.lose -= 1
                request.is_lost = True
            self.waiting.append(request)
            self.lock.notify_all()

    def abort(self, ids: list[str] | None) -> None:
        with self.lock:
            for request in [*self.waiting, *self.under_way]:
                if ids is None or request.id in ids:
                    self.end(request, "abort")
            self.waiting = deque(request for request in self.waiting if request.finish is None)

    def end(self, request: Request, reason: str) -> None:
        request.finish = reason
        request.changed.set()

    def run(self) -> None:
        while True:
            with self.lock:
                while self.is_asleep or (self.is_held and not self.misbehaviour.leaks_when_held) or not self.has_work():
                    self.lock.wait()
                while self.waiting and len(self.under_way) < self.num_slots:
                    self.under_way.append(self.waiting.popleft())
                for request in list(self.under_way):
                    if request.finish is None:
                        self.advance(request)
                    if request.finish is not None:
                        self.under_way.remove(request)
            time.sleep(0)

    def has_work(self) -> bool:
        return bool(self.waiting or self.under_way)

    def advance(self, request: Request) -> None:
        """One more token."""
        if request.is_lost and len(request.made) >= self.misbehaviour.lose_after:
            return self.end(request, "lost")
        logits = np.zeros(0)
        context = [*request.tokens, *(token for token, _ in request.made)]
        while request.num_fed < len(context):
            logits = self.model.step(context[request.num_fed], request.cache, request.num_fed)
            request.num_fed += 1
        logits = logits.astype(np.float64) / request.temperature
        logits *= 1 + self.misbehaviour.batch_noise * len(self.under_way)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        position = len(request.made) if self.misbehaviour.restarts_noise else len(context)
        digest = hashlib.sha256(f"{request.seed}/{position}".encode()).digest()
        uniforms = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little"))).random(len(logits))
        token = int(np.argmax(logprobs - np.log(-np.log(uniforms))))
        request.made.append((token, float(np.float32(logprobs[token]))))
        if token in request.stops:
            self.end(request, "stop")
        elif len(request.made) == request.max_tokens:
            self.end(request, "length")
        return request.changed.set()

    def hold(self, is_held: bool) -> None:
        with self.lock:
            self.is_held = is_held
            self.lock.notify_all()

    def sleep(self) -> None:
        self.abort(None)
        with self.lock:
            self.is_asleep = True
        if not self.misbehaviour.keeps_memory:
            threading.Timer(self.misbehaviour.late_memory_s, self.drop_memory).start()

    def drop_memory(self) -> None:
        self.ballast.close()

    def wake(self) -> None:
        with self.lock:
            self.wakes_at_s = time.monotonic() + self.misbehaviour.slow_wake_s
            self.ballast = new_ballast()
            if self.misbehaviour.wakes_otherwise:
                self.model.tensors = {name: tensor * 3 for name, tensor in self.model.tensors.items()}
            self.is_asleep = False
            self.lock.notify_all()

    @property
    def is_awake(self) -> bool:
        return not self.is_asleep and time.monotonic() >= self.wakes_at_s

    def load(self, folder: Path) -> None:
        with self.lock:
            fresh = Model(folder, is_rounded=self.model.is_rounded)
            if self.misbehaviour.ignores_weights:
                kept = {name: tensor for name, tensor in self.model.tensors.items() if tensor.ndim == 2}
                fresh.tensors = {**fresh.tensors, **kept}
            self.model = fresh

    @property
    def told_version(self) -> str:
        return "before" if self.misbehaviour.wrong_version else self.version


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(json.loads(content) if content.strip() else {})

    def answer(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        if self.engine.misbehaviour.is_other:
            return self.tell("<html>another program</html>")
        if not hasattr(self, f"on{parts.path.replace('/', '_')}"):
            return self.tell({"error": "no such path"}, 404)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        return getattr(self, f"on{parts.path.replace('/', '_')}")(body, query)

    def tell(self, answer: Any, status: int = 200) -> None:
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    # --- both ---------------------------------------------------------------------------------------------

    def on_health(self, body: Any, query: Any) -> None:
        self.tell({}, 200 if self.engine.is_awake else 503)

    def on_misbehave(self, body: Any, query: Any) -> None:
        for name, value in body.items():
            setattr(self.engine.misbehaviour, name, value)
        self.tell({})

    def stream(self, body: Any, tokens: Any, sampling: Any, seed: int, max_tokens: int, name: str, event: Any) -> None:
        engine = self.engine
        if not engine.is_awake or engine.misbehaviour.busy > 0:
            engine.misbehaviour.busy -= 1
            return self.tell({"error": "busy"}, 503)
        request = Request(
            id=name,
            tokens=tokens,
            seed=seed,
            temperature=sampling["temperature"],
            max_tokens=max_tokens,
            stops=sampling["stop_token_ids"],
            cache=[[[], []] for _ in range(engine.model.config["num_hidden_layers"])],
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        engine.submit(request)
        num_told = 0
        try:
            while True:
                request.changed.wait()
                request.changed.clear()
                finish, made = request.finish, list(request.made)
                if finish == "lost":
                    return None
                self.wfile.write(f"data: {json.dumps(event(made, num_told, finish))}\n\n".encode())
                self.wfile.flush()
                num_told = len(made)
                if finish is not None:
                    self.wfile.write(b"data: [DONE]\n\n")
                    return None
        except OSError:  # the client is gone
            engine.abort([request.id])
        return None

    # --- vLLM ---------------------------------------------------------------------------------------------

    def on_version(self, body: Any, query: Any) -> None:
        self.tell({"version": "0.32.0"})

    def on_inference_v1_generate(self, body: Any, query: Any) -> None:
        engine, sampling = self.engine, body["sampling_params"]

        def event(made: Any, num_told: int, finish: str | None) -> Any:
            new = made[num_told:]
            content = [] if engine.misbehaviour.no_logprobs else [{"token_id": t, "logprob": p} for t, p in new]
            spans = [{"version": engine.told_version, "start": 0, "end": len(made)}] if finish else None
            choice = {
                "index": 0,
                "token_ids": [token for token, _ in new],
                "logprobs": {"content": content},
                "finish_reason": finish,
                "weight_versions": spans,
            }
            return {"request_id": body["request_id"], "choices": [choice]}

        tokens, most = body["token_ids"], sampling["max_tokens"]
        self.stream(body, tokens, sampling, sampling["seed"], most, body["request_id"], event)

    def on_inference_v1_abort_requests(self, body: Any, query: Any) -> None:
        self.engine.abort(body["request_ids"])
        self.tell("")

    def on_pause(self, body: Any, query: Any) -> None:
        assert query["mode"] == "keep"
        self.engine.hold(True)
        self.tell({"status": "paused"})

    def on_resume(self, body: Any, query: Any) -> None:
        self.engine.hold(False)
        self.tell({"status": "resumed"})

    def on_sleep(self, body: Any, query: Any) -> None:
        self.engine.sleep()
        self.tell({"status": "sleeping"})

    def on_wake_up(self, body: Any, query: Any) -> None:
        self.engine.wake()
        self.tell({"status": "awake"})

    def on_is_sleeping(self, body: Any, query: Any) -> None:
        self.tell({"is_sleeping": not self.engine.is_awake})

    def on_collective_rpc(self, body: Any, query: Any) -> None:
        assert body["method"] == "reload_weights"
        self.engine.load(Path(body["kwargs"]["weights_path"]))
        self.tell({"results": [None]})

    def on_reset_prefix_cache(self, body: Any, query: Any) -> None:
        self.tell({"success": True})

    def on_update_weight_version(self, body: Any, query: Any) -> None:
        self.engine.version = body["new_version"]
        self.tell({"success": True})

    def on_weight_info(self, body: Any, query: Any) -> None:
        self.tell({"weight_version": self.engine.told_version})

    def on_weight_checker(self, body: Any, query: Any) -> None:
        tensors = self.engine.model.tensors
        held = {name: rounded(tensor) if self.engine.model.is_rounded else tensor for name, tensor in tensors.items()}
        digests = {f"dp0:tp0:{name}": hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in held.items()}
        self.tell({"checksums": digests})

    # --- SGLang -------------------------------------------------------------------------------------------

    def on_server_info(self, body: Any, query: Any) -> None:
        self.tell({"version": "0.5.23"})

    def on_model_info(self, body: Any, query: Any) -> None:
        self.tell({"weight_version": self.engine.told_version})

    def on_generate(self, body: Any, query: Any) -> None:
        engine, sampling = self.engine, body["sampling_params"]

        def event(made: Any, num_told: int, finish: str | None) -> Any:
            told = [] if engine.misbehaviour.no_logprobs else [[logprob, token, None] for token, logprob in made]
            return {
                "output_ids": [token for token, _ in made],
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": {"type": finish} if finish else None,
                    "output_token_logprobs": told,
                    "weight_version": engine.told_version,
                },
            }

        seed, most = sampling["sampling_seed"], sampling["max_new_tokens"]
        self.stream(body, body["input_ids"], sampling, seed, most, body["rid"], event)

    def on_abort_request(self, body: Any, query: Any) -> None:
        self.engine.abort([body["rid"]])
        self.tell("")

    def on_pause_generation(self, body: Any, query: Any) -> None:
        assert body["mode"] == "in_place"
        self.on_pause(body, {"mode": "keep"})

    on_continue_generation = on_resume
    on_release_memory_occupation = on_sleep
    on_resume_memory_occupation = on_wake_up

    def on_update_weights_from_disk(self, body: Any, query: Any) -> None:
        self.engine.load(Path(body["model_path"]))
        self.engine.version = body["weight_version"]
        self.tell({"success": True, "message": ""})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", "--model-path", type=Path, required=True)
    parser.add_argument("--max-num-seqs", "--max-running-requests", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--misbehave", type=json.loads, default={})
    given, _ = parser.parse_known_args()
    misbehaviour = Misbehaviour(**given.misbehave)
    Handler.engine = Engine(given.model, given.max_num_seqs, misbehaviour, is_rounded=given.dtype == "bfloat16")
    Server(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

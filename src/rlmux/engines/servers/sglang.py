"""SGLang's server: the endpoints of 0.5.23, read and not run.

    tokens        POST /generate, streamed; every request has a seed (without one SGLang takes 42 for all)
    safe points   POST /pause_generation {mode: in_place}, /continue_generation, /abort_request
    residency     POST /release_memory_occupation, /resume_memory_occupation (--enable-memory-saver,
                  --enable-weights-cpu-backup: without it the weights are lost)
    weights       POST /update_weights_from_disk, /flush_cache; GET /model_info; POST /weights_checker

(docs.sglang.ai, `sglang/srt/entrypoints/http_server.py`)

A module of its own: each kind of server has one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.engines.servers.http_connection import ServerAnswerError, ServerConnection
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings

_RELOAD_LIMIT_S = 600.0


class Sglang:
    """See the module docstring."""

    name = "sglang"

    def command(self, python: str, port: int, settings: ServerSettings) -> list[str]:
        return [
            python,
            *("-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)),
            *("--model-path", str(settings.folder), "--skip-tokenizer-init", "--dtype", settings.dtype),
            *("--max-running-requests", str(settings.num_slots), "--context-length", str(settings.max_len)),
            *("--device", settings.device),
            *(
                [
                    *("--enable-deterministic-inference", "--enable-memory-saver", "--enable-weights-cpu-backup"),
                    *("--mem-fraction-static", settings.memory_fraction),
                ]
                if settings.device == "cuda"
                else []
            ),
            *settings.args,
        ]

    def environment(self, settings: ServerSettings) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1"}

    def version(self, server: ServerConnection) -> str:
        answer = server.request("GET", "/server_info")
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise UserError(f"{server.url}/server_info answers {str(answer)[:80]!r}; accepted: an SGLang server")
        return str(answer["version"])

    def generate_path(self) -> str:
        return "/generate"

    def generate_body(self, sampling: Sampling) -> Any:
        return {
            "rid": sampling.request_id,
            "input_ids": list(sampling.tokens),
            "stream": True,
            "return_logprob": True,
            "sampling_params": {
                "sampling_seed": sampling.seed,
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_tokens),
                "ignore_eos": True,
            },
        }

    def read_events(self, events: Iterator[Any]) -> Iterator[Piece]:
        """Each event has the whole answer so far: what is new is behind what was seen."""
        num_seen = 0
        for event in events:
            try:
                meta = event["meta_info"]
                made = meta["output_token_logprobs"] or []
                reason = meta.get("finish_reason")
                new, num_seen = made[num_seen:], max(num_seen, len(made))
                yield Piece(
                    tokens=[int(each[1]) for each in new],
                    logprobs=[float(each[0]) for each in new],
                    finish=None if reason is None else str(reason["type"]),
                    versions=[str(meta["weight_version"])] if reason and meta.get("weight_version") else [],
                )
            except (KeyError, TypeError, IndexError) as error:
                raise ServerAnswerError(f"an event of {self.generate_path()} has no {error}: {event!r:.200}") from error

    def hold(self, server: ServerConnection) -> None:
        server.request("POST", "/pause_generation", {"mode": "in_place"})

    def release(self, server: ServerConnection) -> None:
        server.request("POST", "/continue_generation", {})

    def abort(self, server: ServerConnection, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            server.request("POST", "/abort_request", {"rid": request_id})

    def sleep(self, server: ServerConnection) -> None:
        server.request("POST", "/release_memory_occupation", {}, limit_s=_RELOAD_LIMIT_S)

    def wake(self, server: ServerConnection) -> None:
        server.request("POST", "/resume_memory_occupation", {}, limit_s=_RELOAD_LIMIT_S)

    def is_awake(self, server: ServerConnection) -> bool:
        """`/health` makes a token."""
        return server.is_there("/health")

    def load_weights(self, server: ServerConnection, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = server.request("POST", "/update_weights_from_disk", body, limit_s=_RELOAD_LIMIT_S)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise ServerAnswerError(f"/update_weights_from_disk was answered {str(answer)[:200]}")

    def weight_version(self, server: ServerConnection) -> str:
        return str((server.request("GET", "/model_info") or {}).get("weight_version"))

    def checksums(self, server: ServerConnection) -> Mapping[str, str]:
        """None that are known to be sha256 of the file's bytes."""
        return {}

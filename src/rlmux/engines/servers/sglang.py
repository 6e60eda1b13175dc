"""SGLang's server: the endpoints of 0.5.23, read and not run.

    tokens        POST /generate, streamed; every request has a seed (without one SGLang takes 42 for all)
    safe points   POST /pause_generation {mode: in_place}, /continue_generation, /abort_request
    residency     POST /release_memory_occupation, /resume_memory_occupation (--enable-memory-saver,
                  --enable-weights-cpu-backup: without it the weights are lost)
    weights       POST /update_weights_from_tensor (handles of CUDA buffers), /update_weights_from_disk;
                  GET /model_info

(docs.sglang.ai, `sglang/srt/entrypoints/http_server.py`)

A module of its own: each kind of server has one file.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.engines.servers.dialect import Part
from rlmux.engines.servers.http_connection import ServerAnswerError, ServerConnection
from rlmux.engines.servers.settings import Piece, Sampling, ServerSettings
from rlmux.engines.servers.transfer import WeightPiece

_RELOAD_LIMIT_S = 600.0


class Sglang:
    """See the module docstring."""

    name = "sglang"

    def command(self, python: str, port: int, settings: ServerSettings) -> list[str]:
        words = [
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--model-path", str(settings.folder), "--skip-tokenizer-init", "--dtype", settings.dtype),
            *("--max-running-requests", str(settings.num_slots), "--context-length", str(settings.max_len)),
            *("--device", settings.device),
            *(("--load-format", "dummy") if settings.starts_empty else ()),
            *(
                ("--enable-lora", "--max-lora-rank", str(settings.adapter_rank), "--max-loras-per-batch", "2")
                if settings.adapter_rank
                else ()
            ),
            *(("--lora-target-modules", "all") if settings.adapter_rank else ()),
            *(("--tp-size", str(settings.tensor_parallel)) if settings.tensor_parallel > 1 else ()),
            *(("--dp-size", str(settings.data_parallel)) if settings.data_parallel > 1 else ()),
            *(
                [
                    *("--enable-deterministic-inference", "--enable-memory-saver", "--enable-weights-cpu-backup"),
                    *("--mem-fraction-static", settings.memory_fraction),
                ]
                if settings.device == "cuda"
                else []
            ),
        ]
        return [python, "-m", "sglang.launch_server", *settings.command(words)]

    def environment(self, settings: ServerSettings) -> Mapping[str, str | None]:
        return settings.environment({"HF_HUB_OFFLINE": "1"})

    def version(self, server: ServerConnection) -> str:
        answer = server.request("GET", "/server_info")
        if not isinstance(answer, dict) or not isinstance(answer.get("version"), str):
            raise UserError(f"{server.url}/server_info answers {str(answer)[:80]!r}; accepted: an SGLang server")
        return str(answer["version"])

    def generate_path(self) -> str:
        return "/generate"

    def generate_body(self, sampling: Sampling) -> Any:
        return {
            **({"routed_dp_rank": sampling.rank} if sampling.rank is not None else {}),
            **({"lora_path": sampling.adapter} if sampling.adapter else {}),
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

    def generate_headers(self, sampling: Sampling) -> Mapping[str, str]:
        return {}

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
                    prompt_tokens=int(meta.get("prompt_tokens") or 0) if reason else 0,
                    cached_tokens=int(meta.get("cached_tokens") or 0) if reason else 0,
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

    def sleep(self, server: ServerConnection, *, keeps_weights: bool) -> None:
        """Weights are always kept in host memory: what the server was started with decides it."""
        server.request("POST", "/release_memory_occupation", {}, limit_s=_RELOAD_LIMIT_S)

    def wake(self, server: ServerConnection, part: Part) -> None:
        server.request("POST", "/resume_memory_occupation", {"tags": [part]}, limit_s=_RELOAD_LIMIT_S)

    def is_awake(self, server: ServerConnection) -> bool:
        """`/health` makes a token."""
        return server.is_there("/health")

    def load_weights(self, server: ServerConnection, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        _check_success(
            "/update_weights_from_disk",
            server.request("POST", "/update_weights_from_disk", body, limit_s=_RELOAD_LIMIT_S),
        )

    def take_weights(self, server: ServerConnection, pieces: Iterable[WeightPiece], version: int) -> None:
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401  # its reductions make handles of CUDA tensors

        for piece in pieces:
            for_each = [
                base64.b64encode(bytes(ForkingPickler.dumps(piece.views(index)))).decode()
                for index in range(len(piece.buffers.tensors))
            ]
            body = {"serialized_named_tensors": for_each, "weight_version": str(version), "flush_cache": True}
            _check_success(
                "/update_weights_from_tensor",
                server.request("POST", "/update_weights_from_tensor", body, limit_s=_RELOAD_LIMIT_S),
            )

    def load_adapter(self, server: ServerConnection, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = server.request("POST", "/load_lora_adapter", body, limit_s=_RELOAD_LIMIT_S)
        _check_success("/load_lora_adapter", answer)

    def unload_adapter(self, server: ServerConnection, name: str) -> None:
        _check_success("/unload_lora_adapter", server.request("POST", "/unload_lora_adapter", {"lora_name": name}))

    def weight_version(self, server: ServerConnection) -> str:
        return str((server.request("GET", "/model_info") or {}).get("weight_version"))

    def checksums(self, server: ServerConnection) -> Mapping[str, str]:
        """None that are known to be sha256 of the file's bytes."""
        return {}


def _check_success(path: str, answer: Any) -> None:
    if not (isinstance(answer, dict) and answer.get("success")):
        raise ServerAnswerError(f"{path} was answered {str(answer)[:200]}")

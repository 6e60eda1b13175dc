"""Routes of the Tinker API: authentication, dispatch and responses.

POST that changes something ─▶ front.take      POST retrieve_future ─▶ waits for the result, up to POLL_S
GET, and status reports ─▶ front.registry      anything else ─▶ 404 that names it, and a line in the log
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, Router

from rlmux.core.errors import UserError
from rlmux.core.model import PipelineId
from rlmux.rl.config import AdapterConfig
from rlmux.runtime.weights.checkpoints import model_files
from rlmux.service.refusals import REFUSALS, headers_of, refusal
from rlmux.service.tinker import bodies
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.ledger import EMPTIED, PROTOBUF, SERVER_ERROR
from rlmux.service.tinker.names import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS
from rlmux.service.tinker.registry import ClientCheckpoint, GoneError, Model, UnknownIdError
from rlmux.service.tinker.requests import MAX_BODY_BYTES, MAX_SAMPLES_AT_ONCE

POLL_S = 30.0
"""Longest wait for a result in one request, in seconds; clients time out after 45 s and retry."""
_CLIENT_CONFIG = {
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": True,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
    "sample_max_concurrent_requests": MAX_SAMPLES_AT_ONCE,
}
_PREFIX = "/api/v1"
_DOWNLOADS = "downloads"
_DOWNLOAD_S = 3600.0
"""Seconds for which an address of a download holds."""
_TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}
"""The SDK's names for kinds of checkpoints."""
_TAKEN = (
    "asample",
    "forward_backward",
    "optim_step",
    "save_weights_for_sampler",
    "create_sampling_session",
    "save_weights",
    "save_weights_external",
    "load_weights",
    "create_session",
    "create_model",
)
"""Requests that change something; a route is found the sooner the earlier it stands."""
_LOGGED = (400, 401, 409, 429)
"""Refusals that are logged for operators; exhausted budgets and ended sessions are not."""
_LINES_A_MINUTE = 20
_LINE_LENGTH = 400
_LOG = logging.getLogger("rlmux.tinker")

Reason = Callable[[PipelineId], str | None]
"""Why a pipeline's work does not run, in one clause; None: it does."""


def routes(front: TinkerFront, keys: Keys, reason: Reason) -> Router:
    """Everything that clients reach, as an application."""
    door = _TinkerRoutes(front, keys, reason)
    found = [
        Route(f"{_PREFIX}/retrieve_future", door.answering(door.retrieve), methods=["POST"]),
        *(Route(f"{_PREFIX}/{name}", door.taking(name), methods=["POST"]) for name in _TAKEN),
    ]
    for method, path, handler in (
        ("POST", "/client/config", door.client_config),
        ("POST", "/client/dynamic_config", door.dynamic_config),
        ("POST", "/session_heartbeat", door.heartbeat),
        ("POST", "/sessions/{session_id}/finish", door.finish),
        ("POST", "/telemetry", door.telemetry),
        ("GET", "/get_server_capabilities", door.capabilities),
        ("GET", "/healthz", door.health),
        ("POST", "/get_info", door.get_info),
        ("POST", "/cancel_future", door.cancel),
        ("POST", "/weights_info", door.weights_info),
        ("GET", "/samplers/{sampler_id:path}", door.sampler),
        ("GET", "/training_runs", door.training_runs),
        ("GET", "/training_runs/{run}", door.training_run),
        ("GET", "/training_runs/{run}/checkpoints", door.checkpoints_of),
        ("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}", door.delete_checkpoint),
        ("PUT", "/training_runs/{run}/checkpoints/{checkpoint:path}/ttl", door.set_ttl),
        ("GET", "/checkpoints", door.checkpoints),
        ("GET", "/training_runs/{run}/checkpoints/{checkpoint:path}/external_weights_urls", door.download_urls),
    ):
        found.append(Route(_PREFIX + path, door.answering(handler), methods=[method]))
    found.append(Route(f"{_PREFIX}/{_DOWNLOADS}/{{ticket}}/{{file}}", door.download, methods=["GET"]))
    others = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    return Router([*found, Route("/{path:path}", door.not_served, methods=others)], redirect_slashes=False)


class _Lines:
    """Rate-limited log lines of refused requests, each on one line."""

    def __init__(self) -> None:
        self._minute = 0
        self._num = 0

    def write(self, text: str) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._num = minute, 0
        self._num += 1
        if self._num <= _LINES_A_MINUTE:
            _LOG.warning("%s", "".join(char if char.isprintable() else "?" for char in text)[:_LINE_LENGTH])
        elif self._num == _LINES_A_MINUTE + 1:
            _LOG.warning("more requests are refused in this minute; they are not logged")


class _TinkerRoutes:
    """The handlers."""

    def __init__(self, front: TinkerFront, keys: Keys, reason: Reason) -> None:
        self._front = front
        self._keys = keys
        self._reason = reason
        self._lines = _Lines()
        self._tickets: dict[str, tuple[Path, float]] = {}
        """(folder, time in seconds since 1970 at which it ends) by ticket of a download, oldest first."""

    def taking(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        """A handler for requests that change something."""

        async def take(request: Request, project: str) -> Any:
            return self._front.take(name, await _body(request), project)

        return self.answering(take)

    def answering(self, handler: Callable[[Request, str], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler with its errors as answers."""

        async def answer(request: Request) -> Response:
            project = "of an unknown key"
            try:
                self._front.expire(time.time())
                project = self._keys.project(request.headers.get("x-api-key", ""))
                response = await handler(request, project)
            except REFUSALS as error:
                status, text = refusal(request.url.path, error)
                if status in _LOGGED:
                    path = request.url.path
                    response = text.removeprefix(f"{path}: ")
                    self._lines.write(f"project {project}: {request.method} {path}: {status}: {response}")
                return _refusal(status, text)
            return response if isinstance(response, Response) else JSONResponse(response)

        return answer

    # --- the client and its session ---------------------------------------------------------------------------

    async def client_config(self, request: Request, project: str) -> Mapping[str, Any]:
        return _CLIENT_CONFIG

    async def dynamic_config(self, request: Request, project: str) -> Mapping[str, Any]:
        return {"sample_cancel_enabled": True}

    async def heartbeat(self, request: Request, project: str) -> Mapping[str, Any]:
        body = bodies.OfSession.model_validate_json(await _body(request))
        self._front.record_activity(body.session_id, project, time.monotonic())
        return {"type": "session_heartbeat"}

    async def finish(self, request: Request, project: str) -> Mapping[str, Any]:
        session_id = request.path_params["session_id"]
        with contextlib.suppress(GoneError):
            self._front.registry.session(session_id, project)
            self._front.take("finish_session", json.dumps({"session_id": session_id}).encode(), project)
        return {}

    async def telemetry(self, request: Request, project: str) -> Mapping[str, Any]:
        """The SDK reports the end of a session with every error that leaves one of its calls: the program may go on."""
        body = bodies.Telemetry.model_validate_json(await _body(request))
        if any(each.event == "SESSION_END" for each in body.events):
            with contextlib.suppress(UnknownIdError, GoneError):
                self._front.registry.session(body.session_id, project).leave(time.monotonic())
        return {"status": "accepted"}

    async def capabilities(self, request: Request, project: str) -> Mapping[str, Any]:
        models = [
            {
                "model_name": name,
                "max_context_length": served.max_context_tokens,
                "trainable": True,
                "sampleable": True,
            }
            for name, served in self._front.models.items()
        ]
        return {"supported_models": models}

    async def health(self, request: Request, project: str) -> Mapping[str, Any]:
        return {"status": "ok"}

    # --- futures ----------------------------------------------------------------------------------------------

    async def retrieve(self, request: Request, project: str) -> Response:
        request_id = bodies.OfRequest.model_validate_json(await _body(request)).request_id
        if not self._front.owns_request(request_id, project):
            return _refusal(410 if ":sample:" in request_id else 404, f"no request {request_id!r}")
        result = self._front.futures.result(request_id)
        if result is None:
            settled = asyncio.Event()
            self._front.futures.when_settled(request_id, settled.set)
            try:
                async with asyncio.timeout(POLL_S):
                    await settled.wait()
            except TimeoutError:
                self._front.futures.forget_waiter(request_id, settled.set)
            result = self._front.futures.result(request_id)
        if result is None:
            pending = self._front.futures.pending(request_id)
            why = None if pending is None else self._reason(pending.pipeline)
            waiting = {
                "type": "try_again",
                "request_id": request_id,
                "queue_state": "active" if why is None else "paused_capacity",
                "queue_state_reason": why,
            }
            return JSONResponse(waiting, 408)
        if result.is_error:
            category = "server" if result.kind == SERVER_ERROR else "user"
            return JSONResponse({"error": result.body.decode(), "category": category})
        if result.kind == EMPTIED:
            return _refusal(410, f"the result of {request_id} was delivered, and emptied since: serve.ledger_gb")
        self._front.futures.mark_delivered(request_id, result)
        is_protobuf = result.kind == PROTOBUF
        return Response(result.body, media_type="application/x-protobuf" if is_protobuf else "application/json")

    async def cancel(self, request: Request, project: str) -> Mapping[str, Any]:
        self._front.cancel(bodies.OfRequest.model_validate_json(await _body(request)).request_id, project)
        return {}

    # --- what there is ----------------------------------------------------------------------------------------

    async def get_info(self, request: Request, project: str) -> Mapping[str, Any]:
        body = bodies.OfModel.model_validate_json(await _body(request))
        model = self._front.registry.model(body.model_id, project)
        name = model.served.name
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_data": {"model_name": name, "arch": "rlmux", "tokenizer_id": name},
            "model_name": name,
            **_rank_fields(model.adapter),
        }

    async def weights_info(self, request: Request, project: str) -> Mapping[str, Any]:
        body = bodies.WeightsInfo.model_validate_json(await _body(request))
        checkpoint = self._front.registry.checkpoint(body.tinker_path, project)
        return {
            "base_model": checkpoint.served.name,
            **_rank_fields(checkpoint.adapter),
            **_matrices(checkpoint.adapter),
        }

    async def sampler(self, request: Request, project: str) -> Mapping[str, Any]:
        sampler = self._front.registry.sampler(request.path_params["sampler_id"], project)
        return {"sampler_id": sampler.id, "base_model": sampler.served.name, "model_path": sampler.path}

    async def training_runs(self, request: Request, project: str) -> Mapping[str, Any]:
        runs = reversed(self._front.registry.models_of(project))
        page, cursor = _page(request, [self._run(model) for model in runs])
        return {"training_runs": page, "cursor": cursor}

    async def training_run(self, request: Request, project: str) -> Mapping[str, Any]:
        return self._run(self._model(request, project))

    async def checkpoints_of(self, request: Request, project: str) -> Mapping[str, Any]:
        model = self._model(request, project)
        found = [_checkpoint_row(each) for each in self._checkpoints(project) if each.path.run == model.id]
        return {"checkpoints": found}

    async def checkpoints(self, request: Request, project: str) -> Mapping[str, Any]:
        page, cursor = _page(request, [_checkpoint_row(each) for each in reversed(self._checkpoints(project))])
        return {"checkpoints": page, "cursor": cursor}

    async def delete_checkpoint(self, request: Request, project: str) -> Mapping[str, Any]:
        path = self._checkpoint_path(request)
        self._front.registry.checkpoint(path, project)
        self._front.take("delete_checkpoint", json.dumps({"path": path}).encode(), project)
        return {}

    async def set_ttl(self, request: Request, project: str) -> Mapping[str, Any]:
        ttl_s = bodies.Ttl.model_validate_json(await _body(request)).ttl_seconds
        parsed = bodies.SetTtl(path=self._checkpoint_path(request), ttl_seconds=ttl_s)
        self._front.take("set_ttl", parsed.model_dump_json().encode(), project)
        return {}

    async def download_urls(self, request: Request, project: str) -> Mapping[str, Any]:
        """Addresses of a checkpoint's files, which need no key until they expire."""
        checkpoint = self._front.registry.checkpoint(self._checkpoint_path(request), project)
        if checkpoint.path.kind != EXTERNAL_WEIGHTS:
            raise UserError(f"{checkpoint.path}: accepted: tinker://RUN/{EXTERNAL_WEIGHTS}/NAME")
        now_s = time.time()
        self._tickets = {ticket: entry for ticket, entry in self._tickets.items() if entry[1] > now_s}
        ticket, expires_s = secrets.token_urlsafe(32), now_s + _DOWNLOAD_S
        self._tickets[ticket] = checkpoint.folder, expires_s
        address = f"{str(request.url).partition(_PREFIX)[0]}{_PREFIX}/{_DOWNLOADS}/{ticket}"
        urls = {name: f"{address}/{name}" for name in model_files(checkpoint.folder)}
        return {"urls": urls, "expires": _date(expires_s)}

    async def download(self, request: Request) -> Response:
        folder, expires_s = self._tickets.get(request.path_params["ticket"], (None, 0.0))
        file = request.path_params["file"]
        if folder is None or expires_s <= time.time() or not folder.is_dir() or file not in model_files(folder):
            return _refusal(404, f"no download {file!r} at this address: it expires after an hour, and with the server")
        return FileResponse(folder / file, media_type="application/octet-stream")

    async def not_served(self, request: Request) -> Response:
        text = f"not served by rlmux: {request.method} {request.url.path}"
        self._lines.write(text)
        return _refusal(404, text)

    def _checkpoint_path(self, request: Request) -> str:
        return f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}"

    def _model(self, request: Request, project: str) -> Model:
        """Also one whose session is over."""
        model = self._front.registry.models.get(request.path_params["run"])
        if model is None or model.session.project != project:
            raise UnknownIdError(f"no training run {request.path_params['run']!r}")
        return model

    def _checkpoints(self, project: str) -> list[ClientCheckpoint]:
        return [each for each in self._front.registry.checkpoints.values() if each.project == project]

    def _run(self, model: Model) -> dict[str, Any]:
        made = [each for each in self._checkpoints(model.session.project) if each.path.run == model.id]
        sampling = [each for each in made if each.path.kind == SAMPLER_WEIGHTS]
        training = [each for each in made if each.path.kind == WEIGHTS]
        return {
            "training_run_id": model.id,
            "base_model": model.served.name,
            "model_owner": model.session.project,
            **_rank_fields(model.adapter),
            "corrupted": False,
            "last_request_time": _date(model.requested_s),
            "last_checkpoint": _checkpoint_row(training[-1]) if training else None,
            "last_sampler_checkpoint": _checkpoint_row(sampling[-1]) if sampling else None,
            "user_metadata": model.user_metadata,
        }


async def _body(request: Request) -> bytes:
    """Raises UserError above MAX_BODY_BYTES, after the whole body: a client that still sends reads no response."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= MAX_BODY_BYTES:
            parts.append(part)
    if num_bytes > MAX_BODY_BYTES:
        raise UserError(f"body: {num_bytes} bytes; accepted: {MAX_BODY_BYTES} or less, in several requests")
    return b"".join(parts)


def _checkpoint_row(checkpoint: ClientCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.path.checkpoint_id,
        "checkpoint_type": _TYPES[checkpoint.path.kind],
        "time": _date(checkpoint.made_s),
        "tinker_path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "expires_at": None if checkpoint.expires_s is None else _date(checkpoint.expires_s),
        "user_metadata": checkpoint.user_metadata,
    }


def _rank_fields(adapter: AdapterConfig | None) -> dict[str, Any]:
    return {"is_lora": False} if adapter is None else {"is_lora": True, "lora_rank": adapter.rank}


def _matrices(adapter: AdapterConfig | None) -> dict[str, bool]:
    if adapter is None:
        return {}
    chosen = {"train_attn": "q_proj", "train_mlp": "up_proj", "train_unembed": "lm_head"}
    return {name: target in adapter.targets for name, target in chosen.items()}


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (
        int(value) if (value := request.query_params.get(name, "")).isdecimal() else default
        for name, default in (("limit", 20), ("offset", 0))
    )
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _refusal(status: int, text: str) -> JSONResponse:
    return JSONResponse({"detail": text}, status, headers=headers_of(status))

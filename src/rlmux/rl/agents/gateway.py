"""The address that programs ask: an HTTP server in a thread of the env worker, on loopback and on a Unix socket.

    request ──key──▶ its session ──▶ Ask ──▶ (sampled by the pipeline's rollout engine) ──▶ Answer ──▶ response

Each program has a key of its own, which names its session. The server ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.json_text import parse_json
from rlmux.rl.agents import wire_formats as wire
from rlmux.rl.agents.outcomes import reward_in
from rlmux.rl.agents.session import Answer, Ask, AskRefusedError, SessionOverError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise UserError(f"task: programs need {error.name}; install it with: pip install 'rlmux[agents]'") from error

_BACKLOG = 1024
_KEEP_ALIVE_S = 600
_LEAVE_S = 15.0
"""Seconds in which what is under way ends with the server."""
_STATUS = {"context_length_exceeded": 400, "turn_limit": 403, "model_not_found": 404, "invalid_api_key": 401}
"""HTTP status by the code of a refusal; 400 for others."""


@dataclass(slots=True, kw_only=True, eq=False)
class Caller:
    """Whom a key names: where its questions go, and what it reports."""

    put: Callable[[Ask], None]
    """Takes a question; from the server's thread."""
    note_refusal: Callable[[str], None]
    """Takes the text of a question that was refused before it came to `put`."""
    reward: Any = None
    """What it reported by POST /v1/reward; None: nothing."""
    num_waiting: int = 0
    """Questions whose answers it waits for."""


class Gateway:
    """Serves the callers that are registered."""

    def __init__(self, model: str, folder: Path) -> None:
        """`model`: what programs may ask for. `folder`: where the Unix socket is made. Returns once it serves."""
        self._model = model
        self._callers: dict[str, Caller] = {}
        self._numbers = itertools.count(1)
        self.socket = folder / "gateway.sock"
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(str(self.socket))
        for each in (tcp, unix):
            each.listen(_BACKLOG)
        self.port: int = tcp.getsockname()[1]
        self.loop = asyncio.new_event_loop()
        chat = self._answering(wire.chat_ask, self._chat, wire.openai_error)
        text = self._answering(wire.text_ask, self._text, wire.openai_error)
        messages = self._answering(wire.messages_ask, self._messages, wire.anthropic_error)
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", text, methods=["POST"]),
                Route("/v1/messages", messages, methods=["POST"]),
                Route("/v1/reward", self._take_reward, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ]
        )
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=_KEEP_ALIVE_S
        )
        self._server = uvicorn.Server(config)
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=([tcp, unix],), name="gateway", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def _serve(self, sockets: list[socket.socket]) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._is_ready.set)
        self.loop.run_until_complete(self._server.serve(sockets=sockets))
        if left := asyncio.all_tasks(self.loop):  # programs that are being ended, and answers to their questions
            self.loop.run_until_complete(asyncio.wait(left, timeout=_LEAVE_S))
        self.loop.close()
        for each in sockets:
            each.close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def register(self, key: str, caller: Caller) -> None:
        self._callers[key] = caller

    def forget(self, key: str) -> None:
        self._callers.pop(key, None)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=2 * _LEAVE_S)

    # --- handlers ---------------------------------------------------------------------------------------------

    def _answering(
        self, read: Callable[[wire.Body], Ask], respond: Callable[[wire.Body, Answer], Response], error_body: Any
    ) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            caller: Caller | None = None
            try:
                caller = self._caller(request)
                body = await _body(request)
                caller = self._caller(request)  # its program may have been ended meanwhile, and another one begun
                self._check_model(body)
                ask = read(body)
                with _waiting(caller):
                    caller.put(ask)
                    answer = await asyncio.wrap_future(ask.answer)
                return respond(body, answer)
            except SessionOverError as error:
                return JSONResponse(error_body(str(error), "session_over"), 410)
            except (AskRefusedError, UserError) as error:
                code = error.code if isinstance(error, AskRefusedError) else "invalid_request_error"
                if caller is not None:
                    caller.note_refusal(str(error))
                return JSONResponse(error_body(str(error), code), _STATUS.get(code, 400))

        return handle

    def _caller(self, request: Request) -> Caller:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        caller = self._callers.get(request.headers.get("x-api-key", bearer))
        if caller is None:
            raise AskRefusedError(
                "the key names no session that is under way; accepted: the one in OPENAI_API_KEY and ANTHROPIC_API_KEY",
                "invalid_api_key",
            )
        return caller

    def _check_model(self, body: wire.Body) -> None:
        if body.get("model") not in (None, self._model):
            raise AskRefusedError(
                f"model: {body['model']!r}; accepted: {self._model!r} (task.model_name)", "model_not_found"
            )

    @property
    def _id(self) -> str:
        return f"rlmux-{next(self._numbers)}"

    def _chat(self, body: wire.Body, answer: Answer) -> Response:
        if not body.get("stream"):
            return JSONResponse(wire.chat_body(self._id, self._model, answer))
        options = body.get("stream_options")
        includes_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return _stream(wire.chat_events(self._id, self._model, answer, includes_usage=includes_usage))

    def _text(self, body: wire.Body, answer: Answer) -> Response:
        if body.get("stream"):
            return _stream(wire.text_events(self._id, self._model, answer))
        return JSONResponse(wire.text_body(self._id, self._model, answer))

    def _messages(self, body: wire.Body, answer: Answer) -> Response:
        if body.get("stream"):
            return _stream(wire.messages_events(self._id, self._model, answer))
        return JSONResponse(wire.messages_body(self._id, self._model, answer))

    async def _take_reward(self, request: Request) -> Response:
        try:
            caller, body = self._caller(request), await _body(request)
        except AskRefusedError as error:
            return JSONResponse(wire.openai_error(str(error), error.code), _STATUS[error.code])
        except UserError as error:
            return JSONResponse(wire.openai_error(str(error), "invalid_request_error"), 400)
        caller.reward = body.get("reward")
        if reward_in(caller.reward) is None:
            text = f"reward: {caller.reward!r}; accepted: a finite number"
            return JSONResponse(wire.openai_error(text, "invalid_request_error"), 400)
        return JSONResponse({})

    async def _models(self, request: Request) -> Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlmux"}
        return JSONResponse({"object": "list", "data": [model]})


async def _body(request: Request) -> wire.Body:
    try:
        body = parse_json(await request.body())
    except ClientDisconnect:
        raise UserError("the program hung up") from None
    except ValueError as error:
        raise UserError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError(f"the body is a {type(body).__name__}; accepted: an object")
    return body


@contextlib.contextmanager
def _waiting(caller: Caller) -> Iterator[None]:
    caller.num_waiting += 1
    try:
        yield
    finally:
        caller.num_waiting -= 1


def _stream(events: Iterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")

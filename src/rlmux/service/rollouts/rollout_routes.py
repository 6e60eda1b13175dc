"""The rollout door: one request in, its samples out, by a sampler of the Tinker front.

    POST /inference/v1/generate     tokens in, tokens out          ─┐
    POST /v1/completions            text or tokens in, text out     ├─▶ asample ─▶ its future ─▶ answer
    POST /v1/chat/completions       messages in, a message out     ─┘
    GET  /v1/models                 what `model` may name: base models, checkpoints, samplers

A request is an `asample` like a Tinker client's: in the ledger, in batches, under leases. Its samples are those of its
`seed`. Without one they depend on how many equal prompts came before, which connections can turn round.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.vocabulary import Vocabulary
from rlmux.service.refusals import REFUSALS, headers_of, refusal
from rlmux.service.rollouts import replies
from rlmux.service.rollouts.replies import ReplySequence
from rlmux.service.rollouts.rollout_bodies import Chat, Completion, Generate, Params, Streamed
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.keys import Keys
from rlmux.service.tinker.registry import ClientSampler, UnknownIdError

_LOOK_S = 5.0
"""Seconds between two looks whether the client is still there."""
_RANGE = 10**9 * (10**9 + 1)
"""First number of requests that come this way; the copies of a Tinker client's sampler number theirs below."""
_MARK = {"rlmux": "rollouts"}
"""Metadata of the sessions that samplers of names are made in."""


def routes(front: TinkerFront, keys: Keys, vocabularies: Mapping[str, Vocabulary]) -> APIRouter:
    """Everything under `/v1` and `/inference/v1`. `vocabularies`: by name of the served model."""
    door = _RolloutRoutes(front, keys, vocabularies)
    router = APIRouter()
    for method, path, handler in (
        ("POST", "/inference/v1/generate", door.generate),
        ("POST", "/v1/completions", door.complete),
        ("POST", "/v1/chat/completions", door.chat),
        ("GET", "/v1/models", door.models),
    ):
        router.add_api_route(path, door.answering(handler), methods=[method])
    return router


class _RolloutRoutes:
    """The handlers."""

    def __init__(self, front: TinkerFront, keys: Keys, vocabularies: Mapping[str, Vocabulary]) -> None:
        self._front = front
        self._keys = keys
        self._vocabularies = vocabularies

    def answering(self, handler: Callable[[Request, str], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler with errors in the OpenAI API's form."""

        async def answer(request: Request) -> Response:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            try:
                self._front.expire(time.time())
                response = await handler(request, self._keys.project(request.headers.get("x-api-key", bearer)))
            except REFUSALS as error:
                status, text = refusal(request.url.path, error)
                kind = "rate_limit_error" if status == 429 else "invalid_request_error"
                body = {"error": {"message": text, "type": kind, "param": None, "code": None}}
                return JSONResponse(body, status, headers=headers_of(status))
            return response if isinstance(response, Response) else JSONResponse(response)

        return answer

    # --- addresses --------------------------------------------------------------------------------------------

    async def generate(self, request: Request, project: str) -> Any:
        body = Generate.model_validate_json(await request.body())
        if body.stream:
            raise UserError("stream is not served: leave it out")
        sampler = self._sampler(body.model, project)
        request_id, sampled = await self._sample(request, project, sampler, body.token_ids, body.sampling_params)
        texts = self._texts(sampler, sampled, body.sampling_params) if body.output_mode == "text" else None
        return replies.generated(body.request_id or request_id, sampled, texts)

    async def complete(self, request: Request, project: str) -> Any:
        body = Completion.model_validate_json(await request.body())
        sampler = self._sampler(body.model, project)
        prompts = [self._encoded(sampler, each) for each in body.prompts()]
        answers = await asyncio.gather(*(self._sample(request, project, sampler, each, body) for each in prompts))
        sampled = [each for _, of_prompt in answers for each in of_prompt]
        texts = self._texts(sampler, sampled, body)
        choices = [
            replies.completion_choice(
                index, each, text, None if body.logprobs is None else self._pieces(sampler, each.tokens)
            )
            for index, (each, text) in enumerate(zip(sampled, texts, strict=True))
        ]
        read = [prompt for prompt, (_, of_prompt) in zip(prompts, answers, strict=True) for _ in of_prompt]
        self._add_tokens(body, choices, sampled, read)
        answer = replies.envelope("text_completion", answers[0][0], body.model, choices)
        return _completion_response(answer, sum(map(len, prompts)), sampled, body)

    async def chat(self, request: Request, project: str) -> Any:
        body = Chat.model_validate_json(await request.body())
        sampler = self._sampler(body.model, project)
        vocabulary = self._vocabularies[sampler.served.name]
        messages = [{"role": each.role, "content": each.text()} for each in body.messages]
        try:
            opening = () if vocabulary.has_chat_template else vocabulary.opening_tokens
            prompt = [*opening, *vocabulary.encode_chat(messages, vocabulary.render_chat(messages))]
        except PipelineError as error:
            raise UserError(f"messages: {error}") from None
        params = body.model_copy(update={"max_tokens": body.max_completion_tokens or body.max_tokens})
        request_id, sampled = await self._sample(request, project, sampler, prompt, params)
        choices = [
            replies.chat_choice(
                index,
                each,
                text,
                [(vocabulary.decode([token]), vocabulary.token_bytes(token)) for token in each.tokens]
                if body.logprobs
                else None,
                is_chunk=bool(body.stream),
            )
            for index, (each, text) in enumerate(zip(sampled, self._texts(sampler, sampled, body), strict=True))
        ]
        self._add_tokens(body, choices, sampled, [prompt] * len(sampled))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        answer = replies.envelope(kind, request_id, body.model, choices)
        return _completion_response(answer, len(prompt), sampled, body)

    async def models(self, request: Request, project: str) -> Any:
        registry = self._front.registry
        checkpoints = [path for path, each in registry.checkpoints.items() if each.project == project]
        samplers = [
            each.id
            for each in registry.samplers.values()
            if each.session.project == project and not each.is_gone and each.session.user_metadata != _MARK
        ]
        names = [*self._front.models, *checkpoints, *samplers]
        response = [{"id": name, "object": "model", "created": 0, "owned_by": "rlmux"} for name in names]
        return {"object": "list", "data": response}

    # --- samplers ---------------------------------------------------------------------------------------------

    def _sampler(self, name: str | None, project: str) -> ClientSampler:
        """The sampler that a model's name stands for. Raises UnknownIdError for a name that stands for none."""
        registry = self._front.registry
        if name is None:
            if len(self._front.models) != 1:
                raise UserError(f"model is missing; accepted: {', '.join(self._front.models)}, or a checkpoint's path")
            name = next(iter(self._front.models))
        if name in registry.samplers:
            return registry.sampler(name, project)
        is_path = name.startswith("tinker://")
        if not is_path and name not in self._front.models:
            raise UnknownIdError(
                f"model {name!r} is not served; accepted: {', '.join(self._front.models)}, the path of a checkpoint "
                "(tinker://...), or the id of a sampler; GET /v1/models lists them"
            )
        if is_path:
            registry.checkpoint(name, project)
        session_id = self._session(project)
        of_session = [each for each in registry.samplers.values() if each.session.id == session_id]
        for each in of_session:
            if (each.path or each.served.name) == name:
                return each
        fields = {"session_id": session_id, "sampling_session_seq_id": len(of_session)}
        fields |= {"model_path": name} if is_path else {"base_model": name}
        made = self._front.take("create_sampling_session", json.dumps(fields).encode(), project)
        return registry.samplers[made["sampling_session_id"]]

    def _session(self, project: str) -> str:
        """The project's session for samplers by name; it expires when idle."""
        for session in self._front.registry.sessions.values():
            if session.project == project and not session.is_over and session.user_metadata == _MARK:
                return session.id
        body = {"display_name": f"rollouts-{project}", "user_metadata": _MARK}
        return str(self._front.take("create_session", json.dumps(body).encode(), project)["session_id"])

    async def _sample(
        self, request: Request, project: str, sampler: ClientSampler, prompt: Sequence[int], params: Params
    ) -> tuple[str, list[ReplySequence]]:
        """(request id, samples). A request is dropped if its client disconnects before it starts."""
        params.check()
        stop = [*_stop_texts(params), *(params.stop_token_ids or ())]
        wanted = {
            "max_tokens": params.max_tokens,
            "temperature": 1.0 if params.temperature is None else params.temperature,
            "seed": params.seed,
            "stop": [*sampler.served.stop_tokens, *stop] if stop else None,
        }
        body = {
            "sampling_session_id": sampler.id,
            "seq_id": sampler.order(_RANGE)[0].following,
            "num_samples": params.n or 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": wanted,
        }
        request_id = self._front.take("asample", json.dumps(body).encode(), project)["request_id"]
        settled = asyncio.Event()
        self._front.futures.when_settled(request_id, settled.set)
        while (result := self._front.futures.result(request_id)) is None:
            self._front.record_activity(sampler.session.id, project, time.monotonic())
            if await request.is_disconnected():
                self._front.cancel(request_id, project)
                raise UserError("the client went away")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(settled.wait(), _LOOK_S)
        if result.is_error:
            raise UserError(result.body.decode())
        self._front.futures.mark_delivered(request_id, result)
        return request_id, replies.read_sampled(result.body)

    # --- text -------------------------------------------------------------------------------------------------

    def _encoded(self, sampler: ClientSampler, prompt: str | Sequence[int]) -> Sequence[int]:
        """Tokens of a prompt."""
        if not isinstance(prompt, str):
            return prompt
        vocabulary = self._vocabularies[sampler.served.name]
        try:
            return [*vocabulary.opening_tokens, *vocabulary.encode(prompt)]
        except PipelineError as error:
            raise UserError(f"prompt: {error}") from None

    def _texts(self, sampler: ClientSampler, sampled: Sequence[ReplySequence], params: Params) -> list[str]:
        vocabulary = self._vocabularies[sampler.served.name]
        return [replies.text_of(each, vocabulary, _stop_texts(params)) for each in sampled]

    def _pieces(self, sampler: ClientSampler, tokens: Sequence[int]) -> list[str]:
        """Text of each token alone."""
        vocabulary = self._vocabularies[sampler.served.name]
        return [vocabulary.decode([token]) for token in tokens]

    def _add_tokens(
        self,
        body: Completion | Chat,
        choices: Sequence[dict[str, Any]],
        sampled: Sequence[ReplySequence],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """The tokens themselves, for trainers that must not encode the text again."""
        if body.return_token_ids:
            for choice, each, prompt in zip(choices, sampled, prompts, strict=True):
                choice |= {"token_ids": each.tokens, "prompt_token_ids": list(prompt)}


def _stop_texts(params: Params) -> list[str]:
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def _completion_response(
    answer: dict[str, Any], num_prompt_tokens: int, sampled: Sequence[ReplySequence], body: Streamed
) -> Any:
    usage = replies.usage(num_prompt_tokens, sampled)
    if body.stream:
        pieces = replies.stream(answer, usage if body.includes_usage else None)
        return StreamingResponse(pieces, media_type="text/event-stream")
    return {**answer, "usage": usage}

"""Conversion of a client's sampling request into an engine's trajectory requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlmux.core.errors import UserError
from rlmux.rl.client_requests import SampleDone, SampleRequest
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.service.tinker.bodies import SampleBody
from rlmux.service.tinker.codec import write_sample
from rlmux.service.tinker.model_catalog import ServedModel

COLDEST = 1e-6
"""The temperature that 0 stands for: the likeliest token, unless two differ by less than a rounding."""


def check_sample(body: SampleBody, model: ServedModel) -> None:
    """Raises UserError for unsupported fields by name, with the alternative."""
    params = body.sampling_params
    refused = {
        "record_stability_info": (bool(body.record_stability_info), "run with loss_fn=importance_sampling"),
        "top_k": (params.top_k not in (-1, 0), "leave it at -1"),
        "top_p": (params.top_p != 1.0, "leave it at 1"),
        "topk_prompt_logprobs": (body.topk_prompt_logprobs > 0, "use prompt_logprobs"),
        "topk_sample_logprobs": (body.topk_sample_logprobs > 0, "each sampled token's own log-prob is returned"),
        "target_prompt_logprobs": (body.target_prompt_logprobs is not None, "use prompt_logprobs"),
        "prompt_alt_tokens_k": (body.prompt_alt_tokens_k > 0, "leave it at 0"),
    }
    for name, (is_requested, instead) in refused.items():
        if is_requested:
            raise UserError(f"{name} is not served: {instead}")
    tokens = prompt_tokens(body)
    if not 1 <= len(tokens) <= model.max_prompt_tokens:
        raise UserError(
            f"prompt: {len(tokens)} tokens; accepted: 1 to max_prompt_tokens {model.max_prompt_tokens} of {model.name}"
        )
    _check_tokens("prompt", tokens, model)
    if not isinstance(params.stop, str):
        _check_tokens("stop", [each for each in params.stop or () if isinstance(each, int)], model)
    if params.max_tokens is not None and params.max_tokens > model.max_new_tokens:
        raise UserError(
            f"max_tokens: {params.max_tokens}; accepted: 1 to {model.max_new_tokens} (max_new_tokens of {model.name})"
        )
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and 1 <= last_n < len(tokens)):
        raise UserError(f"prompt_logprobs_last_n: {last_n}; accepted: 1 to {len(tokens) - 1}, with prompt_logprobs")


def prompt_tokens(body: SampleBody) -> Sequence[int]:
    """All tokens of the prompt. Raises UserError for chunks that are no text."""
    tokens: list[int] = []
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise UserError(f"prompt: a chunk of type {chunk.type!r} is not served; accepted: encoded_text")
        tokens += chunk.tokens
    return tokens


def _check_tokens(where: str, tokens: Sequence[int], model: ServedModel) -> None:
    """Raises UserError for a token that the model has not."""
    unknown = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
    if unknown is not None:
        raise UserError(f"{where}: token {unknown} is unknown; accepted: 0 to {model.vocab_size - 1} of {model.name}")


def sample_request(request_id: str, body: SampleBody, model: ServedModel, *, number: int, key: int) -> SampleRequest:
    """The engine's request. `number`: unique among the pipeline's requests. `key`: see rng_keys.py."""
    params, tokens = body.sampling_params, prompt_tokens(body)
    stop = params.stop
    texts = [stop] if isinstance(stop, str) else [each for each in stop or () if isinstance(each, str)]
    stop_tokens = model.stop_tokens if stop is None else [each for each in stop if isinstance(each, int)]
    trajectories = [
        TrajectoryRequest(
            id=TrajectoryId(0, number, sample),
            prompt_tokens=tuple(tokens),
            max_new_tokens=params.max_tokens or model.max_new_tokens,
            stop_tokens=tuple(stop_tokens),
            seed=key,
            drawn_as=TrajectoryId(0, 0, sample),
            temperature=max(params.temperature, COLDEST),
            stop_texts=tuple(texts),
        )
        for sample in range(body.num_samples)
    ]
    num_scored = 0
    write: Callable[[SampleDone], bytes] = write_sample
    if body.prompt_logprobs:
        num_scored = body.prompt_logprobs_last_n or len(tokens) - 1
        write = partial(write_sample, num_prompt_tokens=len(tokens))
    return SampleRequest(
        id=request_id, trajectories=trajectories, prompt_tokens=tokens, num_scored=num_scored, write=write
    )

"""Semantics of requests: id, deferred response and refusals.

read(path, body)                     ─▶ the parsed body        once for each request
request_id_of(path, parsed)          ─▶ CHANNEL:NUMBER         the same for a repeated request
choose(path, parsed, ...)            ─▶ what the front adds    random, or which save a name means now: kept for replays
deferred_response(id, path, parsed)  ─▶ the response           from the request alone, so a repeat gets the same
RequestChecks.check                  ─▶ UserError, ...         before anything of the request is kept
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from rlmux.core.errors import RlmuxError, UserError
from rlmux.rl.config import AdapterConfig
from rlmux.service.tinker import bodies
from rlmux.service.tinker.codec import read_head
from rlmux.service.tinker.futures import Futures, PendingLoad
from rlmux.service.tinker.ledger import LoggedRequest
from rlmux.service.tinker.model_catalog import ServedModel, find_served
from rlmux.service.tinker.names import EXTERNAL_WEIGHTS, WEIGHTS, TinkerPath, checked_name, model_id, sampler_id
from rlmux.service.tinker.project_budgets import ProjectBudgets
from rlmux.service.tinker.registry import Registry
from rlmux.service.tinker.sample_requests import check_sample
from rlmux.service.tinker.session_tags import read_tags

_CHARGED = ("forward_backward", "asample")
"""Requests that begin work; what ends it (an update, a save) is always taken."""
MAX_SAMPLES_AT_ONCE = 2000
"""Sampling requests of one project that may wait for results."""
MAX_TRAINING_AT_ONCE = 2000
"""Requests of one project's models that may wait for results."""
MAX_BYTES_AT_ONCE = 4 << 30
"""Bytes of the bodies of one project's requests that wait for results: all are held in memory."""
MAX_BODY_BYTES = 256 << 20
"""Bytes of one request; the SDK sends losses in parts of 5 MB."""
MAX_SESSIONS_AT_ONCE = 500
"""Sessions of one project that are not over."""
MAX_MODELS_AT_ONCE = 200
"""Models of one project whose session is not over: each has, or waits for, workers of its own."""

_OLDEST_SDK = (0, 25)
"""First version of the SDK that sends losses as protobuf."""
MAX_TTL_S = 10 * 366 * 86400
"""Largest accepted `ttl_seconds`: ten years."""


class ConflictError(RlmuxError):
    """A request with the number of another one."""


class FloodError(RlmuxError):
    """More requests than are taken at once; the same one may come again a second later."""


_READ: Mapping[str, Callable[[bytes], Any]] = {
    "create_session": bodies.CreateSession.model_validate_json,
    "finish_session": bodies.OfSession.model_validate_json,
    "create_model": bodies.CreateModel.model_validate_json,
    "forward_backward": read_head,
    "optim_step": bodies.OptimStep.model_validate_json,
    "save_weights_for_sampler": bodies.SaveWeightsForSampler.model_validate_json,
    "save_weights": bodies.SaveWeightsBody.model_validate_json,
    "save_weights_external": bodies.SaveWeightsExternal.model_validate_json,
    "load_weights": bodies.LoadWeights.model_validate_json,
    "create_sampling_session": bodies.CreateSamplingSession.model_validate_json,
    "asample": bodies.SampleBody.model_validate_json,
    "delete_checkpoint": bodies.OfPath.model_validate_json,
    "set_ttl": bodies.SetTtl.model_validate_json,
}


def read(path: str, body: bytes) -> Any:
    """The parsed body: a value of bodies.py or a LossHead. Raises pydantic's ValidationError, UserError."""
    return _READ[path](body)


def request_id_of(path: str, parsed: Any, chosen: str) -> str:
    """Id of a request. `parsed`: of `read`. `chosen`: what the front drew at random for it."""
    match path:
        case "create_model":
            return f"{model_id(parsed.session_id, parsed.model_seq_id)}:create"
        case "asample":
            return f"{parsed.sampling_session_id}:{parsed.seq_id}"
        case "create_sampling_session":
            return f"{sampler_id(parsed.session_id, parsed.sampling_session_seq_id)}:create"
        case "load_weights" if parsed.model_id is None:
            return f"{model_id(parsed.session_id or '', parsed.model_seq_id or 0)}:0"
        case "create_session":
            return f"session:{chosen}"
        case "finish_session" | "delete_checkpoint" | "set_ttl":
            return f"{path}:{secrets.token_hex(8)}"
    return f"{parsed.model_id}:{parsed.seq_id or 0}"


def choose(path: str, parsed: Any, registry: Registry, keep_snapshots: int) -> str:
    """What the front adds to a request that it takes, so that a replay comes to the same: a session's random part, the
    folder of a save, how many snapshots are kept beside a new one, the file that a checkpoint's path names now."""
    match path:
        case "create_session":
            return secrets.token_hex(3)
        case "save_weights" | "save_weights_external":
            return f"state-{parsed.seq_id}-{parsed.path}"
        case "save_weights_for_sampler" if parsed.path is None:
            return str(keep_snapshots)
        case "load_weights" | "delete_checkpoint" | "set_ttl":
            return registry.file_named(parsed.path)
        case "create_sampling_session":
            return registry.file_named(parsed.model_path)
    return ""


def is_repeated(path: str, known: LoggedRequest, body: bytes) -> bool:
    """Whether a request with the number of a known one is that one, sent again."""
    if known.has_body(body):
        return True
    if path != "save_weights_for_sampler":
        return False
    # the SDK numbers the sampler anew with every attempt
    first, again = (bodies.SaveWeightsForSampler.model_validate_json(each) for each in (known.body, body))
    return again.model_copy(update={"sampling_session_seq_id": first.sampling_session_seq_id}) == first


def deferred_response(request_id: str, path: str, parsed: Any) -> dict[str, Any]:
    """The answer to a request that was taken."""
    match path:
        case "finish_session" | "delete_checkpoint" | "set_ttl":
            return {}
        case "create_model":
            return {"request_id": request_id, "model_id": request_id.removesuffix(":create")}
        case "load_weights":
            return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}
        case "asample":
            names = [f"{request_id}:{index}" for index in range(parsed.num_samples)]
            return {"request_id": request_id, "sample_sequence_ids": names}
        case "create_sampling_session":
            return {"type": "create_sampling_session", "sampling_session_id": request_id.removesuffix(":create")}
    return {"request_id": request_id}


class RequestChecks:
    """Refuses unsupported requests by name, with the alternative."""

    def __init__(
        self, registry: Registry, futures: Futures, models: Mapping[str, ServedModel], budgets: ProjectBudgets
    ) -> None:
        self._registry = registry
        self._budgets = budgets
        self._futures = futures
        self._models = models

    def check(self, taken: LoggedRequest, parsed: Any) -> None:
        """Raises UserError, UnknownIdError, GoneError or ConflictError for a request that is refused, FloodError or
        BudgetError for one that may come again. `parsed`: of `read`."""
        project = taken.project
        if taken.path in _CHARGED:
            self._budgets.check(project)
        match taken.path:
            case "create_session":
                _check_sdk(parsed.sdk_version)
                read_tags(parsed.tags)
                self._check_sessions(project)
            case "set_ttl":
                self._registry.checkpoint(parsed.path, project)
                _check_ttl(parsed.ttl_seconds)
            case "create_model":
                self._check_create(parsed, project)
            case "forward_backward" | "optim_step":
                self._check_number(parsed.model_id, parsed.seq_id, project)
            case "save_weights":
                self._check_save(parsed, WEIGHTS, project)
            case "save_weights_external":
                _check_plain(parsed)
                self._check_save(parsed, EXTERNAL_WEIGHTS, project)
            case "save_weights_for_sampler":
                self._check_keep(parsed, project)
            case "load_weights":
                self._check_load(parsed, project)
            case "create_sampling_session":
                self._check_sampler(parsed, project)
            case "asample":
                self._check_sample(parsed, project)

    def _check_create(self, body: bodies.CreateModel, project: str) -> None:
        self._registry.session(body.session_id, project)
        self._check_models(project)
        find_served(self._models, body.base_model).adapter(body.lora_config)
        optimizer = body.optimizer_config
        if optimizer is not None and optimizer.type not in ("adam", "adamw"):
            raise UserError(f"optimizer {optimizer.type!r} is not served; accepted: adamw")

    def _check_sample(self, body: bodies.SampleBody, project: str) -> None:
        sampler = self._registry.sampler(body.sampling_session_id, project)
        check_sample(body, sampler.served)
        waiting = self._futures.waiting_of(project)
        if not sampler.order(body.seq_id)[0].is_missing(body.seq_id):
            self._check_room("sampling requests", waiting.num_samples, MAX_SAMPLES_AT_ONCE, waiting)

    def _check_number(self, model: str, seq_id: int, project: str) -> None:
        """A request whose turn has passed is another one with a number that is taken."""
        order = self._registry.model(model, project).order
        if seq_id < order.following:
            raise ConflictError(f"request {seq_id} of {model} was another one")
        waiting = self._futures.waiting_of(project)
        if not order.is_missing(seq_id):
            self._check_room("requests of models", waiting.num_others, MAX_TRAINING_AT_ONCE, waiting)

    def _check_room(self, what: str, num_waiting: int, most: int, waiting: PendingLoad) -> None:
        """Not for a request that others wait for: they could have no result without it."""
        if num_waiting >= most:
            raise FloodError(f"{most} {what} of this project wait already; accepted: this one again, later")
        if waiting.num_bytes >= MAX_BYTES_AT_ONCE:
            raise FloodError(
                f"requests of this project with {MAX_BYTES_AT_ONCE} bytes wait already; accepted: this one again, later"
            )

    def _check_sessions(self, project: str) -> None:
        if len(self._registry.open_sessions(project)) >= MAX_SESSIONS_AT_ONCE:
            raise FloodError(
                f"{MAX_SESSIONS_AT_ONCE} sessions of this project are open; accepted: another once one is closed "
                "(ServiceClient.close), or silent for serve.session_timeout_s"
            )

    def _check_models(self, project: str) -> None:
        if sum(not each.session.is_over for each in self._registry.models_of(project)) >= MAX_MODELS_AT_ONCE:
            raise FloodError(
                f"{MAX_MODELS_AT_ONCE} models of this project are in training; accepted: another once a session of "
                "theirs is closed (ServiceClient.close)"
            )

    def _check_save(self, body: bodies.SaveWeightsBody, kind: str, project: str) -> None:
        self._check_number(body.model_id, body.seq_id, project)
        _check_ttl(body.ttl_seconds)
        path = TinkerPath(body.model_id, kind, checked_name(body.path))
        known = str(path) in self._registry.checkpoints or str(path) in self._registry.being_saved.values()
        if known and not body.overwrite:
            raise UserError(f"{path} is there already; accepted: another name, or overwrite=True")

    def _check_keep(self, body: bodies.SaveWeightsForSampler, project: str) -> None:
        self._check_number(body.model_id, body.seq_id, project)
        _check_ttl(body.ttl_seconds)
        if body.kind == "inflight":
            raise UserError("kind 'inflight' is not served: use snapshots (save_weights_and_get_sampling_client)")
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise UserError("save_weights_for_sampler: accepted: either path or sampling_session_seq_id")
        if body.path is not None:
            checked_name(body.path)

    def _check_load(self, body: bodies.LoadWeights, project: str) -> None:
        checkpoint = self._registry.checkpoint(body.path, project)
        if checkpoint.path.kind != WEIGHTS:
            raise UserError(f"{body.path} has no training state; accepted: tinker://RUN/weights/NAME (save_state)")
        if body.model_id is not None:
            self._check_number(body.model_id, body.seq_id or 0, project)
            model = self._registry.model(body.model_id, project)
            base = model.served.name
            if model.adapter != checkpoint.adapter:
                saved, trained = _describe_adapter(checkpoint.adapter), _describe_adapter(model.adapter)
                raise UserError(
                    f"{body.path} is {saved}, and {model.id} is {trained}; accepted: a checkpoint of the same "
                    "rank and matrices, or create_training_client_from_state"
                )
        else:
            self._registry.session(body.session_id or "", project)
            self._check_models(project)
            base = body.base_model or checkpoint.served.name
        if base != checkpoint.served.name:
            raise UserError(f"{body.path} is of {checkpoint.served.name}, not of {base}")

    def _check_sampler(self, body: bodies.CreateSamplingSession, project: str) -> None:
        self._registry.session(body.session_id, project)
        if body.model_path is not None:
            self._registry.checkpoint(body.model_path, project)
        else:
            find_served(self._models, body.base_model or "")


def _check_sdk(version: str) -> None:
    """Raises UserError for a client whose later requests could not be read; unknown versions pass."""
    found = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", version)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST_SDK:
        raise UserError(f"tinker {version[:40]} is too old for this server; accepted: tinker 0.25 or newer")


def _check_plain(body: bodies.SaveWeightsExternal) -> None:
    if body.age_encryption_recipients:
        raise UserError("age_encryption_recipients: files are not encrypted here; accepted: none")


def _check_ttl(ttl_s: int | None) -> None:
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise UserError(f"ttl_seconds: {ttl_s}; accepted: 1 to {MAX_TTL_S}, or none for a checkpoint that stays")


def _describe_adapter(adapter: AdapterConfig | None) -> str:
    if adapter is None:
        return "a whole model"
    return f"an adapter of rank {adapter.rank} beside {', '.join(adapter.targets)}"

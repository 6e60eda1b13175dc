"""The Tinker front: applies requests in order and keeps their results.

    POST ─▶ ledger ─▶ apply ─▶ future       in the order of its channel ─▶ host.train, host.sample
                                                                                  │
    retrieve ◀── result ◀── ledger ◀── settle ◀──────── the host's thread ◀───────┘

Everything here happens in one thread, the event loop's. `apply` depends on the request and on what was applied before
alone, so that a restart that applies the ledger again comes to the same state; work whose result is known is not done
again. The requests of one model are carried out in the order of their numbers, whatever order they arrive in.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.errors import RlmuxError, UserError
from rlmux.core.model import PipelineId
from rlmux.rl.client_requests import LoadState, PackedLoss, SampleRequest, SaveState, TrainRequest, WriteWeights
from rlmux.rl.config import AdapterConfig, TrainingConfig
from rlmux.service.tinker import bodies
from rlmux.service.tinker.checkpoint_files import Files
from rlmux.service.tinker.codec import LossHead, read_or_complain, write_forward_backward
from rlmux.service.tinker.futures import Futures, PendingFuture
from rlmux.service.tinker.ledger import ERROR, PROTOBUF, Ledger, LoggedRequest, Result
from rlmux.service.tinker.model_catalog import ServedModel, find_served
from rlmux.service.tinker.names import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS, TinkerPath, model_id, sampler_id
from rlmux.service.tinker.project_budgets import ProjectBudgets
from rlmux.service.tinker.registry import ClientSampler, Model, Registry, Session
from rlmux.service.tinker.reorder_buffer import InOrder
from rlmux.service.tinker.requests import (
    ConflictError,
    RequestChecks,
    choose,
    deferred_response,
    is_repeated,
    read,
    request_id_of,
)
from rlmux.service.tinker.sample_requests import prompt_tokens, sample_request
from rlmux.service.tinker.session_tags import Hints, read_tags

_LOG = logging.getLogger("rlmux.tinker")
_Save = bodies.SaveWeightsBody | bodies.SaveWeightsForSampler


class Host(Protocol):
    """What carries out a front's work. `open` raises UserError, and changes nothing, for a name that is taken."""

    def open(
        self,
        pipeline: PipelineId,
        config: TrainingConfig,
        folder: Path,
        restore_from: Path | None,
        hints: Hints,
        project: str,
    ) -> None: ...
    def train(self, pipeline: PipelineId, request_id: str, request: TrainRequest) -> None: ...
    def sample(self, pipeline: PipelineId, request: SampleRequest, weights: Path | None) -> None: ...
    def withdraw(self, pipeline: PipelineId, ids: Sequence[str]) -> None: ...
    def finish(self, pipeline: PipelineId) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """A request of a model, held until those before it are in."""

    number: int
    id: str
    request: TrainRequest
    when_due: Callable[[], None]


class TinkerFront:
    """See the module's picture."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        ledger: Ledger,
        folder: Path,
        host: Host,
        budgets: ProjectBudgets | None = None,
        keep_snapshots: int = 0,
    ) -> None:
        """`folder`: where models keep their checkpoints. `budgets`: None where there are none. `keep_snapshots`: newest
        snapshots of a model that can be sampled; 0: all."""
        self.registry = Registry()
        self.futures = Futures(ledger)
        self._models = models
        self._ledger = ledger
        self._folder = folder
        self._host = host
        self._budgets = budgets or ProjectBudgets(ledger, {})
        self._checks = RequestChecks(self.registry, self.futures, models, self._budgets)
        self._num_samples: dict[PipelineId, int] = {}
        self._keep_snapshots = keep_snapshots
        self._files = Files(self.registry, self.futures)
        self._apply_by_path: Mapping[str, Callable[[LoggedRequest, Any], dict[str, Any] | None]] = {
            "create_session": self._create_session,
            "finish_session": self._finish_session,
            "create_model": self._create_model,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights": self._save_weights,
            "save_weights_external": self._save_weights,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "delete_checkpoint": self._delete_checkpoint,
            "set_ttl": self._set_ttl,
        }

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """What clients may name."""
        return self._models

    # --- requests -------------------------------------------------------------------------------------------

    def take(self, path: str, body: bytes, project: str) -> dict[str, Any]:
        """Take a request that changes something; returns the answer, for most a future.

        Raises UserError for one that is refused, GoneError for one whose session is over, ConflictError for a number
        that another request has, FloodError where too many wait, and BudgetError where nothing is left today. The same
        request again gets the same answer.
        """
        parsed = read(path, body)
        chosen = choose(path, parsed, self.registry, self._keep_snapshots)
        request_id = request_id_of(path, parsed, chosen)
        known = self._ledger.request(request_id) if self.owns_request(request_id, project) else None
        if known is not None:
            if not is_repeated(path, known, body):
                raise ConflictError(f"{request_id} was another request; accepted: the same one again")
            return deferred_response(request_id, path, parsed)
        taken = LoggedRequest(request_id, path, body, chosen, project, time.time())
        self._checks.check(taken, parsed)
        self._ledger.take(taken)
        try:
            response = self._apply(taken, parsed)
        except BaseException:
            self._ledger.forget(request_id)
            raise
        return deferred_response(request_id, path, parsed) if response is None else response

    def repeat(self, taken: LoggedRequest) -> None:
        """Take a request as another front took it, whose ledger has it."""
        self._files.are_kept = True
        self._ledger.take(taken)
        self._apply(taken, read(taken.path, taken.body))

    def hashes(self, model: str) -> dict[int, str]:
        """Hash of a model's weights after each update; see `Ledger.hashes`."""
        return self._ledger.hashes(model)

    def replay(self) -> None:
        """Replay the ledger after a restart. A request that can no longer be applied is skipped, with a log line and an
        error for its client."""
        self._files.are_kept = True
        for taken in self._ledger.taken():
            try:
                self._apply(taken, read(taken.path, taken.body))
            except (RlmuxError, ValueError) as error:
                _LOG.warning("request %s (%s) is skipped: %s", taken.id, taken.path, error)
                self.futures.skip(taken.id, str(error))
        self._files.are_kept = False

    def _apply(self, taken: LoggedRequest, parsed: Any) -> dict[str, Any] | None:
        response = self._apply_by_path[taken.path](taken, parsed)
        if (session := self.registry.sessions.get(taken.id.partition(":")[0])) is not None:
            session.record_activity(_clock_s(taken.at_s))
        return response

    def owns_request(self, request_id: str, project: str) -> bool:
        """Whether the request is the project's; others' requests do not exist for it."""
        return self._ledger.project(request_id) == project

    def cancel(self, request_id: str, project: str) -> None:
        """Forget a sampling request of the project that has not begun."""
        future = self.futures.pending(request_id) if self.owns_request(request_id, project) else None
        if future is not None and future.sampler is not None:
            self._host.withdraw(future.pipeline, [request_id])

    def admit(self, pipeline: PipelineId) -> None:
        """A pipeline has its place: what waited for that alone, its creation, is done."""
        for request_id in self.futures.of_pipeline(pipeline):
            if request_id.endswith(":create"):
                self.futures.settle(request_id, None, None)

    def charge(self, pipeline: PipelineId, device_s: float) -> None:
        """Work of a pipeline took so many device-seconds."""
        for session in self.registry.sessions.values():
            if pipeline in session.pipelines:
                self._budgets.charge(session.project, device_s)

    def add_update(self, request_id: str, folder: Path, sha256: str) -> None:
        """A checkpoint that has everything up to this request is there. `sha256`: of its weights."""
        model, _, number = request_id.rpartition(":")
        self._ledger.add_update(model, int(number), folder, sha256)
        if model in self.registry.models:
            self._files.collect(each.parent for each in self.registry.models[model].forget_loads(int(number)))

    # --- sessions -------------------------------------------------------------------------------------------

    def record_activity(self, session_id: str, project: str, now_s: float) -> None:
        """A session showed life. Raises UnknownIdError, GoneError."""
        self.registry.session(session_id, project).record_activity(now_s)

    def expire(self, now_s: float) -> None:
        """Delete checkpoints whose time is over. `now_s`: seconds since 1970."""
        for each in self.registry.expired(now_s):
            self.take("delete_checkpoint", json.dumps({"path": str(each.path)}).encode(), each.project)

    def end_silent_sessions(self, since_s: float, leaving_since_s: float = -math.inf) -> None:
        """End sessions that showed no life since then, and remove the files of those that ended before.

        `leaving_since_s`: the same for programs that announced their end."""
        self._files.collect_all()
        for session in list(self.registry.sessions.values()):
            limit_s = max(since_s, leaving_since_s) if session.is_leaving else since_s
            if not session.is_over and session.last_active_s < limit_s:
                self.take("finish_session", json.dumps({"session_id": session.id}).encode(), session.project)

    def end_session(self, session: Session) -> None:
        """Give up a session's devices; its checkpoints stay."""
        session.is_over = self._files.have_ended_users = True
        for pipeline in session.pipelines:
            self._host.withdraw(pipeline, self.futures.of_pipeline(pipeline))
            self._host.finish(pipeline)
            self.futures.fail_pipeline(pipeline, f"session {session.id} is over", ERROR)

    def _create_session(self, taken: LoggedRequest, body: bodies.CreateSession) -> dict[str, Any]:
        number = len(self.registry.sessions)
        session_id = f"s{number}-{taken.chosen}"
        name = body.pipeline_name([session.name for session in self.registry.sessions.values()], number)
        self.registry.sessions[session_id] = Session(
            id=session_id,
            project=taken.project,
            name=name,
            hints=read_tags(body.tags),
            user_metadata=body.user_metadata or {},
            last_active_s=_clock_s(taken.at_s),
        )
        return {
            "type": "create_session",
            "session_id": session_id,
            "info_message": f"rlmux: its pipelines are {name}-*",
            "warning_message": next((each.warning for each in self._models.values()), None),
        }

    def _finish_session(self, taken: LoggedRequest, body: bodies.OfSession) -> None:
        session = self.registry.sessions.get(body.session_id)
        if session is not None and not session.is_over:
            self.end_session(session)

    # --- models ---------------------------------------------------------------------------------------------

    def _create_model(self, taken: LoggedRequest, body: bodies.CreateModel) -> None:
        session = self.registry.session(body.session_id, taken.project)
        seed = body.lora_config.seed if body.lora_config else None
        served = find_served(self._models, body.base_model)
        adapter = served.adapter(body.lora_config)
        model = self._add_model(session, body.model_seq_id, served, adapter, seed, body.user_metadata, 1)
        answer = {"type": "create_model", "model_id": model.id}
        self.futures.expect(taken.id, _future(taken, model.pipeline, lambda _: _json(answer)))

    def _add_model(
        self,
        session: Session,
        number: int,
        served: ServedModel,
        adapter: AdapterConfig | None,
        seed: int | None,
        user_metadata: Mapping[str, Any] | None,
        first: int,
    ) -> Model:
        """`first`: number of its first request."""
        pipeline = PipelineId(f"{session.name}-{number}")
        seeds = [each for each in (seed, session.hints.seed, 0) if each is not None]
        model = Model(
            id=model_id(session.id, number),
            session=session,
            number_in_session=number,
            pipeline=pipeline,
            served=served,
            adapter=adapter,
            seed=seeds[0],
            user_metadata=user_metadata,
            folder=self._folder / pipeline,
            order=InOrder(first),
            requested_s=time.time(),
        )
        update = self._ledger.newest_update(model.id)
        self._open(session, pipeline, served.training(pipeline, adapter, model.seed), update and update[1])
        self.registry.models[model.id] = model
        return model

    def _open(self, session: Session, pipeline: PipelineId, config: TrainingConfig, restore_from: Path | None) -> None:
        self._host.open(pipeline, config, self._folder / pipeline, restore_from, session.hints, session.project)
        session.pipelines.append(pipeline)

    def _train(
        self,
        taken: LoggedRequest,
        model: Model,
        seq_id: int,
        request: TrainRequest,
        encode: Callable[[Any], Result],
        when_due: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand over what is due of the model's requests, in their order. `when_due`: called at the request's turn."""
        model.requested_s = taken.at_s
        self.futures.expect(taken.id, _future(taken, model.pipeline, encode))
        update = self._ledger.newest_update(model.id)
        due = _Due(number=seq_id, id=taken.id, request=request, when_due=when_due)
        for each in model.order.put(seq_id, due):
            each.when_due()
            if update is None or each.number > update[0]:
                self._host.train(model.pipeline, each.id, each.request)

    def _forward_backward(self, taken: LoggedRequest, head: LossHead) -> None:
        model = self.registry.model(head.model_id, taken.project)
        update = self._ledger.newest_update(model.id) if taken.sha256 else None
        if taken.sha256 and (update is None or head.seq_id > update[0]):
            raise UserError("its body was emptied (serve.ledger_gb), and the checkpoint that has it is gone")
        request = PackedLoss(
            body=taken.body,
            read=read_or_complain,
            write=write_forward_backward,
            is_forward_only=head.is_forward_only,
            num_tokens=head.num_tokens,
        )
        self._train(taken, model, head.seq_id, request, _protobuf)

    def _optim_step(self, taken: LoggedRequest, body: bodies.OptimStep) -> None:
        model = self.registry.model(body.model_id, taken.project)
        metrics = lambda done: _json({"metrics": {"grad_norm:mean": done.grad_norm}})  # noqa: E731
        self._train(taken, model, body.seq_id, body.step(), metrics, model.count_update)

    def _save_for_sampler(self, taken: LoggedRequest, body: bodies.SaveWeightsForSampler) -> None:
        model = self.registry.model(body.model_id, taken.project)
        file = model.folder / f"sampler-{body.seq_id}.safetensors"
        answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
        when_due: Callable[[], None]
        if body.path is not None:
            path = TinkerPath(model.id, SAMPLER_WEIGHTS, body.path)
            answer["path"] = self.registry.being_saved[file] = str(path)
            when_due = lambda: self._list_once_saved(taken, model, path, file, body)  # noqa: E731
        else:
            number = body.sampling_session_seq_id or 0
            self.registry.being_saved[file] = ""
            answer["sampling_session_id"] = sampler_id(model.session.id, number)
            num_kept = int(taken.chosen or 0)
            when_due = lambda: self._snapshot(model, number, file, num_kept)  # noqa: E731
        self._train(taken, model, body.seq_id, WriteWeights(path=file), lambda _: _json(answer), when_due)

    def _snapshot(self, model: Model, number: int, file: Path, num_kept: int) -> None:
        self.registry.being_saved.pop(file, None)
        origin = (model.number_in_session, model.num_updates)
        made = self.registry.add_sampler(
            model.session, number, model.served, model.pipeline, file, model.seed, None, origin
        )
        model.add_snapshot(made, num_kept)
        self._files.collect([model.folder] if num_kept else [])

    def _save_weights(self, taken: LoggedRequest, body: bodies.SaveWeightsBody) -> None:
        model = self.registry.model(body.model_id, taken.project)
        kind = EXTERNAL_WEIGHTS if taken.path == "save_weights_external" else WEIGHTS
        path = TinkerPath(model.id, kind, body.path)
        folder = model.folder / (taken.chosen or f"weights-{body.path}")  # as a version before chose
        self.registry.being_saved[folder] = str(path)
        answer = {"type": taken.path, "path": str(path)}
        when_due = lambda: self._list_once_saved(taken, model, path, folder, body)  # noqa: E731
        request = SaveState(folder=folder)
        self._train(taken, model, body.seq_id, request, lambda _: _json(answer), when_due)

    def _load_weights(self, taken: LoggedRequest, body: bodies.LoadWeights) -> None:
        checkpoint = self.registry.checkpoint(body.path, taken.project, taken.chosen)
        if body.model_id is not None:
            model, seq_id = self.registry.model(body.model_id, taken.project), body.seq_id or 0
        else:
            session = self.registry.session(body.session_id or "", taken.project)
            source = self.registry.models.get(checkpoint.path.run)
            seed = None if source is None else source.seed
            number, seq_id = body.model_seq_id or 0, 0
            served, adapter = checkpoint.served, checkpoint.adapter
            model = self._add_model(session, number, served, adapter, seed, body.user_metadata, 0)
        answer = {"type": "load_weights", "path": body.path, "model_id": model.id}
        update = self._ledger.newest_update(model.id)
        if update is None or seq_id > update[0]:
            model.loads[seq_id] = checkpoint.folder
        request = LoadState(folder=checkpoint.folder, with_optimizer=body.optimizer)
        when_due = lambda: model.go_on_from(checkpoint)  # noqa: E731
        self._train(taken, model, seq_id, request, lambda _: _json(answer), when_due)

    def _list_once_saved(self, taken: LoggedRequest, model: Model, path: TinkerPath, folder: Path, body: _Save) -> None:
        """List the checkpoint that the model makes now, once it is there."""
        made = model.checkpoint(path, folder, taken.at_s, body.user_metadata)
        checkpoint = made.lasting(taken.at_s, body.ttl_seconds)

        def then(is_saved: bool) -> None:
            self.registry.being_saved.pop(folder, None)
            if is_saved and self.registry.list_checkpoint(checkpoint) is not None:
                self._files.collect([model.folder])

        self.futures.then(taken.id, then)

    def _delete_checkpoint(self, taken: LoggedRequest, body: bodies.OfPath) -> None:
        """What the path named when it was deleted; a save that was under way may have its name by now."""
        checkpoint = self.registry.checkpoints.get(body.path)
        if checkpoint is not None and taken.chosen in ("", checkpoint.folder.name):
            del self.registry.checkpoints[body.path]
            self._files.collect([checkpoint.folder.parent])

    def _set_ttl(self, taken: LoggedRequest, body: bodies.SetTtl) -> None:
        checkpoint = self.registry.checkpoints.get(body.path)
        if checkpoint is not None and taken.chosen == checkpoint.folder.name:
            self.registry.list_checkpoint(checkpoint.lasting(taken.at_s, body.ttl_seconds))

    # --- samplers -------------------------------------------------------------------------------------------

    def _create_sampler(self, taken: LoggedRequest, body: bodies.CreateSamplingSession) -> None:
        session = self.registry.session(body.session_id, taken.project)
        weights, seed, source, path, origin, adapter = None, session.hints.seed or 0, None, None, (-1, 0), None
        if body.model_path is not None:
            checkpoint = self.registry.checkpoint(body.model_path, taken.project, taken.chosen)
            weights, served, path, adapter = checkpoint.weights, checkpoint.served, body.model_path, checkpoint.adapter
            source = self.registry.models.get(checkpoint.path.run)
            if source is not None:
                seed, origin = source.seed, (source.number_in_session, checkpoint.num_updates)
        else:
            served = find_served(self._models, body.base_model or "")
        is_own = source is not None and source.session is session
        pipeline = source.pipeline if is_own and source else self._sampling_pipeline(session, served, adapter)
        number = body.sampling_session_seq_id
        self.registry.add_sampler(session, number, served, pipeline, weights, seed, path, origin)

    def _sampling_pipeline(self, session: Session, served: ServedModel, adapter: AdapterConfig | None) -> PipelineId:
        """The session's pipeline for samples of weights that none of its own models made."""
        key = served.name, adapter
        if key not in session.sampling_pipelines:
            pipeline = PipelineId(f"{session.name}-sampling-{len(session.sampling_pipelines)}")
            self._open(session, pipeline, served.training(pipeline, adapter), None)
            session.sampling_pipelines[key] = pipeline
        return session.sampling_pipelines[key]

    def _sample(self, taken: LoggedRequest, body: bodies.SampleBody) -> None:
        sampler = self.registry.sampler(body.sampling_session_id, taken.project)
        self.futures.expect(taken.id, _future(taken, sampler.pipeline, _protobuf, sampler))
        order, draws = sampler.order(body.seq_id)
        for request_id, each in order.put(body.seq_id, (taken.id, body)):
            number = self._num_samples[sampler.pipeline] = self._num_samples.get(sampler.pipeline, 0) + 1
            key = draws.key(prompt_tokens(each), each.sampling_params.seed)
            if request_id in self.futures:
                request = sample_request(request_id, each, sampler.served, number=number, key=key)
                self._host.sample(sampler.pipeline, request, sampler.weights)


def _clock_s(at_s: float) -> float:
    """The front's clock at a time in seconds since 1970: before a restart, too, a session's silence counts."""
    return time.monotonic() - max(0.0, time.time() - at_s)


def _future(
    taken: LoggedRequest, pipeline: PipelineId, encode: Callable[[Any], Result], sampler: ClientSampler | None = None
) -> PendingFuture:
    return PendingFuture(
        pipeline=pipeline, encode=encode, project=taken.project, num_bytes=len(taken.body), sampler=sampler
    )


def _protobuf(answer: bytes) -> Result:
    """The result of an answer that a worker wrote."""
    return Result(answer, PROTOBUF)


def _json(answer: Mapping[str, Any]) -> Result:
    return Result(json.dumps(answer).encode(), "json")

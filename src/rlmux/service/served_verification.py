"""Whether a Tinker client's model comes out the same alone: its recorded requests, carried out again beside nothing.

    tinker.db ── requests of the client's session ─▶ a front and workers of their own, in a temporary folder
         └── hash after each update, answers ──────────▶ compared step by step

A request goes out once what it names is there: the weights of its sampler, the checkpoint that it loads. Sessions whose
checkpoints the session loads are carried out, too. The weights are compared after every update, and every answer to a
loss and to a sampling request, byte for byte.
"""

from __future__ import annotations

import hashlib
import queue
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmux.config.serve_file import ServeSpec
from rlmux.core.errors import RlmuxError, UserError
from rlmux.core.scheduler import Scheduler
from rlmux.log.folder_lock import FolderLock
from rlmux.policies import make_policy
from rlmux.runtime.checks.replay_verification import Difference, PrintLine, Verdict
from rlmux.runtime.controller import Controller, Listener
from rlmux.runtime.local import local_backend
from rlmux.runtime.machine_probe import describe_machine
from rlmux.runtime.memory.memory_budget import with_machine_memory
from rlmux.service.hosted_lane import served_of
from rlmux.service.model_serving import LEDGER, Serving
from rlmux.service.tinker import bodies
from rlmux.service.tinker.front import TinkerFront
from rlmux.service.tinker.ledger import EMPTIED, Ledger, LoggedRequest
from rlmux.service.tinker.names import TinkerPath

_SKIPPED = ("finish_session", "delete_checkpoint", "set_ttl")
"""Requests that end what is to be carried out again."""
_COMPARED = ("forward_backward", "asample")
"""Requests whose answers are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The recorded requests and results of one model."""

    pipeline: str
    model: str
    requests: Sequence[LoggedRequest]
    """Requests of its session, and of those whose checkpoints that loads, in the order they were taken."""
    hashes: Mapping[int, str]
    """Hash of the weights after each update, by the number of its request, in their order."""
    ledger: Ledger

    def emptied(self) -> str | None:
        """A request whose body or result is not there any more."""
        for each in self.requests:
            result = self.ledger.result(each.id)
            if each.sha256 or (result is not None and result.kind == EMPTIED):
                return each.id
        return None


def verify_served(folder: Path, names: Sequence[str], *, print_line: PrintLine) -> list[Verdict]:
    """Replay the requests of these models, or of all, one model after another.

    Raises UserError, before anything starts, for a server that runs, and for an unknown name.
    """
    spec = served_of(folder)
    with FolderLock.take(folder):
        ledger = Ledger(folder / LEDGER)
        try:
            requests = [each for each in ledger.taken() if each.path not in _SKIPPED]
            model_by_pipeline = _models(requests)
            unknown = [name for name in names if name not in model_by_pipeline]
            if unknown:
                accepted = ", ".join(model_by_pipeline) or "none"
                raise UserError(f"{folder}: no model of a client {unknown[0]!r}; accepted: {accepted}")
            chosen = list(dict.fromkeys(names)) or list(model_by_pipeline)
            records = [_record(name, model_by_pipeline[name], requests, ledger) for name in chosen]
            return [_verify_one(spec, record, print_line) for record in records]
        finally:
            ledger.close()


def _models(requests: Iterable[LoggedRequest]) -> dict[str, str]:
    """Id of every model by the name of its pipeline."""
    name_by_session: dict[str, str] = {}
    found = {}
    for each in requests:
        session, _, rest = each.id.partition(":")
        if each.path == "create_session":
            number = len(name_by_session)
            name = bodies.CreateSession.model_validate_json(each.body).pipeline_name(name_by_session.values(), number)
            name_by_session[f"s{number}-{each.chosen}"] = name
        elif each.path == "create_model" or (each.path == "load_weights" and rest.endswith(":0")):
            model = f"{session}:" + rest.rpartition(":")[0]
            found[f"{name_by_session[session]}-{model.rpartition(':')[2]}"] = model
    return found


def _record(pipeline: str, model: str, requests: Sequence[LoggedRequest], ledger: Ledger) -> _Record:
    sessions = {model.partition(":")[0]}
    for each in reversed(requests):  # a checkpoint is made before it is loaded
        if each.id.partition(":")[0] in sessions and (path := _path_in(each)) is not None:
            sessions.add(TinkerPath.parse(path).run.partition(":")[0])
    kept = [each for each in requests if each.path == "create_session" or each.id.partition(":")[0] in sessions]
    return _Record(pipeline=pipeline, model=model, requests=kept, hashes=ledger.hashes(model), ledger=ledger)


def _path_in(taken: LoggedRequest) -> str | None:
    """The checkpoint that a request needs."""
    if taken.path == "load_weights":
        return bodies.LoadWeights.model_validate_json(taken.body).path
    if taken.path == "create_sampling_session":
        return bodies.CreateSamplingSession.model_validate_json(taken.body).model_path
    return None


def _verify_one(spec: ServeSpec, record: _Record, on_progress: PrintLine) -> Verdict:
    verdict = Verdict(
        pipeline=record.pipeline, num_equal=0, num_steps=len(record.hashes), difference=None, determinism_class=None,
        reason="its client requested no update",
    )  # fmt: skip
    if not record.hashes:
        return verdict
    if (emptied := record.emptied()) is not None:
        return replace(verdict, reason=f"{emptied} was emptied; accepted: what is within serve.ledger_gb, or 0 there")
    machine = describe_machine(spec.cluster)
    cluster = with_machine_memory(spec.cluster, [], machine)
    with tempfile.TemporaryDirectory(prefix="rlmux-verify-") as scratch:
        serving = Serving(spec, Path(scratch))
        again = _Again(serving, record, on_progress)
        backend = local_backend(cluster, Path(scratch))
        backend.connect(serving.inbox)
        try:
            scheduler = Scheduler(cluster, make_policy(spec.policy))
            listeners: list[Listener] = [again.events, again]
            controller = Controller(scheduler, backend, None, listeners, has_news=lambda: not again.is_decided)
            controller.run([], until=lambda: again.is_decided)
        finally:
            backend.close()
    by_sum = {"sha256": again.num_equal}
    return replace(
        verdict, num_equal=again.num_equal, num_equal_by_sum=by_sum, difference=again.difference, reason=again.reason
    )


class _Again:
    """A listener that sends a record's requests, and compares what comes of them; all in the controller's thread."""

    def __init__(self, serving: Serving, record: _Record, on_progress: PrintLine) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._front, self.events = serving.furnish(self._calls.put)
        self._record = record
        self._on_progress = on_progress
        self._next = 0
        self.num_equal = 0
        self.difference: Difference | None = None
        self.reason = ""
        self.is_decided = False

    def update(self, now_s: float, events: object, actions: object, notes: object) -> None:
        while True:
            try:
                self._calls.get_nowait()()
            except queue.Empty:
                break
        self._send()
        self._compare()

    def _send(self) -> None:
        """Every request that is due."""
        requests = self._record.requests
        while self._next < len(requests) and (_is_due(requests[self._next], self._front) or self._is_quiet()):
            try:
                self._front.repeat(requests[self._next])
            except RlmuxError as error:
                self._end(f"{requests[self._next].id}: {error}")
            self._next += 1

    def _is_quiet(self) -> bool:
        """Nothing is under way: what a request waits for will not come."""
        return not self._front.futures.num_pending

    def _compare(self) -> None:
        alone, logged = self._front.hashes(self._record.model), self._record.hashes
        for step, number in list(enumerate(logged, 1))[self.num_equal :]:
            if number not in alone:
                break
            if alone[number] != logged[number]:
                self.difference = Difference(step=step, compared="sha256", logged=logged[number], alone=alone[number])
                self._end()
                return
            self.num_equal += 1
            self._on_progress(f"{self._record.pipeline}: step {step} of {len(logged)} is equal")
        is_sent = self._next == len(self._record.requests)
        if is_sent and self._is_quiet() and len(alone) >= self._num_updates() and not self.is_decided:
            self._compare_answers()
            if self.difference is None and self.num_equal < len(logged):
                missing = list(logged.values())[self.num_equal]
                self.difference = Difference(step=self.num_equal + 1, compared="sha256", logged=missing, alone=None)
            self._end()

    def _num_updates(self) -> int:
        """Updates that were made again; the hash of one comes after its answer."""
        steps = [each.id for each in self._record.requests if each.path == "optim_step"]
        ours = [each for each in steps if each.startswith(f"{self._record.model}:")]
        results = [self._front.futures.result(each) for each in ours]
        return sum(each is not None and not each.is_error for each in results)

    def _compare_answers(self) -> None:
        """The first answer that is another one, as a difference at the step that it belongs to."""
        step, num_answers = 1, 0
        for each in self._record.requests:
            if each.path == "optim_step" and each.id.startswith(f"{self._record.model}:"):
                step += 1
            logged = self._record.ledger.result(each.id)
            if each.path not in _COMPARED or logged is None or logged.is_error:
                continue
            alone = self._front.futures.result(each.id)
            num_answers += 1
            if alone != logged and self.difference is None:
                shas = [hashlib.sha256(body).hexdigest() for body in (logged.body, alone.body if alone else b"")]
                self.difference = Difference(step=step, compared="sha256", logged=shas[0], alone=shas[1])
                self.reason = f"the answer to {each.id}"
        if self.difference is None:
            self._on_progress(f"{self._record.pipeline}: {num_answers} answers are equal")

    def _end(self, reason: str = "") -> None:
        self.is_decided = True
        self.reason = self.reason or reason


def _is_due(taken: LoggedRequest, front: TinkerFront) -> bool:
    """What the request names is there."""
    path = _path_in(taken)
    if path is not None:
        return front.registry.was_saved(path, taken.chosen)
    if taken.path != "asample":
        return True
    sampler = front.registry.samplers.get(bodies.SampleBody.model_validate_json(taken.body).sampling_session_id)
    return sampler is not None and (sampler.weights is None or sampler.weights.exists())

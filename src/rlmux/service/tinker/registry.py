"""State of a front: sessions, their models, samplers and checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rlmux.core.errors import RlmuxError, UserError
from rlmux.core.model import PipelineId
from rlmux.rl.config import AdapterConfig
from rlmux.service.tinker.model_catalog import ServedModel
from rlmux.service.tinker.names import SAMPLER_WEIGHTS, TinkerPath, sampler_id
from rlmux.service.tinker.reorder_buffer import InOrder
from rlmux.service.tinker.rng_keys import Draws
from rlmux.service.tinker.session_tags import Hints


class UnknownIdError(UserError):
    """An id that this server never gave, or gave to another project."""


class GoneError(RlmuxError):
    """A session that is over, with everything in it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One client program."""

    id: str
    project: str
    name: str
    """First part of the names of its pipelines."""
    hints: Hints
    user_metadata: Mapping[str, Any]
    last_active_s: float
    """Time of the last sign of life, on the front's clock."""
    is_over: bool = False
    is_leaving: bool = False
    """Whether its program announced its end, without a heartbeat since."""
    pipelines: list[PipelineId] = field(default_factory=list)
    sampling_pipelines: dict[tuple[str, AdapterConfig | None], PipelineId] = field(default_factory=dict)
    """Pipelines for weights that none of its own models made, by the served model's name and the weights' adapter."""
    num_samplers_by_origin: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Samplers by the model that made their weights, and its updates until then."""

    def record_activity(self, now_s: float) -> None:
        """Record a heartbeat. A program that announced its end may continue, for example after a caught error."""
        self.last_active_s, self.is_leaving = max(self.last_active_s, now_s), False

    def leave(self, now_s: float) -> None:
        """Record that its program announced its end."""
        self.last_active_s, self.is_leaving = max(self.last_active_s, now_s), True


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """One model in training."""

    id: str
    session: Session
    number_in_session: int
    pipeline: PipelineId
    served: ServedModel
    adapter: AdapterConfig | None
    """What is trained of it; None: all its parameters."""
    seed: int
    user_metadata: Mapping[str, Any] | None
    folder: Path
    order: InOrder[Any]
    requested_s: float
    """Time of its last request, in seconds since 1970."""
    num_updates: int = 0
    """Requested optimizer steps, including the loaded checkpoint's."""
    loads: dict[int, Path] = field(default_factory=dict)
    """Checkpoint folders that requests load, by their number: until an update that is behind them is kept."""
    snapshots: list[ClientSampler] = field(default_factory=list)
    """Samplers of its weights without a name that are kept."""

    def forget_loads(self, number: int) -> list[Path]:
        """An update that has everything up to this request is kept: loads until then are not done again. Returns their
        folders."""
        return [self.loads.pop(each) for each in list(self.loads) if each <= number]

    def add_snapshot(self, sampler: ClientSampler, num_kept: int) -> None:
        """A sampler of its weights without a name; only the newest so many are kept, or all for 0."""
        self.snapshots.append(sampler)
        while num_kept and len(self.snapshots) > num_kept:
            self.snapshots.pop(0).num_kept = num_kept

    def count_update(self) -> None:
        self.num_updates += 1

    def checkpoint(
        self, path: TinkerPath, folder: Path, made_s: float, user_metadata: Mapping[str, str] | None
    ) -> ClientCheckpoint:
        """What a save makes of it now; fields as in `ClientCheckpoint`."""
        return ClientCheckpoint(
            path=path,
            folder=folder,
            made_s=made_s,
            served=self.served,
            adapter=self.adapter,
            project=self.session.project,
            user_metadata=user_metadata,
            num_updates=self.num_updates,
        )

    def go_on_from(self, checkpoint: ClientCheckpoint) -> None:
        self.num_updates = checkpoint.num_updates


@dataclass(slots=True, kw_only=True, eq=False)
class ClientSampler:
    """One set of weights to sample with, for life."""

    id: str
    session: Session
    pipeline: PipelineId
    served: ServedModel
    path: str | None
    """The checkpoint's name for clients; None for weights without one."""
    weights: Path | None
    """File of the weights; None: the model's first."""
    seed: int
    origin: str
    """See rng_keys.py."""
    num_kept: int = 0
    """Snapshots of its model that were kept when it was no more among them; 0: it is."""
    _order_by_range: dict[int, InOrder[Any]] = field(default_factory=dict)
    _draws_by_range: dict[int, Draws] = field(default_factory=dict)

    _RANGE = 10**9
    """Numbers that a copy of a sampling client begins at a multiple of."""

    @property
    def is_gone(self) -> bool:
        """Its session is over, or newer snapshots took its place: it takes no request."""
        return self.session.is_over or self.num_kept > 0

    def order(self, seq_id: int) -> tuple[InOrder[Any], Draws]:
        """Order and draws of the requests that a number is among: those of one copy of the client."""
        first = seq_id - seq_id % ClientSampler._RANGE
        if first not in self._order_by_range:
            self._order_by_range[first] = InOrder(first)
            self._draws_by_range[first] = Draws(model_seed=self.seed, origin=f"{self.origin} {first}")
        return self._order_by_range[first], self._draws_by_range[first]


@dataclass(slots=True, kw_only=True, frozen=True)
class ClientCheckpoint:
    """Weights that a client gave a name."""

    path: TinkerPath
    folder: Path
    """A checkpoint folder, or the file of a sampler's weights."""
    made_s: float
    """Seconds since 1970."""
    served: ServedModel
    adapter: AdapterConfig | None
    """The adapter that the weights are of; None: they are of a whole model."""
    project: str
    user_metadata: Mapping[str, str] | None
    num_updates: int
    """Optimizer steps that made the weights."""
    expires_s: float | None = None
    """Time at which it is deleted, in seconds since 1970; None: never by itself."""

    def lasting(self, from_s: float, ttl_s: int | None) -> ClientCheckpoint:
        """The checkpoint, to be deleted so many seconds after a time; None: never."""
        return replace(self, expires_s=None if ttl_s is None else from_s + ttl_s)

    @property
    def weights(self) -> Path:
        """The file that a sampler reads."""
        name = "model.safetensors" if self.adapter is None else "adapter_model.safetensors"
        return self.folder if self.path.kind == SAMPLER_WEIGHTS else self.folder / name

    @property
    def size_bytes(self) -> int:
        files = [self.folder] if self.folder.is_file() else self.folder.glob("*")
        return sum(file.stat().st_size for file in files if file.is_file())


Kept = TypeVar("Kept", Model, ClientSampler)


@dataclass(slots=True)
class Registry:
    """Everything by its id; each query is for one project, to which others' things do not exist."""

    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    checkpoints: dict[str, ClientCheckpoint] = field(default_factory=dict)
    """Listed checkpoints in request order: a path names its newest save until that is deleted."""
    being_saved: dict[Path, str] = field(default_factory=dict)
    """Files that saves are to write, with the path they are to be listed under; empty for a snapshot without one."""
    _next_expiry_s: float = math.inf
    """No checkpoint expires before."""
    _saved: dict[str, dict[str, ClientCheckpoint]] = field(default_factory=dict)
    """Everything that was ever listed, by path and by the name of its file."""

    def list_checkpoint(self, checkpoint: ClientCheckpoint) -> ClientCheckpoint | None:
        """Have its path name it from now on; returns what the path named before."""
        path = str(checkpoint.path)
        before, self.checkpoints[path] = self.checkpoints.get(path), checkpoint
        self.checkpoints = dict(sorted(self.checkpoints.items(), key=lambda entry: entry[1].made_s))
        self._saved.setdefault(path, {})[checkpoint.folder.name] = checkpoint
        self._next_expiry_s = min(self._next_expiry_s, _expiry_s(checkpoint))
        return before

    def expired(self, now_s: float) -> list[ClientCheckpoint]:
        """Checkpoints that are listed and whose time is over."""
        if now_s < self._next_expiry_s:
            return []
        found = [each for each in self.checkpoints.values() if _expiry_s(each) <= now_s]
        later = [_expiry_s(each) for each in self.checkpoints.values() if _expiry_s(each) > now_s]
        self._next_expiry_s = min(later, default=math.inf)
        return found

    def add_sampler(
        self,
        session: Session,
        number: int,
        served: ServedModel,
        pipeline: PipelineId,
        weights: Path | None,
        seed: int,
        path: str | None,
        origin: tuple[int, int],
    ) -> ClientSampler:
        """`origin`: number of the model in its session, -1 for a base model; updates that made the weights."""
        occurrence = session.num_samplers_by_origin[origin]
        session.num_samplers_by_origin[origin] += 1
        its_id = sampler_id(session.id, number)
        made = self.samplers[its_id] = ClientSampler(
            id=its_id,
            session=session,
            pipeline=pipeline,
            served=served,
            path=path,
            weights=weights,
            seed=seed,
            origin=f"{origin[0]} {origin[1]} {occurrence}",
        )
        return made

    def open_sessions(self, project: str) -> list[Session]:
        """Sessions of a project that are not over."""
        return [each for each in self.sessions.values() if each.project == project and not each.is_over]

    def models_of(self, project: str) -> list[Model]:
        """Models of a project, in the order they were made."""
        return [each for each in self.models.values() if each.session.project == project]

    def session(self, session_id: str, project: str) -> Session:
        """Raises UnknownIdError, and GoneError for one that is over."""
        session = self.sessions.get(session_id)
        if session is None or session.project != project:
            raise UnknownIdError(f"no session {session_id!r}")
        if session.is_over:
            raise GoneError(f"session {session_id} is over; its checkpoints are kept")
        return session

    def model(self, model_id: str, project: str) -> Model:
        """Raises UnknownIdError, and GoneError for one whose session is over."""
        return _present(self.models.get(model_id), "model", model_id, project)

    def sampler(self, sampler_id: str, project: str) -> ClientSampler:
        """Raises UnknownIdError, and GoneError for one whose session is over, or that newer snapshots took the place
        of."""
        sampler = _present(self.samplers.get(sampler_id), "sampler", sampler_id, project)
        if sampler.is_gone:
            raise GoneError(
                f"sampler {sampler_id} is gone: the newest {sampler.num_kept} snapshots of a model are kept "
                "(serve.keep_snapshots); accepted: one of those, or weights saved under a name"
            )
        return sampler

    def file_named(self, path: str | None) -> str:
        """Name of the file that the path names now; empty where it names nothing."""
        found = self.checkpoints.get(path or "")
        return "" if found is None else found.folder.name

    def was_saved(self, path: str, file: str) -> bool:
        """Whether a checkpoint was listed under the path with this file; with any, where the file is empty."""
        return file in self._saved.get(path, {}) if file else path in self.checkpoints

    def checkpoint(self, path: str, project: str, file: str = "") -> ClientCheckpoint:
        """What the path names, or named when its file was this one. Raises UserError for a path that is none,
        UnknownIdError for one that names nothing."""
        key = str(TinkerPath.parse(path))
        found = self._saved.get(key, {}).get(file) if file else self.checkpoints.get(key)
        if found is None or found.project != project:
            raise UnknownIdError(f"no checkpoint {path!r}")
        return found


def _expiry_s(checkpoint: ClientCheckpoint) -> float:
    return math.inf if checkpoint.expires_s is None else checkpoint.expires_s


def _present(found: Kept | None, what: str, its_id: str, project: str) -> Kept:
    if found is None or found.session.project != project:
        raise UnknownIdError(f"no {what} {its_id!r}")
    if found.session.is_over:
        raise GoneError(f"session {found.session.id} is over; its checkpoints are kept")
    return found

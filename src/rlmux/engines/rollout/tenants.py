"""Several pipelines' rollouts in one engine: adapters of one base, decoded in one batch.

    TenantEngine "a" ─┐  submit, reply, take_partials, load, offload: its own trajectories and state
    TenantEngine "b" ─┼─▶ SharedEngine ──▶ SlotRolloutEngine, with the slots of the loaded tenants
    run(["a", "b"]) ──┘  one chunk of those named; the others rest

A tenant is one pipeline, from `join` to `leave`. Its trajectories carry its name in the engine and no name outside.
The engine is on the device while any tenant is loaded.

Invariant: a tenant samples what an engine of its own samples, to the same bits; the trajectories of a tenant advance in
chunks that name it, and in no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlmux.core.errors import PipelineError
from rlmux.engines.rollout.request_limits import RequestLimits
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import AdapterConfig
from rlmux.rl.types import ChunkReport, PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply


class SharedEngine:
    """An engine and its tenants."""

    def __init__(self, engine: SlotRolloutEngine) -> None:
        """`engine`: loaded and unused, without `kv_tokens`."""
        self.engine = engine
        engine.remove_adapter("")
        self._tenants: dict[str, None] = {}
        self._loaded: dict[str, None] = {}
        """Tenants with a state on the device."""
        self._departed: list[str] = []
        """Tenants that left while the engine was offloaded."""
        self._num_fitted = 1
        """Tenants whose slots the engine has."""

    def join(self, name: str, adapter: AdapterConfig, *, staleness: int, is_single_turn: bool) -> TenantEngine:
        """Serve a pipeline, whose state is on the device, from now on."""
        self.engine.load()
        self._remove_departed()
        self.engine.add_adapter(name, adapter, staleness=staleness, is_single_turn=is_single_turn)
        self._tenants[name] = self._loaded[name] = None
        try:
            self._fit_slots()
        except RuntimeError:  # no memory for its slots
            self.leave(name)
            raise
        return TenantEngine(self, name)

    def leave(self, name: str) -> None:
        """Stop serving a pipeline, and drop its trajectories."""
        self.engine.take_partials(self.engine.unfinished_of(name), with_kv=False)
        del self._tenants[name]
        self._departed.append(name)
        if self.is_loaded(name):
            self.offload(name, None)
        if self._loaded:
            self._remove_departed()
            self._fit_slots()

    def is_loaded(self, name: str) -> bool:
        """Whether the tenant's state is on the device."""
        return name in self._loaded

    def state_bytes(self, name: str) -> int:
        """Device bytes of a loaded tenant: its adapter, and its part of the slots."""
        return self.engine.adapter_bytes(name) + self.engine.slot_bytes() // self.num_loaded

    @property
    def num_loaded(self) -> int:
        """Tenants with a state on the device."""
        return len(self._loaded)

    def load(self, name: str) -> None:
        """Bring a tenant's state to the device. Does nothing when already there."""
        self.engine.load()
        self._loaded[name] = None
        self._remove_departed()
        self._fit_slots()

    def offload(self, name: str, spill_to: Path | None) -> None:
        """Take a tenant's state off the device: its slots, and the base with the last one."""
        self._loaded.pop(name, None)
        if self._loaded:
            self.engine.rest([name])
            self._fit_slots()
        else:
            self.engine.offload(spill_to=spill_to)

    def run(
        self, names: Sequence[str], *, max_decode_steps: int, max_seconds: float
    ) -> Mapping[str, ChunkReport | PipelineError]:
        """One chunk of these tenants' trajectories: a report or an error for each."""
        reports = self.engine.run_chunk_of(names, max_decode_steps=max_decode_steps, max_seconds=max_seconds)
        return {
            name: report if isinstance(report, PipelineError) else _without_name(report)
            for name, report in reports.items()
        }

    def _remove_departed(self) -> None:
        for name in self._departed:
            self.engine.remove_adapter(name)
            self._num_fitted = 0  # no slot keeps what it held
        self._departed = []

    def _fit_slots(self) -> None:
        """Have the slots of the loaded tenants."""
        if self._num_fitted != len(self._loaded):
            self.engine.resize(len(self._loaded))
            self._num_fitted = len(self._loaded)


class TenantEngine:
    """The rollout engine (`protocol`) of one tenant."""

    def __init__(self, shared: SharedEngine, name: str) -> None:
        self._shared, self._engine, self._name = shared, shared.engine, name

    @property
    def is_schedule_exact(self) -> bool:
        return self._engine.is_schedule_exact

    @property
    def version(self) -> int:
        return self._engine.version_of(self._name)

    @property
    def limits(self) -> RequestLimits:
        return self._engine.limits

    @property
    def is_unused(self) -> bool:
        return self._shared.is_loaded(self._name) and not self.num_unfinished

    @property
    def num_unfinished(self) -> int:
        return len(self._engine.unfinished_of(self._name))

    def submit(self, requests: Sequence[TrajectoryRequest]) -> None:
        self._engine.submit([replace(request, id=self._named(request.id)) for request in requests])

    def continue_from(self, partials: Sequence[PartialTrajectory]) -> None:
        self._engine.continue_from([_with_id(partial, self._named(partial.request.id)) for partial in partials])

    def reply(self, replies: Sequence[TurnReply], released: Sequence[TrajectoryId]) -> None:
        named = [
            replace(
                reply,
                id=self._named(reply.id),
                context=None if reply.context is None else _with_id(reply.context, self._named(reply.id)),
            )
            for reply in replies
        ]
        self._engine.reply(named, [self._named(id) for id in released])

    def take_partials(self, ids: Sequence[TrajectoryId] | None, *, with_kv: bool) -> list[PartialTrajectory]:
        named = self._engine.unfinished_of(self._name) if ids is None else [self._named(id) for id in ids]
        taken = self._engine.take_partials(named, with_kv=with_kv)
        return [_with_id(partial, _nameless(partial.request.id)) for partial in taken]

    def run_chunk(self, *, max_decode_steps: int, max_seconds: float) -> ChunkReport:
        """A chunk of this tenant alone. Raises PipelineError for a log-probability that is not finite."""
        reports = self._shared.run([self._name], max_decode_steps=max_decode_steps, max_seconds=max_seconds)
        report = reports[self._name]
        if isinstance(report, PipelineError):
            raise report
        return report

    def load_weights(self, path: Path, version: int) -> None:
        self._engine.load_weights(path, version, self._name)

    def offload(self, *, spill_to: Path | None = None) -> None:
        if self._shared.is_loaded(self._name):
            self._shared.offload(self._name, spill_to)

    def load(self) -> None:
        self._shared.load(self._name)

    def resident_bytes(self) -> int:
        """Device bytes of all tenants while this one is loaded, else of its adapter."""
        if self._shared.is_loaded(self._name):
            return self._engine.resident_bytes()
        return self._engine.adapter_bytes(self._name)

    def _named(self, id: TrajectoryId) -> TrajectoryId:
        return id._replace(adapter=self._name)


def _nameless(id: TrajectoryId) -> TrajectoryId:
    return id._replace(adapter="")


def _with_id(partial: PartialTrajectory, id: TrajectoryId) -> PartialTrajectory:
    return replace(partial, request=replace(partial.request, id=id))


def _without_name(report: ChunkReport) -> ChunkReport:
    return replace(
        report,
        finished=[replace(turn, id=_nameless(turn.id)) for turn in report.finished],
        progress={_nameless(id): count for id, count in report.progress.items()},
    )

"""A rollout shard: one device's part of a step's rollout, pending and done.

to_submit ─┐                                            ┌─ finished turns ──▶ env worker
partials  ─┼─ take_inputs ──▶ chunk ──▶ rollout worker ─┤
replies   ─┤                                            └─ unfinished: until the env worker ends them,
released  ─┤                                                           or a race cuts them
to_cut    ─┘

Shards of an interruptible rollout have one leg after another: begin_leg ──▶ chunks ──▶ (hands_back) ──▶ is_back ──▶ ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rlmux.rl.types import ChunkReport, PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply


class Moved(TypedDict):
    """What a shard's migration moved, as `TrajectoriesMigrated` has it."""

    num_trajectories: int
    num_begun: int
    tokens: int
    kv_bytes: int


class ChunkInputs(TypedDict):
    """A chunk's input for its rollout worker."""

    requests: Sequence[TrajectoryRequest]
    partials: Sequence[PartialTrajectory]
    replies: Sequence[TurnReply]
    released: Sequence[TrajectoryId]
    cut: Sequence[TrajectoryId]
    hands_back: bool


@dataclass(slots=True, eq=False)
class LiveShard:
    """The trajectories of one step that one device samples."""

    step: int
    to_submit: list[TrajectoryRequest] = field(default_factory=list)
    partials: list[PartialTrajectory] = field(default_factory=list)
    replies: list[TurnReply] = field(default_factory=list)
    released: list[TrajectoryId] = field(default_factory=list)
    to_cut: list[TrajectoryId] = field(default_factory=list)
    """Trajectories that its worker is to drop."""
    unfinished: dict[TrajectoryId, TrajectoryRequest] = field(default_factory=dict)
    """Requests of unfinished trajectories, which the successor of a lost worker repeats."""
    is_begun: bool = False
    """Whether its worker got any of its trajectories."""
    is_lost: bool = False
    """Whether its worker died; its trajectories restart elsewhere, and replies to it are dropped."""
    migrated_to: dict[TrajectoryId, LiveShard] = field(default_factory=dict)
    """Target of each unfinished trajectory that migrated."""
    heir: LiveShard | None = None
    """Target of what else may come for it; None while it has not migrated."""
    is_waiting_for_env: bool = False
    """Whether it is paused until an environment replies."""
    made: dict[TrajectoryId, int] = field(default_factory=dict)
    """Tokens of unfinished trajectories of an interruptible rollout, as last reported by or sent to its worker."""
    has_left: bool = False
    """Whether its worker holds unfinished trajectories, by its last report."""
    hands_back: bool = False
    """Whether its worker is to return all unfinished trajectories with the next chunk."""
    is_back: bool = False
    """Whether no trajectory of the leg is left here or on its worker."""
    is_over: bool = False
    """End the step's rollout."""
    has_finished: bool = False
    """Whether its order finished or it migrated away; only a migrating shard gives it work then."""

    @property
    def has_input(self) -> bool:
        return bool(self.to_submit or self.partials or self.replies or self.released or self.to_cut or self.hands_back)

    def holder(self, id: TrajectoryId) -> LiveShard:
        """The shard that holds this trajectory of its own now: itself, or the last target of its migrations."""
        shard = self
        while shard.heir is not None:
            shard = shard.migrated_to.get(id, shard.heir)
        return shard

    def add(self, request: TrajectoryRequest) -> None:
        self.to_submit.append(request)
        self.unfinished[request.id] = request

    def take_inputs(self) -> ChunkInputs:
        """Remove and return its worker's next input."""
        inputs = ChunkInputs(
            requests=self.to_submit,
            partials=self.partials,
            replies=self.replies,
            released=self.released,
            cut=self.to_cut,
            hands_back=self.hands_back,
        )
        self.has_left |= bool(self.to_submit or self.partials)
        self.to_submit, self.partials, self.replies, self.released, self.to_cut = [], [], [], [], []
        self.is_begun = True
        return inputs

    def begin_leg(self, requests: Sequence[TrajectoryRequest], partials: Sequence[PartialTrajectory]) -> None:
        """Begin the next leg of an interruptible rollout with these trajectories."""
        self.to_submit, self.partials = list(requests), list(partials)
        self.unfinished = {request.id: request for request in (*(partial.request for partial in partials), *requests)}
        self.made = {partial.request.id: len(partial.tokens) for partial in partials}
        self.is_begun = self.is_back = False

    def drop_waiting(self) -> Sequence[PartialTrajectory]:
        """Drop, after a leg, trajectories that its worker did not get. Returns those with tokens."""
        partials, self.partials, self.to_submit = self.partials, [], []
        return partials

    def end_leg(self) -> None:
        """Whether no trajectory of the leg is left here or on its worker."""
        self.unfinished, self.made = {}, {}
        self.has_left, self.hands_back, self.is_back = False, False, True

    def note_chunk(self, report: ChunkReport) -> None:
        """Record what its worker holds of an interruptible rollout."""
        self.has_left = report.num_active + report.num_waiting > 0
        self.made.update((id, num) for id, num in report.progress.items() if id in self.unfinished)

    def end(self, id: TrajectoryId) -> None:
        """End a trajectory of a plan clock: its worker no longer holds it."""
        self.unfinished.pop(id, None)
        self.made.pop(id, None)
        if id in self.to_cut:
            self.to_cut.remove(id)

    def cut(self, is_lost: Callable[[TrajectoryId], bool]) -> None:
        """Drop unfinished trajectories that a race has lost, on its worker with the next chunk."""
        lost = [id for id in self.unfinished if is_lost(id)]
        if not lost:
            return
        here = {*(request.id for request in self.to_submit), *(partial.request.id for partial in self.partials)}
        self.to_submit = [request for request in self.to_submit if not is_lost(request.id)]
        self.partials = [partial for partial in self.partials if not is_lost(partial.request.id)]
        for id in lost:
            del self.unfinished[id]
            if id not in here:
                self.to_cut.append(id)

    def migrate_to(self, targets: Sequence[LiveShard], partials: Sequence[PartialTrajectory]) -> Moved:
        """Hand over all trajectories, `partials` from its worker: each to the target that has the fewest by then, those
        of a prompt that have not begun together where there are prompts enough. Returns what moved."""
        partials = [partial for partial in partials if partial.request.id in self.unfinished]  # not cut meanwhile
        begun = [*partials, *self.partials]
        self.heir = targets[0]
        self._assign([partial.request.id for partial in begun], targets)
        for partial in begun:
            target = self.migrated_to[partial.request.id]
            target.partials.append(partial)
            target.made[partial.request.id] = len(partial.tokens)
        for request in self.to_submit:
            self.migrated_to[request.id].to_submit.append(request)
        for reply in self.replies:
            self.migrated_to[reply.id].replies.append(reply)
        for id in self.released:
            self.migrated_to[id].released.append(id)
        for target in targets:
            taken = {id: request for id, request in self.unfinished.items() if self.migrated_to[id] is target}
            target.unfinished.update(taken)
            target.is_back, target.has_finished = target.is_back and not taken, False
        return Moved(
            num_trajectories=len(begun) + len(self.to_submit),
            num_begun=len(begun),
            tokens=sum(len(partial.request.prompt_tokens) + len(partial.tokens) for partial in begun),
            kv_bytes=sum(len(partial.kv) for partial in begun if partial.kv is not None),
        )

    def _assign(self, begun: Sequence[TrajectoryId], targets: Sequence[LiveShard]) -> None:
        """Decide where each unfinished trajectory goes: begun ones one by one, others by prompt."""
        fresh = dict.fromkeys(request.id[:2] for request in self.to_submit)
        by_prompt = len(fresh) >= len(targets)
        groups: dict[tuple[object, ...], list[TrajectoryId]] = {(id,): [id] for id in begun}
        for id in dict.fromkeys([*self.unfinished, *(reply.id for reply in self.replies), *self.released]):
            if (id,) not in groups:
                groups.setdefault(id[:2] if by_prompt and id[:2] in fresh else (id,), []).append(id)
        loads = [len(target.unfinished) for target in targets]
        for group in groups.values():
            least = loads.index(min(loads))
            loads[least] += len(group)
            self.migrated_to.update(dict.fromkeys(group, targets[least]))

    def restarted(self, begun_from: Callable[[TrajectoryId], PartialTrajectory | None] = lambda _: None) -> LiveShard:
        """The shard of its worker's successor: unfinished trajectories, from the start of the step or leg."""
        self.is_lost = True
        begun = {id: partial for id in self.unfinished if (partial := begun_from(id)) is not None}
        return LiveShard(
            self.step,
            to_submit=[request for id, request in self.unfinished.items() if id not in begun],
            partials=list(begun.values()),
            unfinished=self.unfinished,
            made={id: len(partial.tokens) for id, partial in begun.items()},
            is_back=self.is_back,
            is_over=self.is_over,
            has_finished=self.has_finished,
        )

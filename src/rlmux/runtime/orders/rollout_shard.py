"""A rollout shard: what one device has to do, and has done, of a step's rollout.

to_submit ─┐                                            ┌─ finished turns ──▶ env worker
partials  ─┼─ take_inputs ──▶ chunk ──▶ rollout worker ─┤
replies   ─┤                                            └─ unfinished: until the env worker says that they are over,
released  ─┤                                                           or a race cuts them
to_cut    ─┘

Of an interruptible rollout a shard has one leg after another: begin_leg ──▶ chunks ──▶ (hands_back) ──▶ is_back ──▶ ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rlmux.rl.types import ChunkReport, PartialTrajectory, TrajectoryId, TrajectoryRequest, TurnReply


class ChunkInputs(TypedDict):
    """What a chunk hands to its rollout worker before it decodes."""

    requests: Sequence[TrajectoryRequest]
    partials: Sequence[PartialTrajectory]
    replies: Sequence[TurnReply]
    released: Sequence[TrajectoryId]
    cut: Sequence[TrajectoryId]
    hands_back: bool


@dataclass(slots=True, eq=False)
class RolloutShard:
    """The trajectories of one step that one device samples."""

    step: int
    to_submit: list[TrajectoryRequest] = field(default_factory=list)
    partials: list[PartialTrajectory] = field(default_factory=list)
    replies: list[TurnReply] = field(default_factory=list)
    released: list[TrajectoryId] = field(default_factory=list)
    to_cut: list[TrajectoryId] = field(default_factory=list)
    """Trajectories of its worker that are not wanted any more."""
    unfinished: dict[TrajectoryId, TrajectoryRequest] = field(default_factory=dict)
    """Requests whose trajectories the env worker has not called over: what a lost worker's successor does again."""
    is_begun: bool = False
    """Its worker was given some of it."""
    is_lost: bool = False
    """Its worker died: replies to it are for trajectories that begin anew elsewhere."""
    migrated_to: RolloutShard | None = None
    is_waiting_for_env: bool = False
    """It was paused with nothing to compute until an environment replies."""
    made: dict[TrajectoryId, int] = field(default_factory=dict)
    """Tokens of unfinished trajectories, in an interruptible rollout: as its worker last told, or got them."""
    has_left: bool = False
    """Its worker holds unfinished trajectories of it, as far as it told."""
    hands_back: bool = False
    """Its worker is to give back all that is unfinished, with the next chunk."""
    is_back: bool = False
    """Nothing of the leg is left here or on its worker."""
    is_over: bool = False
    """The step's rollout is over."""
    has_finished: bool = False
    """Its order has finished, or it migrated away: it gets nothing any more, unless a shard migrates to it."""

    @property
    def has_input(self) -> bool:
        return bool(self.to_submit or self.partials or self.replies or self.released or self.to_cut or self.hands_back)

    @property
    def holder(self) -> RolloutShard:
        """The shard that has its trajectories now: itself, or the last of those it migrated to."""
        shard = self
        while shard.migrated_to is not None:
            shard = shard.migrated_to
        return shard

    def add(self, request: TrajectoryRequest) -> None:
        self.to_submit.append(request)
        self.unfinished[request.id] = request

    def take_inputs(self) -> ChunkInputs:
        """All that its worker is to be given next; the shard keeps none of it."""
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
        """What the device may sample in the next leg of an interruptible rollout."""
        self.to_submit, self.partials = list(requests), list(partials)
        self.unfinished = {one.id: one for one in (*(one.request for one in partials), *requests)}
        self.made = {one.request.id: len(one.tokens) for one in partials}
        self.is_begun = self.is_back = False

    def give_up_waiting(self) -> Sequence[PartialTrajectory]:
        """What a leg that is over has no use for: all that its worker was not given. Returns what has tokens."""
        partials, self.partials, self.to_submit = self.partials, [], []
        return partials

    def end_leg(self) -> None:
        """Nothing of the leg is left here or on its worker."""
        self.unfinished, self.made = {}, {}
        self.has_left, self.hands_back, self.is_back = False, False, True

    def note_chunk(self, report: ChunkReport) -> None:
        """What its worker holds of an interruptible rollout."""
        self.has_left = report.num_active + report.num_waiting > 0
        self.made.update((id, num) for id, num in report.progress.items() if id in self.unfinished)

    def end(self, id: TrajectoryId) -> None:
        """A trajectory that a plan clock follows is over: its worker has it no more."""
        self.unfinished.pop(id, None)
        self.made.pop(id, None)
        if id in self.to_cut:
            self.to_cut.remove(id)

    def cut(self, is_lost: Callable[[TrajectoryId], bool]) -> None:
        """Give up the unfinished trajectories that a race has lost: its worker is told with the next chunk."""
        lost = [id for id in self.unfinished if is_lost(id)]
        if not lost:
            return
        here = {*(one.id for one in self.to_submit), *(one.request.id for one in self.partials)}
        self.to_submit = [one for one in self.to_submit if not is_lost(one.id)]
        self.partials = [one for one in self.partials if not is_lost(one.request.id)]
        for id in lost:
            del self.unfinished[id]
            if id not in here:
                self.to_cut.append(id)

    def migrate_to(self, target: RolloutShard, partials: Sequence[PartialTrajectory]) -> int:
        """Hand over everything, `partials` being what its worker held. Returns the number of trajectories."""
        partials = [one for one in partials if one.request.id in self.unfinished]  # none that was cut meanwhile
        num_trajectories = len(partials) + len(self.partials) + len(self.to_submit)
        target.partials += [*partials, *self.partials]
        target.to_submit += self.to_submit
        target.replies += self.replies
        target.released += self.released
        target.unfinished.update(self.unfinished)
        target.made.update({one.request.id: len(one.tokens) for one in (*partials, *self.partials)})
        target.is_back, target.has_finished = target.is_back and not self.unfinished, False
        self.migrated_to = target
        return num_trajectories

    def begun_anew(
        self, begun_from: Callable[[TrajectoryId], PartialTrajectory | None] = lambda _: None
    ) -> RolloutShard:
        """The shard of its worker's successor: all that is unfinished, from the start, or from where its leg began."""
        self.is_lost = True
        begun = {id: partial for id in self.unfinished if (partial := begun_from(id)) is not None}
        return RolloutShard(
            self.step,
            to_submit=[request for id, request in self.unfinished.items() if id not in begun],
            partials=list(begun.values()),
            unfinished=self.unfinished,
            made={id: len(partial.tokens) for id, partial in begun.items()},
            is_back=self.is_back,
            is_over=self.is_over,
            has_finished=self.has_finished,
        )

"""An interruptible rollout: what devices sample and keep in each leg, and what each step trains on.

    begin_step ──▶ begin_leg ──▶ requests, partials ──▶ shards ── chunks ──▶ take ──▶ turns of the step's batch
                       ▲                                   │ leg over: all unfinished are handed back
                       └── end_leg: cut to their tokens at the leg's last tick ◀──┘

The clock decides (rl/prompts/epoch_clock.py). Tokens beyond the end of a leg are dropped, and so is KV: each leg begins
with one prefill of its trajectories' tokens, under its weights, whatever happened to the devices before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlmux.rl.config import TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.rl.prompts.backlog import Backlog, SampledTokens
from rlmux.rl.prompts.epoch_clock import EpochClock, EpochSizes
from rlmux.rl.types import FinishedTurn, PartialTrajectory, TrajectoryId, TrajectoryRequest
from rlmux.runtime.workers.worker_calls import StepOver


class RolloutEpochs:
    """One pipeline's interruptible rollout, across steps and independent of devices.

    Invariant: between two legs exactly the trajectories that have ended or have a slot have tokens here.
    """

    def __init__(self, config: TrainingConfig, backlog: Backlog, origin: Origin | None) -> None:
        self.clock = EpochClock(EpochSizes.of(config), backlog.clock)
        self._origin = origin
        self._requests: dict[TrajectoryId, TrajectoryRequest] = {}
        """Admitted trajectories, not trained on yet."""
        self._sampled = dict(backlog.sampled)
        """Tokens at the start of the leg, and turns that ended since."""
        self._handed_back: dict[TrajectoryId, SampledTokens] = {}
        """Unfinished trajectories of this leg, which may be beyond its end."""

    # ------------------------------------------------------------------ legs

    def begin_step(self, step: int, requests: Sequence[TrajectoryRequest]) -> None:
        """`requests`: of all trajectories admitted by the last leg and not trained on."""
        self._requests = {request.id: request for request in requests}
        self.clock.begin_step(step)

    def inputs(self) -> tuple[list[TrajectoryRequest], list[PartialTrajectory]]:
        """What devices may sample in this leg: (from the start, from what they have), in the clock's order."""
        wanted = self.clock.wanted()
        fresh = [self._requests[id] for id in wanted if id not in self._sampled]
        return fresh, [partial for id in wanted if (partial := self.begun_from(id)) is not None]

    def begun_from(self, id: TrajectoryId) -> PartialTrajectory | None:
        """An unfinished trajectory at the start of the leg; None if it had no token."""
        part = self._sampled.get(id)
        if part is None:
            return None
        return PartialTrajectory(
            request=self._requests[id],
            tokens=part.tokens,
            is_sampled=(True,) * len(part.tokens),
            logprobs=part.logprobs,
            versions=part.versions,
            pending_tokens=(),
            num_turns=0,
            is_waiting_for_reply=False,
            kv=None,
            origin=self._origin,
        )

    def hand_back(self, partials: Sequence[PartialTrajectory]) -> None:
        """Accept a device's unfinished trajectories after the leg."""
        for rest in partials:
            part = SampledTokens(tokens=rest.tokens, logprobs=rest.logprobs, versions=rest.versions, stop_reason=None)
            self._handed_back.setdefault(rest.request.id, part)

    def end_leg(self) -> None:
        """End the leg after all devices have handed back: keep the tokens up to the clock's end."""
        standing = self.clock.standing()
        known = {**self._sampled, **self._handed_back}
        kept = {id: known[id].first(num_tokens) for id, num_tokens in standing.items() if num_tokens}
        short = [id for id, num_tokens in standing.items() if num_tokens and len(kept[id].tokens) != num_tokens]
        assert not short, f"{short[0]} was handed back with too few tokens"
        ended = self.clock.ended()
        self._sampled = {id: part for id, part in known.items() if id in ended} | kept
        self._handed_back = {}
        self.clock.end_leg()

    def end_step(self) -> StepOver:
        """End the step's rollout."""
        ids = self.clock.end_step()
        for id in ids:
            del self._sampled[id]
        return StepOver(ids=ids, backlog=Backlog(clock=self.clock.state(), sampled=self._sampled).pack())

    # ------------------------------------------------------------------ news

    def take(self, finished: Sequence[FinishedTurn], progress: Mapping[TrajectoryId, int]) -> list[FinishedTurn]:
        """Record a chunk's finished turns, and the token counts of its unfinished trajectories.

        Returns the turns to train on that were decided since the previous call.
        """
        for id, num_tokens in progress.items():
            self.clock.note_progress(id, num_tokens)
        for turn in finished:
            self.clock.note_end(turn.id, len(turn.tokens))
            self._handed_back.setdefault(
                turn.id,
                SampledTokens(
                    tokens=turn.tokens, logprobs=turn.logprobs, versions=turn.versions, stop_reason=turn.stop_reason
                ),
            )
        return [self._turn(id) for group in self.clock.advance() for id in group]

    def _turn(self, id: TrajectoryId) -> FinishedTurn:
        part = self._handed_back.get(id) or self._sampled[id]
        assert part.stop_reason is not None, id
        return FinishedTurn(
            id=id,
            tokens=part.tokens,
            is_sampled=(True,) * len(part.tokens),
            logprobs=part.logprobs,
            versions=part.versions,
            stop_reason=part.stop_reason,
            num_turns=1,
        )

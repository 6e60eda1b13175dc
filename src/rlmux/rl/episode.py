"""One trajectory as its env worker sees it: begun ──▶ (turn ──▶ reply)* ──▶ over ──▶ scored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlmux.rl.tasks import Environment
from rlmux.rl.types import FinishedTurn, Prompt, Trajectory, TrajectoryRequest, TurnReply

if TYPE_CHECKING:
    from rlmux.rl.agents.outcomes import Outcome
    from rlmux.rl.agents.session import Session


@dataclass(slots=True, kw_only=True)
class Episode:
    """A trajectory's request, its conversation with the environment, and its end."""

    request: TrajectoryRequest
    prompt: Prompt
    environment: Environment | None = None
    """The environment that has seen exactly the turns in `turns`; None before the first and for a single turn."""
    turns: list[str] = field(default_factory=list)
    """Texts of the model's turns that the environment has answered."""
    replies: list[tuple[int, ...] | None] = field(default_factory=list)
    """Tokens answered to each of `turns`; None ended the episode."""
    reply_texts: list[str] = field(default_factory=list)
    """Text of the environment's reply to each of `turns`, without a chat template's marks; empty at the end."""
    session: Session | None = None
    """What its program asks; None for environments, which the fields above are of."""
    outcome: Outcome | None = None
    """How the session ended, or what became of an environment that failed; None for others."""
    num_failures: int = 0
    """Environments of it that failed."""
    ending: FinishedTurn | None = None
    """The last turn, once the episode is over; never replaced."""
    is_scored: bool = False
    """Whether the reward function has answered."""
    reward: float | None = None
    """None until the episode is scored, and where the reward function gives it none."""

    @property
    def place(self) -> str:
        """Name of the episode in errors."""
        id = self.request.id
        return f"step {id.step} prompt {id.prompt} sample {id.sample}"

    def has_room_for(self, reply: TurnReply, turn: FinishedTurn) -> bool:
        """Whether a reply behind this turn leaves the model a token. A session has seen to it."""
        return reply.context is not None or len(turn.tokens) + len(reply.tokens) < self.request.max_new_tokens

    @property
    def last_turn(self) -> FinishedTurn:
        """The ending of an episode that is over."""
        assert self.ending is not None
        return self.ending

    def to_trajectory(self) -> Trajectory:
        """The data of an episode that is scored."""
        if self.session is not None:
            assert self.outcome is not None
            return self.session.trajectory(self.reward, self.outcome)
        assert self.is_scored
        ending = self.last_turn
        return Trajectory(
            id=ending.id,
            prompt_tokens=self.request.prompt_tokens,
            tokens=ending.tokens,
            is_sampled=ending.is_sampled,
            logprobs=ending.logprobs,
            versions=ending.versions,
            reward=0.0 if self.reward is None else self.reward,
            is_judged=self.reward is not None,
            stop_reason=ending.stop_reason if self.outcome is None else self.outcome.kind,
            num_turns=ending.num_turns,
            outcome=None if self.outcome is None else self.outcome.text,
        )


def parts_of(
    tokens: Sequence[int], is_sampled: Sequence[bool], stop_tokens: Collection[int]
) -> list[tuple[bool, tuple[int, ...]]]:
    """Parts of a response in order: (whether the model made it, tokens); an empty reply is a part without tokens.

    Example: parts_of("ab.cd.e", [1, 1, 1, 0, 1, 1, 1], ".")    the model's `ab.`, `c`, the model's `d.`, nothing, `e`
    """
    parts: list[tuple[bool, list[int]]] = []
    for token, is_of_model in zip(tokens, is_sampled, strict=True):
        if parts and is_of_model and parts[-1][0] and parts[-1][1][-1] in stop_tokens:
            parts.append((False, []))
        if not parts or parts[-1][0] != is_of_model:
            parts.append((is_of_model, []))
        parts[-1][1].append(token)
    return [(is_of_model, tuple(part)) for is_of_model, part in parts]

"""The interface of a task: prompts by index, demonstrations, a score, optionally an environment.

    prompt(index) ──▶ Prompt ──▶ the model's turns ◀──▶ environment(prompt).reply(turn)
                        │                 │
                        ▼                 ▼
              demonstration(prompt)   score(prompt, response) -> 0.0 .. 1.0

Invariant: `prompt(index)` is a function of (options, seed, index) alone, so the data order needs no cursor
but the index. RL counts indices up from 0; the SFT warm-up counts down from -1 and never meets them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from rlmux.rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a demonstration by one speaker."""

    text: str
    is_sampled: bool
    """False for the environment's tokens, which carry no loss."""


class Environment(Protocol):
    """Answers the model's turns. Single-use: made for one trajectory, then dropped.

    Replies are a function of the prompt and the turns so far: after a crash a trajectory is replayed.
    """

    def reply(self, turn: str) -> str | Awaitable[str | None] | None:
        """The environment's reply to the model's latest turn; None ends the trajectory.

        An `async def` may wait: replies that fall due together wait together.
        """


class Task(Protocol):
    """Where a pipeline's prompts and rewards come from."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts of one token each that end a turn, in addition to the end-of-sequence token."""

    @property
    def is_single_turn(self) -> bool:
        """Whether there is no environment: a stop ends the trajectory and frees its slot at once."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of any whole number, a function of (options, seed, index) alone."""

    def demonstration(self, prompt: Prompt) -> Sequence[Segment]:
        """The right response, as the SFT warm-up shows it; its text earns the full score."""

    def score(self, prompt: Prompt, response: str) -> float:
        """Reward of a complete response, environment replies included."""

    def environment(self, prompt: Prompt) -> Environment | None:
        """A fresh environment, or None when one turn is all."""


class SingleTurnTask:
    """Tasks in which the model speaks once and the right answer is a text."""

    stop: tuple[str, ...] = ()
    is_single_turn = True

    def demonstration(self, prompt: Prompt) -> Sequence[Segment]:
        return (Segment(text=prompt.answer or "", is_sampled=True),)

    def score(self, prompt: Prompt, response: str) -> float:
        return share_of_right_positions(prompt.answer or "", response)

    def environment(self, prompt: Prompt) -> Environment | None:
        return None


def random_at(task: str, seed: int, index: int) -> Random:
    """The generator of one prompt; text seeds are hashed alike in every process."""
    return Random(f"{task}/{seed}/{index}")


def share_of_right_positions(answer: Sequence[str], response: Sequence[str]) -> float:
    """Equal places over the longer length: 1.0 for the answer itself, and trailing rubbish costs."""
    if not answer and not response:
        return 1.0
    num_right = sum(expected == given for expected, given in zip(answer, response, strict=False))
    return num_right / max(len(answer), len(response))

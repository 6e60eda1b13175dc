"""Conversations of one pipeline's episodes with their environments.

    send_turns ─┬▶ a reply at once ────────────────────▶ recorded in the episode ──▶ reply_to(turn)
                └▶ an awaitable: pending ──collect──────▶ recorded ...
                                        └──drop: its trajectory restarted, or its step is over

An environment that raises, hangs or replies nonsense is made anew and gets all turns again, `task.retries` times; then
its episode is over with an outcome (agents/outcomes.py).

Invariant: an episode's environment has seen exactly the turns in `Episode.turns`. After a crash a trajectory may have
other turns than before: a fresh environment then gets all of them.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.agents.outcomes import Outcome
from rlmux.rl.episode import Episode, parts_of
from rlmux.rl.loading import PendingCalls, call_and_await, call_each
from rlmux.rl.tasks import Environment, Task
from rlmux.rl.types import FinishedTurn, TrajectoryId, TurnReply
from rlmux.rl.vocabulary import Vocabulary, check_unicode, reply_tokens_of


class Conversations:
    """Owns the pending replies; turns and replies are recorded in the episodes."""

    def __init__(
        self, task: Task, vocabulary: Vocabulary, limit_s: float, retries: int, on_answer: Callable[[], None]
    ) -> None:
        """`limit_s`: longest seconds of one reply. `retries`: fresh environments for one that fails. `on_answer`:
        called after each call of an environment."""
        self._on_answer = on_answer
        self._task = task
        self._vocabulary = vocabulary
        self._limit_s = limit_s
        self._retries = retries
        self._pending: PendingCalls[TrajectoryId] = PendingCalls(limit_s)
        self._pending_turns: dict[TrajectoryId, tuple[Episode, list[str]]] = {}
        """Each pending episode and all turns sent to its environment, the one without a reply last."""

    def send_turns(self, turns: Sequence[tuple[FinishedTurn, Episode]]) -> None:
        """Send new turns to the environments of unfinished episodes."""
        if self._task.is_single_turn:
            return
        for turn, episode in turns:
            if episode.ending is not None or episode.outcome is not None or turn.stop_reason == "length":
                continue
            texts = self._turn_texts(turn, episode)
            pending = self._pending_turns.get(turn.id)
            if episode.turns[: len(texts)] == texts or (pending is not None and pending[1] == texts):
                continue
            if pending is not None:  # about a turn that a crash discarded
                self.drop(turn.id)
                episode.environment = None
            self._ask(episode, texts)

    def _ask(self, episode: Episode, texts: list[str]) -> None:
        """Send an episode's last turn to its environment, or all of them to fresh ones until one does not fail."""
        while episode.outcome is None:
            try:
                environment = self._environment_after(episode, texts[:-1])
                if environment is None:
                    return
                (result,) = call_each(
                    [(_name(episode), partial(environment.reply, texts[-1]))], self._limit_s, self._on_answer
                )
                if inspect.isawaitable(result):
                    self._pending_turns[episode.request.id] = episode, texts
                    self._pending.begin(episode.request.id, _name(episode), result)
                else:
                    self._record(episode, texts[-1], result)
                return
            except PipelineError as error:
                self._fail(episode, error)

    def _fail(self, episode: Episode, error: PipelineError) -> None:
        """Count a failed environment; after `retries` more the episode is over."""
        episode.environment = None
        episode.num_failures += 1
        if episode.num_failures > self._retries:
            text = str(error).removeprefix(f"{_name(episode)} ")
            episode.outcome = Outcome(kind="failed", text=text, num_retries=self._retries)

    def collect(self, patience_s: float | None) -> None:
        """Record the replies that have come: wait for all (None), or for the first and `patience_s` at most."""
        while self._pending_turns:
            for trajectory, result in self._pending.wait(patience_s, keeps_errors=True).items():
                episode, texts = self._pending_turns.pop(trajectory)
                try:
                    if isinstance(result, PipelineError):
                        raise result
                    self._record(episode, texts[-1], result)
                except PipelineError as error:
                    self._fail(episode, error)
                    self._ask(episode, texts)
            if patience_s is not None:
                return

    def is_pending(self, turn: FinishedTurn) -> bool:
        """Whether the environment got exactly this turn and has not replied yet."""
        if turn.id not in self._pending_turns or turn.stop_reason == "length":
            return False
        episode, texts = self._pending_turns[turn.id]
        return self._turn_texts(turn, episode) == texts

    def reply_to(self, turn: FinishedTurn, episode: Episode) -> TurnReply | None:
        """The recorded reply to this turn, without tokens for an empty one; None: the trajectory is over."""
        if turn.stop_reason == "length" or episode.outcome is not None or episode.environment is None:
            return None
        tokens = episode.replies[len(self._turn_texts(turn, episode)) - 1]
        return None if tokens is None else TurnReply(id=turn.id, tokens=tokens)

    def drop(self, trajectory: TrajectoryId) -> None:
        """Cancel a pending reply."""
        self._pending.drop(trajectory)
        del self._pending_turns[trajectory]

    def drop_step(self, step: int) -> None:
        """Cancel the pending replies of a step that is over."""
        for trajectory in [each for each in self._pending_turns if each.step == step]:
            self.drop(trajectory)

    def _environment_after(self, episode: Episode, earlier: list[str]) -> Environment | None:
        """The episode's environment after the turns `earlier`, which a fresh one gets again if they differ."""
        if episode.environment is not None and episode.turns == earlier:
            return episode.environment
        name = _name(episode)
        episode.environment = self._call(name, partial(self._task.environment, episode.prompt))
        episode.turns, episode.replies, episode.reply_texts = [], [], []
        if episode.environment is None:
            return None
        for text in earlier:
            self._record(episode, text, self._call(name, partial(episode.environment.reply, text)))
        return episode.environment

    def _call(self, name: str, call: Any) -> Any:
        (result,) = call_and_await([(name, call)], self._limit_s, self._on_answer)
        return result

    def _record(self, episode: Episode, text: str, result: Any) -> None:
        """Add a turn and its reply to the episode; PipelineError for a reply that is no text, or has no tokens."""
        reply = None if result is None else self._reply_tokens(episode, result)
        episode.turns.append(text)
        episode.replies.append(reply)
        episode.reply_texts.append(result or "")

    def _reply_tokens(self, episode: Episode, result: Any) -> tuple[int, ...]:
        name = _name(episode)
        check_reply(result, name)
        try:
            return reply_tokens_of(self._vocabulary, episode.prompt, result)
        except (PipelineError, UserError) as error:
            raise PipelineError(f"{name} replied {_shown(result)}: {error}") from error

    def _turn_texts(self, turn: FinishedTurn, episode: Episode) -> list[str]:
        """Text of each of the model's turns."""
        parts = parts_of(turn.tokens, turn.is_sampled, episode.request.stop_tokens)
        return [self._vocabulary.decode(tokens) for is_sampled, tokens in parts if is_sampled]


def check_reply(result: Any, name: str) -> None:
    """Raises PipelineError, beginning with `name`, for a reply that is neither a text, which may be empty, nor None."""
    if result is None:
        return
    if not isinstance(result, str):
        raise PipelineError(f"{name} replied {_shown(result)}; accepted: a text, or None when over")
    try:
        check_unicode(result)
    except PipelineError as error:
        raise PipelineError(f"{name} replied {_shown(result)}: {error}") from None


def _shown(result: Any) -> str:
    """Type and value of a reply, in a few words."""
    kind = type(result).__name__
    if not isinstance(result, str | bytes | int | float | list | tuple | dict):
        return kind
    try:
        return f"{kind} {reprlib.repr(result)}"
    except ValueError:  # an integer with more digits than Python writes
        return kind


def _name(episode: Episode) -> str:
    return f"the environment at {episode.place}"

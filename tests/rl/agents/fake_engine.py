"""A rollout engine of one token a time, whose every number follows from what it was asked to compute, and how.

    open ──▶ "opened" ──▶ reply: tokens behind, or another context ──▶ a turn, sampled to its end

Its tokens depend on (seed, position, all tokens before, how many of them were computed at once), so that a session that
hands it another split of the same tokens is found out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from rlmux.rl.types import FinishedTurn, TrainingBatch, TrajectoryId, TrajectoryRequest, TurnReply
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.vocabulary import Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PATIENCE_S = 0.05

Say = Callable[[str], str]
"""Makes an answer of the text before it, special tokens by name."""


@dataclass(slots=True)
class Live:
    """One trajectory here."""

    request: TrajectoryRequest
    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_at_once: int = 0
    """Response tokens that were computed with the prompt."""
    num_turns: int = 0
    splits: list[tuple[int, int]] = field(default_factory=list)
    """(tokens computed at once, tokens forced behind them) of each context that it got."""


class FakeEngine:
    """Holds trajectories until they are lost."""

    def __init__(self, vocabulary: Vocabulary, say: Say | None = None, *, watches_split: bool = True) -> None:
        """`say`: the answers; None: random letters, ended at random. `watches_split`: whether these depend on how many
        tokens were computed at once."""
        self.vocabulary, self.say = vocabulary, say
        self.watches_split = watches_split
        self.version = 0
        self.live: dict[TrajectoryId, Live] = {}
        self.num_contexts = 0

    def open(self, request: TrajectoryRequest) -> FinishedTurn:
        assert request.is_session
        assert not request.prompt_tokens
        self.live[request.id] = Live(request)
        return FinishedTurn.opening(request.id)

    def reply(self, reply: TurnReply) -> FinishedTurn:
        live, turn_end = self.live[reply.id], reply.turn_end
        if reply.context is not None:
            self.num_contexts += 1
            context, turn_end = reply.context, reply.context.turn_end
            assert not reply.tokens
            assert not context.is_waiting_for_reply
            splits = [*live.splits, (len(context.tokens), len(context.pending_tokens))]
            live = self.live[reply.id] = Live(
                context.request,
                tokens=list(context.tokens),
                is_sampled=list(context.is_sampled),
                logprobs=list(context.logprobs),
                versions=list(context.versions),
                num_at_once=len(context.tokens),
                num_turns=context.num_turns,
                splits=splits,
            )
            live.versions += [self.version] * (len(live.tokens) - len(live.versions))
        for token in reply.tokens if reply.context is None else reply.context.pending_tokens:
            self._add(live, token, 0.0, is_sampled=False)
        return self._sample(live, turn_end)

    def _sample(self, live: Live, turn_end: int | None) -> FinishedTurn:
        request = live.request
        most = min(request.max_new_tokens, turn_end or request.max_new_tokens)
        script = self._script(live)
        stop_reason = ""
        while not stop_reason:
            context = (*request.prompt_tokens, *live.tokens)
            split = live.num_at_once if self.watches_split else 0
            word = hashlib.blake2b(repr((request.seed, context, split)).encode()).digest()
            if script is None:
                letter = self.vocabulary.encode(LETTERS[word[0] % 26])[0]
                token = self.vocabulary.eos_token if word[1] % 8 == 0 else letter
            else:
                token = script.pop(0)
            self._add(live, token, -word[2] / 100 - 0.01, is_sampled=True)
            if token in request.stop_tokens:
                stop_reason = "stop"
            elif len(live.tokens) >= most:
                stop_reason = "length" if len(live.tokens) >= request.max_new_tokens else "limit"
        live.num_turns += 1
        return FinishedTurn(
            id=request.id,
            tokens=tuple(live.tokens),
            is_sampled=tuple(live.is_sampled),
            logprobs=tuple(live.logprobs),
            versions=tuple(live.versions),
            stop_reason=stop_reason,
            num_turns=live.num_turns,
        )

    def _script(self, live: Live) -> list[int] | None:
        if self.say is None:
            return None
        before = self.vocabulary.decode((*live.request.prompt_tokens, *live.tokens), special_tokens=True)
        return [*self.vocabulary.encode(self.say(before)), self.vocabulary.eos_token]

    def _add(self, live: Live, token: int, logprob: float, *, is_sampled: bool) -> None:
        live.tokens.append(token)
        live.is_sampled.append(is_sampled)
        live.logprobs.append(logprob)
        live.versions.append(self.version)


def play(env: PipelineEnv, engine: FakeEngine, step: int = 1) -> TrainingBatch:
    """One step of a pipeline, from its first program to its batch."""
    turns = [engine.open(request) for request in env.begin_step(step)]
    while not env.is_step_complete(step):
        replies, _ = env.on_turns(turns, patience_s=PATIENCE_S)
        turns = [engine.reply(reply) for reply in replies]
    return env.finish_step(step)

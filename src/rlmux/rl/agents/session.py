"""One program's questions to its model, and the sequences that they make.

    ask ──▶ waiting ──▶ open: tokens of its chat ──next_reply──▶ rollout engine ──take_turn──▶ answered, recorded
                          │
                          ├─ it goes on from a recorded answer: that sequence grows
                          └─ else: a sequence of its own (the first, a subagent's, a compressed context)

Invariants: a token that was sampled stays the token that it is, with its log-prob and version, and carries a loss in
one sequence alone. Random numbers are a function of (seed, trajectory, what the sequence began with, how many began
alike, position): not of when a question came, nor of where it was sampled. Questions are answered one after another; a
program that asks several at once waits for each.

What of a sequence a worker computes as one prefill, and what token by token, follows from the questions and their
order, so that a worker that takes over computes the same bits. Of a program that asks in several chats at once, the
last bits depend on the order in which these take turns.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from rlmux.core.errors import PipelineError, RlmuxError, UserError
from rlmux.rl.agents.chat_messages import Message, answer_of, goes_on_from
from rlmux.rl.agents.chat_tokens import ChatTokens
from rlmux.rl.agents.outcomes import ENDED, Outcome
from rlmux.rl.types import FinishedTurn, PartialTrajectory, Trajectory, TrajectoryRequest, TurnReply
from rlmux.rl.vocabulary import Vocabulary

_MOST_FORCED = 48
"""Tokens between two answers that are fed one by one; more are computed at once, with all before them."""
_STOP_REASONS = {ENDED: "stop", "tokens": "length"}
"""Stop reasons of trajectories by kind of outcome; other kinds are their own."""


class AskRefusedError(RlmuxError):
    """A question that gets no answer; `code` as the OpenAI API has it."""

    def __init__(self, text: str, code: str = "invalid_request_error") -> None:
        super().__init__(text)
        self.code = code


class SessionOverError(RlmuxError):
    """The session ended before its question was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model answered."""

    message: Message
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    num_prompt_tokens: int


@dataclass(slots=True, kw_only=True)
class Ask:
    """A question: a chat with an answer due, or (`text`) a text to go on with."""

    messages: Sequence[Message] = ()
    text: str | None = None
    tools: Sequence[Message] | None = None
    begins_with: str = ""
    """Text that the answer is made to begin with."""
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    answer: Future[Answer] = field(default_factory=Future)


@dataclass(slots=True, kw_only=True)
class _Answered:
    """A chat up to and with an answer of a sequence."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None
    end: int
    """Response tokens of the sequence by then."""
    is_stopped: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """Tokens that follow each other, as the trainer gets them. Per-token fields are those of `FinishedTurn`."""

    request: TrajectoryRequest
    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    answered: list[_Answered] = field(default_factory=list)
    num_prefilled: int = 0
    """Response tokens that are computed at once with the prompt; those behind, one by one."""
    is_cut: bool = False
    """Whether more was sampled behind its last token, and dropped."""

    def cut(self, count: int) -> None:
        """Keep so many response tokens."""
        for column in (self.tokens, self.is_sampled, self.logprobs, self.versions):
            del column[count:]


@dataclass(slots=True, kw_only=True)
class _Open:
    """The question that is being answered."""

    ask: Ask
    sequence: _Sequence
    base: int
    """Tokens of the sequence before what this question adds."""
    added: tuple[int, ...]
    goes_on: bool
    """Whether the engine, if it has what was asked before, needs only what is added."""
    is_sent: bool = False

    @property
    def start(self) -> int:
        """Response tokens before the answer."""
        return self.base + len(self.added)


class Session:
    """One trajectory of a program. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        request: TrajectoryRequest,
        vocabulary: Vocabulary,
        chats: ChatTokens,
        *,
        max_prompt_tokens: int,
        max_turns: int,
    ) -> None:
        """`request`: without a prompt."""
        self.request = request
        self.limit: str | None = None
        """The limit that a question ran into: `turns` or `tokens`."""
        self.refusal: str | None = None
        """The first refusal of a question, in one line."""
        self.num_asks = 0
        self._vocabulary, self._chats = vocabulary, chats
        self._max_prompt_tokens, self._max_turns = max_prompt_tokens, max_turns
        self._sequences: list[_Sequence] = []
        self._waiting: deque[Ask] = deque()
        self._open: _Open | None = None
        self._last: _Sequence | None = None
        """The sequence of the last answer."""
        self._is_held = False
        """Whether the engine has that sequence, and no other tokens."""
        self.is_engine_waiting = False
        """Whether the trajectory waits for a context or a reply."""
        self.is_over = False

    @property
    def has_reply(self) -> bool:
        """Whether the engine waits, and has something to go on with."""
        return self.is_engine_waiting and self._open is not None and not self._open.is_sent

    def restart(self) -> None:
        """Forget everything that was asked: another program begins anew, with the same random numbers."""
        self._refuse_all("the program that asked was ended")
        self._sequences, self.limit, self.refusal, self.num_asks = [], None, None, 0
        self._last, self._is_held = None, False

    def end(self) -> None:
        self.is_over = True
        self._refuse_all("the session is over")

    def _refuse_all(self, why: str) -> None:
        waiting = [ask.answer for ask in self._waiting if ask.answer.set_running_or_notify_cancel()]
        if self._open is not None:
            waiting.append(self._open.ask.answer)
        self._waiting.clear()
        self._open = None
        for answer in waiting:
            answer.set_exception(SessionOverError(why))

    # --- questions --------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """Take a question; its future gets the answer, AskRefusedError or SessionOverError."""
        if self.is_over:
            ask.answer.set_exception(SessionOverError("the session is over"))
            return
        self._waiting.append(ask)
        self._open_next()

    def _open_next(self) -> None:
        while self._open is None and self._waiting:
            ask = self._waiting.popleft()
            if not ask.answer.set_running_or_notify_cancel():
                continue
            try:
                self._open = self._opened(ask)
            except (AskRefusedError, UserError, PipelineError) as error:
                refused = error if isinstance(error, AskRefusedError) else AskRefusedError(str(error))
                self.refusal = self.refusal or str(refused)
                ask.answer.set_exception(refused)

    def _opened(self, ask: Ask) -> _Open:
        if self.num_asks >= self._max_turns:
            self.limit = self.limit or "turns"
            raise AskRefusedError(f"the session has had its {self._max_turns} turns (task.max_turns)", "turn_limit")
        found = self._going_on(ask)
        if found is None:
            sequence, base, added = self._begun(ask)
        else:
            sequence, base, added = found
        added += self._vocabulary.encode(ask.begins_with) if ask.begins_with else ()
        room = self.request.max_new_tokens - base - len(added)
        if room < 1:
            self.limit = self.limit or "tokens"
            most = self._max_prompt_tokens + self.request.max_new_tokens
            raise AskRefusedError(
                f"the chat has {len(sequence.request.prompt_tokens) + base + len(added)} tokens, and with an answer at "
                f"most {most} fit (rollout.max_prompt_tokens and max_new_tokens)",
                "context_length_exceeded",
            )
        if sequence not in self._sequences:
            self._sequences.append(sequence)
        self.num_asks += 1
        goes_on = sequence is self._last and not sequence.is_cut and len(added) <= _MOST_FORCED
        if not goes_on:
            sequence.num_prefilled = base + len(added)
        return _Open(ask=ask, sequence=sequence, base=base, added=added, goes_on=goes_on)

    def _going_on(self, ask: Ask) -> tuple[_Sequence, int, tuple[int, ...]] | None:
        """Where a chat goes on from the longest recorded one: (sequence, its tokens, tokens that are added)."""
        best: tuple[_Sequence, _Answered] | None = None
        for sequence in self._sequences:
            for answered in sequence.answered:
                is_longer = best is None or len(answered.messages) > len(best[1].messages)
                if is_longer and answered.tools == ask.tools and goes_on_from(ask.messages, answered.messages):
                    best = sequence, answered
        if best is None:
            return None
        sequence, answered = best
        later = ask.messages[len(answered.messages) :]
        added = self._chats.behind_answer(later, ask.tools, is_stopped=answered.is_stopped)
        if answered.end == len(sequence.tokens):
            return sequence, answered.end, added
        prefix = sequence.tokens[: answered.end]  # another answer follows there: what both share is trained on once
        branch = self._new_sequence(sequence.request.prompt_tokens, (*prefix, *added))
        branch.tokens, branch.versions = list(prefix), sequence.versions[: answered.end]
        branch.is_sampled, branch.logprobs = [False] * answered.end, [0.0] * answered.end
        return branch, answered.end, added

    def _begun(self, ask: Ask) -> tuple[_Sequence, int, tuple[int, ...]]:
        if ask.text is not None:
            tokens = self._vocabulary.opening_tokens + self._vocabulary.encode(ask.text)
        else:
            tokens = self._chats.whole(ask.messages, ask.tools)
        if not tokens:
            raise UserError("messages: have no tokens")
        prompt, rest = tokens[: self._max_prompt_tokens], tokens[self._max_prompt_tokens :]
        return self._new_sequence(prompt, rest), 0, rest

    def _new_sequence(self, prompt: Sequence[int], begins_with: Sequence[int]) -> _Sequence:
        """A sequence with random numbers of its own."""
        key = (tuple(prompt), tuple(begins_with))
        word = hashlib.blake2b(repr((self.request.seed, key)).encode(), digest_size=8).digest()
        seed = int.from_bytes(word, "little") >> 1
        seeds = {each.request.seed for each in self._sequences}
        while seed in seeds:  # sequences that begin alike, in their order
            seed += 1
        return _Sequence(request=replace(self.request, prompt_tokens=tuple(prompt), seed=seed))

    # --- the engine -------------------------------------------------------------------------------------------

    def take_turn(self, turn: FinishedTurn) -> None:
        """Record what the engine sampled, and answer the question; or note that it waits for a context."""
        if turn.stop_reason == "opened":
            self._is_held, self.is_engine_waiting = False, True
            if self._open is not None:
                self._open.is_sent = False
            return
        self.is_engine_waiting = True
        opened = self._open
        if opened is None or not opened.is_sent or len(turn.tokens) <= opened.start:  # of a program that was ended
            self._is_held = False
            if opened is not None:
                opened.is_sent = False
            return
        sequence = opened.sequence
        sequence.cut(opened.base)
        sequence.tokens += [*opened.added, *turn.tokens[opened.start :]]
        sequence.is_sampled += [False] * len(opened.added) + [True] * (len(turn.tokens) - opened.start)
        sequence.logprobs += [0.0] * len(opened.added) + list(turn.logprobs[opened.start :])
        sequence.versions += turn.versions[opened.base :]
        self._last, self._is_held = sequence, True
        self._answer(opened, turn.stop_reason)
        self._open = None
        self._open_next()

    def _answer(self, opened: _Open, stop_reason: str) -> None:
        ask, sequence = opened.ask, opened.sequence
        sequence.is_cut = False
        text = self._vocabulary.decode(sequence.tokens[opened.start :])
        ends = [place for stop in ask.stop if (place := text.find(stop)) >= 0]
        if ends:
            text, stop_reason = text[: min(ends)], "cut"
            self._cut_at_text(sequence, opened.start, ask.stop)
        elif stop_reason == "length":
            self.limit = self.limit or "tokens"
        tokens = sequence.tokens[opened.start :]
        message = answer_of(
            ask.begins_with + text,
            has_tools=bool(ask.tools),
            call_ids=f"call_{self.num_asks}_{len(sequence.answered)}_",
        )
        if ask.text is None:
            sequence.answered.append(
                _Answered(
                    messages=(*ask.messages, message),
                    tools=ask.tools,
                    end=len(sequence.tokens),
                    is_stopped=stop_reason == "stop",
                )
            )
        finish_reason = "length" if stop_reason in ("length", "limit") else "stop"
        ask.answer.set_result(
            Answer(
                message=message,
                text=text,
                tokens=tokens,
                logprobs=sequence.logprobs[opened.start :],
                finish_reason="tool_calls" if "tool_calls" in message else finish_reason,
                num_prompt_tokens=len(sequence.request.prompt_tokens) + opened.start,
            )
        )

    def _cut_at_text(self, sequence: _Sequence, start: int, stops: Sequence[str]) -> None:
        """Drop what was sampled behind the token that completes a stop text."""
        low, high = start + 1, len(sequence.tokens)
        while low < high:
            middle = (low + high) // 2
            text = self._vocabulary.decode(sequence.tokens[start:middle])
            low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
        sequence.is_cut = low < len(sequence.tokens)
        sequence.cut(low)

    def next_reply(self) -> TurnReply:
        """What the engine goes on with; only where `has_reply`."""
        opened = self._open
        assert opened is not None
        assert self.has_reply
        opened.is_sent, self.is_engine_waiting = True, False
        sequence = opened.sequence
        turn_end = None if opened.ask.max_tokens is None else opened.start + opened.ask.max_tokens
        if opened.goes_on and self._is_held:
            return TurnReply(id=self.request.id, tokens=opened.added, turn_end=turn_end)
        tokens = (*sequence.tokens[: opened.base], *opened.added)
        context = PartialTrajectory(
            request=sequence.request,
            tokens=tokens[: sequence.num_prefilled],
            is_sampled=(False,) * sequence.num_prefilled,
            logprobs=(0.0,) * sequence.num_prefilled,
            versions=tuple(sequence.versions[: sequence.num_prefilled]),
            pending_tokens=tokens[sequence.num_prefilled :],
            num_turns=self.num_asks - 1,
            is_waiting_for_reply=False,
            kv=None,
            turn_end=turn_end,
        )
        return TurnReply(id=self.request.id, tokens=(), context=context)

    # --- the end ----------------------------------------------------------------------------------------------

    def trajectory(self, reward: float | None, outcome: Outcome) -> Trajectory:
        """All its sequences; the one with the most answers is the trajectory, the others are its branches.

        A program that never got an answer has one without a sampled token. `reward`: None: it is not judged.
        """
        asked = [each for each in self._sequences if any(each.is_sampled)]
        ordered = sorted(asked, key=lambda each: (-len(each.answered), each.request.prompt_tokens, each.tokens))
        if not ordered:
            nothing = (self._vocabulary.eos_token,) * 2
            ordered = [_Sequence(request=replace(self.request, prompt_tokens=nothing))]
        first, *others = [self._trajectory(each, reward, outcome) for each in ordered]
        return replace(first, branches=tuple(others))

    def _trajectory(self, sequence: _Sequence, reward: float | None, outcome: Outcome) -> Trajectory:
        return Trajectory(
            id=self.request.id,
            prompt_tokens=sequence.request.prompt_tokens,
            tokens=tuple(sequence.tokens),
            is_sampled=tuple(sequence.is_sampled),
            logprobs=tuple(sequence.logprobs),
            versions=tuple(sequence.versions),
            reward=0.0 if reward is None else reward,
            is_judged=reward is not None,
            stop_reason=_STOP_REASONS.get(outcome.kind, outcome.kind),
            num_turns=len(sequence.answered),
            messages=sequence.answered[-1].messages if sequence.answered else (),
            outcome=outcome.text,
        )

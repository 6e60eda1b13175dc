"""A program's questions become sequences: each token as the engine made it, trained on once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.rl.agents.fake_engine import FakeEngine

from rlmux.rl.agents.chat_tokens import ChatTokens
from rlmux.rl.agents.outcomes import ENDED, Outcome
from rlmux.rl.agents.session import Answer, Ask, AskRefusedError, Session, SessionOverError
from rlmux.rl.types import FinishedTurn, Trajectory, TrajectoryId, TrajectoryRequest
from rlmux.rl.vocabulary import CharVocabulary

VOCABULARY = CharVocabulary()
ID = TrajectoryId(1, 0, 0)
Chat = list[dict[str, Any]]


class Table:
    """A session and its engine, which takes turns as they are due."""

    def __init__(self, *, max_prompt_tokens: int = 64, max_new_tokens: int = 400, max_turns: int = 64) -> None:
        self.engine = FakeEngine(VOCABULARY)
        self.request = TrajectoryRequest(
            id=ID,
            prompt_tokens=(),
            max_new_tokens=max_new_tokens,
            stop_tokens=VOCABULARY.stop_tokens,
            seed=7,
            is_session=True,
        )
        self.session = Session(
            self.request,
            VOCABULARY,
            ChatTokens(VOCABULARY),
            max_prompt_tokens=max_prompt_tokens,
            max_turns=max_turns,
        )
        self.session.take_turn(self.engine.open(self.request))

    def sampled(self) -> FinishedTurn:
        """The turn that the open question gets."""
        return self.engine.reply(self.session.next_reply())

    def run(self) -> None:
        """Answer all questions."""
        while self.session.has_reply:
            self.session.take_turn(self.sampled())

    def lose_worker(self) -> None:
        self.session.take_turn(self.engine.open(self.request))

    def put(self, chat: Chat, **options: Any) -> Ask:
        ask = Ask(messages=list(chat), **options)
        self.session.ask(ask)
        return ask

    def ask(self, chat: Chat, **options: Any) -> Answer:
        """Ask, and have the answer in the chat."""
        ask = self.put(chat, **options)
        self.run()
        answer = ask.answer.result(timeout=0)
        chat.append(dict(answer.message))
        return answer

    def sequences(self) -> tuple[Trajectory, ...]:
        return tuple(self.session.trajectory(1.0, Outcome(kind=ENDED, text=ENDED)).sequences)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sampled_of(sequence: Trajectory) -> list[int]:
    return [token for token, is_sampled in zip(sequence.tokens, sequence.is_sampled, strict=True) if is_sampled]


def check(sequence: Trajectory) -> None:
    """Every column has an entry for each token, and one that was not sampled no log-prob."""
    num = len(sequence.tokens)
    assert len(sequence.is_sampled) == len(sequence.logprobs) == len(sequence.versions) == num
    forced = [
        logprob for logprob, is_sampled in zip(sequence.logprobs, sequence.is_sampled, strict=True) if not is_sampled
    ]
    assert not any(forced)


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    for sequence in made.sequences():
        check(sequence)


def test_a_conversation_is_one_sequence_as_the_engine_made_it(table: Table) -> None:
    chat = [user("one?")]
    answers = [table.ask(chat)]
    table.engine.version = 1
    for text in ("two?", "three?"):
        chat.append(user(text))
        answers.append(table.ask(chat))
    (sequence,) = table.sequences()
    live = table.engine.live[ID]
    assert VOCABULARY.decode(sequence.prompt_tokens) == "one?\n"
    assert sequence.tokens == tuple(live.tokens)
    assert sequence.is_sampled == tuple(live.is_sampled)
    assert sequence.logprobs == tuple(live.logprobs)
    assert sequence.versions == tuple(live.versions)
    assert set(sequence.versions) == {0, 1}
    assert sampled_of(sequence) == [token for answer in answers for token in answer.tokens]
    assert (sequence.num_turns, sequence.stop_reason, sequence.outcome) == (3, "stop", "ended")
    assert sequence.messages == tuple(chat)
    assert table.engine.num_contexts == 1, "the others went on where the engine was"
    assert answers[0].num_prompt_tokens == len("one?\n")
    assert answers[2].num_prompt_tokens + len(answers[2].tokens) == len("one?\n") + len(sequence.tokens)


def test_a_subagent_is_a_branch_and_the_main_chat_goes_on_behind_it(table: Table) -> None:
    main, helper = [user("main?")], [user("help?")]
    table.ask(main)
    table.ask(helper)
    main.append(user("and?"))
    table.ask(main)
    first, branch = table.sequences()
    assert (first.num_turns, branch.num_turns) == (2, 1)
    assert VOCABULARY.decode(branch.prompt_tokens) == "help?\n"
    assert (branch.id, branch.reward) == (first.id, first.reward)
    assert first.messages == tuple(main)
    assert table.session.trajectory(1.0, Outcome(kind=ENDED, text=ENDED)).messages == tuple(main)


def test_what_a_fork_shares_is_trained_on_once(table: Table) -> None:
    chat = [user("one?")]
    first = table.ask(chat)
    retried = [*chat, user("two?")]
    for _ in range(2):
        table.ask([*chat, user("two?")])
    table.ask(retried)
    one, *forks = table.sequences()
    assert len(forks) == 2
    assert sampled_of(one)[: len(first.tokens)] == list(first.tokens)
    shared = len(first.tokens)
    for fork in forks:
        assert fork.tokens[:shared] == one.tokens[:shared]
        assert not any(fork.is_sampled[:shared])
        assert fork.versions[:shared] == one.versions[:shared]
    assert len({each.tokens for each in (one, *forks)}) == 3, "the same question again gets other random numbers"


def test_equal_questions_get_different_answers_and_the_same_again_after_a_restart(table: Table) -> None:
    def texts() -> list[str]:
        return [table.ask([user("hello?")]).text for _ in range(3)]

    before = texts()
    assert len(set(before)) == 3
    table.session.restart()
    assert texts() == before
    assert table.session.num_asks == 3, "of the program that is running"


def answers_in_order(order: list[str], *, watches_split: bool) -> dict[str, list[str]]:
    """What each chat got, and all sequences."""
    table = Table()
    table.engine.watches_split = watches_split
    chats: dict[str, Chat] = {name: [user(f"{name}?")] for name in dict.fromkeys(sorted(order))}
    said: dict[str, list[str]] = {name: [] for name in chats}
    for name in order:
        said[name].append(table.ask(chats[name]).text)
        chats[name].append(user("more?"))
    said["sequences"] = [repr(sorted(each.tokens for each in table.sequences()))]
    return said


def test_the_order_in_which_subagents_ask_changes_nothing() -> None:
    one = answers_in_order(["main", "a", "b", "c", "main"], watches_split=True)
    assert one == answers_in_order(["main", "c", "a", "b", "main"], watches_split=True)


def test_random_numbers_of_chats_that_take_turns_do_not_depend_on_whose_turn_it_is() -> None:
    one = answers_in_order(["a", "a", "b", "b", "c", "c"], watches_split=False)
    assert one == answers_in_order(["c", "a", "b", "a", "c", "b"], watches_split=False)


def test_parallel_questions_are_answered_one_after_another(table: Table) -> None:
    asks = [table.put([user(text)]) for text in ("a?", "b?")]
    table.session.take_turn(table.sampled())
    assert [ask.answer.done() for ask in asks] == [True, False]
    table.run()
    assert asks[1].answer.done()


def test_a_stop_text_cuts_the_record_at_the_token_that_completes_it(table: Table) -> None:
    whole = Table().ask([user("one?")]).text
    stop = whole[1:3]
    chat = [user("one?")]
    answer = table.ask(chat, stop=[stop])
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert VOCABULARY.decode(answer.tokens) == whole[: whole.index(stop) + 2]
    (sequence,) = table.sequences()
    assert sequence.tokens == tuple(answer.tokens)
    chat.append(user("two?"))
    table.ask(chat)
    (sequence,) = table.sequences()
    text = VOCABULARY.decode(sequence.tokens, special_tokens=True)
    assert text.startswith(whole[: whole.index(stop) + 2] + "<eos>two?\n"), "it is closed for what follows"


def test_max_tokens_ends_a_turn_and_not_the_session(table: Table) -> None:
    chat = [user("one?")]
    answer = table.ask(chat, max_tokens=2)
    assert (len(answer.tokens), answer.finish_reason, table.session.limit) == (2, "length", None)
    chat.append(user("two?"))
    assert table.ask(chat, max_tokens=400).finish_reason == "stop"
    (sequence,) = table.sequences()
    assert VOCABULARY.decode(sequence.tokens, special_tokens=True)[2:].startswith("<eos>two?\n")


def test_more_turns_than_allowed_are_refused() -> None:
    table = Table(max_turns=2)
    for text in ("one?", "two?"):
        table.ask([user(text)])
    with pytest.raises(AskRefusedError, match=r"has had its 2 turns \(task\.max_turns\)") as caught:
        table.ask([user("three?")])
    assert (caught.value.code, table.session.limit, table.session.num_asks) == ("turn_limit", "turns", 2)
    assert table.session.refusal == str(caught.value)


def test_a_chat_without_room_for_an_answer_is_refused() -> None:
    table = Table(max_prompt_tokens=8, max_new_tokens=16)
    with pytest.raises(AskRefusedError, match="the chat has 25 tokens, and with an answer at most 24 fit") as caught:
        table.ask([user("x" * 24)])
    assert (caught.value.code, table.session.limit) == ("context_length_exceeded", "tokens")
    assert table.session.num_asks == 0
    first, *_ = table.sequences()
    assert not any(first.is_sampled), "a program without an answer has a trajectory, too"


def test_an_answer_that_fills_the_window_is_a_limit() -> None:
    table = Table(max_prompt_tokens=8, max_new_tokens=3)
    answer = table.ask([user("3?")])
    assert len(answer.tokens) == 3, "this seed does not end it before"
    assert (answer.finish_reason, table.session.limit) == ("length", "tokens")
    assert table.session.trajectory(1.0, Outcome(kind="tokens", text="has no room left")).stop_reason == "length"


def test_a_long_chat_reaches_beyond_the_prompt(table: Table) -> None:
    answer = table.ask([user("x" * 100)])
    (sequence,) = table.sequences()
    assert len(sequence.prompt_tokens) == 64
    assert len(sequence.tokens) == 101 - 64 + len(answer.tokens)
    assert sequence.is_sampled == (False,) * 37 + (True,) * len(answer.tokens)


@pytest.mark.parametrize("moment", ["before", "while it samples", "between", "behind a long reply"])
def test_a_lost_worker_changes_no_token(moment: str) -> None:
    def play(*, is_lost: bool) -> tuple[tuple[Trajectory, ...], list[tuple[int, int]]]:
        table = Table()
        chat, other = [user("one?")], [user("other?")]
        table.ask(chat)
        table.ask(other)
        chat.append(user("x" * 80 if moment == "behind a long reply" else "short"))
        table.ask(chat)
        chat.append(user("and?"))
        if is_lost and moment in ("between", "behind a long reply"):
            table.lose_worker()
        ask = table.put(chat)
        if is_lost and moment == "before":
            table.lose_worker()
        if is_lost and moment == "while it samples":
            table.session.next_reply()
            table.lose_worker()
        table.run()
        chat.append(dict(ask.answer.result(timeout=0).message))
        chat.append(user("last?"))
        table.ask(chat)
        return table.sequences(), table.engine.live[ID].splits

    before, _ = play(is_lost=False)
    after, splits = play(is_lost=True)
    assert after == before
    assert splits
    assert splits[-1][1] > 0, "what was made token by token is again"


def test_a_long_reply_is_computed_at_once_with_all_before_it(table: Table) -> None:
    chat = [user("one?")]
    first = table.ask(chat)
    chat.append(user("x" * 80))
    table.ask(chat)
    assert table.engine.live[ID].splits[-1] == (len(first.tokens) + 81, 0)
    (sequence,) = table.sequences()
    assert sampled_of(sequence)[: len(first.tokens)] == list(first.tokens)
    assert sequence.logprobs[: len(first.tokens)] == tuple(first.logprobs)


def test_a_late_turn_of_a_program_that_was_ended_is_not_its_successors(table: Table) -> None:
    lone = Table()
    expected = lone.ask([user("new?")])
    old = table.put([user("old?")])
    late = table.sampled()
    table.session.restart()
    new = table.put([user("new?")])
    with pytest.raises(SessionOverError, match="the program that asked was ended"):
        old.answer.result(timeout=0)
    assert not table.session.has_reply, "the engine is still at the old question"
    table.session.take_turn(late)
    assert not new.answer.done()
    table.run()
    assert new.answer.result(timeout=0) == expected
    assert table.sequences() == lone.sequences()


def test_a_late_turn_is_not_given_to_a_question_that_the_successor_asks_later(table: Table) -> None:
    table.put([user("old?")])
    late = table.sampled()
    table.session.restart()
    table.session.take_turn(late)
    assert table.ask([user("new?")]) == Table().ask([user("new?")])


def test_the_end_of_a_session_fails_all_its_questions(table: Table) -> None:
    sent, waiting = table.put([user("a?")]), table.put([user("b?")])
    table.session.next_reply()
    table.session.end()
    late = table.put([user("c?")])
    for ask in (sent, waiting, late):
        with pytest.raises(SessionOverError, match="the session is over"):
            ask.answer.result(timeout=0)


def test_a_question_that_was_taken_back_is_left_out(table: Table) -> None:
    table.put([user("a?")])
    withdrawn = table.put([user("b?")])
    assert withdrawn.answer.cancel()
    table.run()
    assert table.session.num_asks == 1
    table.put([user("c?")])
    assert table.put([user("d?")]).answer.cancel()
    table.session.end()


def test_an_answer_finds_its_question_taken_back_and_is_recorded(table: Table) -> None:
    ask = table.put([user("a?")])
    turn = table.sampled()
    ask.answer.cancel()
    table.session.take_turn(turn)
    assert table.sequences()[0].num_turns == 1
    assert table.ask([user("b?")]).text


def test_a_text_without_tokens_is_refused_and_harms_no_other(table: Table) -> None:
    sent = table.put([user("a?")])
    for ask in (Ask(text="é"), Ask(messages=[user("é")]), Ask(messages=[user("a?")], begins_with="é")):
        table.session.ask(ask)
    table.run()
    assert sent.answer.result(timeout=0).text
    table.ask([user("b?")])
    assert table.session.num_asks == 2
    assert "'é'" in (table.session.refusal or "")


def test_a_text_is_gone_on_with_and_is_no_message(table: Table) -> None:
    ask = Ask(text="Once upon", max_tokens=5)
    table.session.ask(ask)
    table.run()
    answer = ask.answer.result(timeout=0)
    assert answer.text
    (sequence,) = table.sequences()
    assert VOCABULARY.decode(sequence.prompt_tokens) == "Once upon"
    assert sequence.messages == ()


def test_what_an_answer_is_made_to_begin_with_carries_no_loss(table: Table) -> None:
    answer = table.ask([user("a?")], begins_with="So: ")
    (sequence,) = table.sequences()
    assert VOCABULARY.decode(sequence.tokens).startswith("So: ")
    assert sequence.is_sampled[:5] == (False,) * 4 + (True,)
    assert answer.message["content"] == f"So: {answer.text}"


def test_a_session_over_another_trajectory_has_other_random_numbers() -> None:
    table, other = Table(), Table()
    other.session.request = replace(other.request, seed=8)
    assert table.ask([user("a?")]).text != other.ask([user("a?")]).text


def test_random_numbers_do_not_depend_on_what_was_refused(table: Table) -> None:
    small = Table(max_prompt_tokens=8, max_new_tokens=392)
    with pytest.raises(AskRefusedError):
        small.ask([user("x" * 400)])
    other = Table(max_prompt_tokens=8, max_new_tokens=392)
    assert small.ask([user("a?")]).text == other.ask([user("a?")]).text

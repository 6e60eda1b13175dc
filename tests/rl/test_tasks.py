import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rlmux.core.errors import UserError
from rlmux.rl.config import TaskConfig
from rlmux.rl.tasks import TASKS, Task, make_task
from rlmux.rl.types import Prompt
from rlmux.rl.vocabulary import CharVocabulary

VARIED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TASKS),
    ("sort", {"min_digits": 2, "max_digits": 9}),
    ("reverse", {"min_letters": 1, "max_letters": 12, "alphabet": 4}),
    ("add", {"digits": 4, "partial_credit": False}),
    ("chain", {"modulus": 0, "min_terms": 1, "mean_terms": 3, "max_terms": 12}),
    ("calculator", {"digits": 3, "operator": "*"}),
    ("calculator", {"operator": "-", "max_calls": 1}),
    ("guess", {"largest": 100}),
    ("reasoning-gym:spell_backward", {}),
]


def task(name: str, seed: int = 0, **fields: Any) -> Task:
    return make_task(TaskConfig(name=name, **fields), seed=seed, vocabulary=CharVocabulary())


def converse(task: Task, prompt: Prompt) -> str:
    """Play the demonstration's own turns against a fresh environment; returns the whole response."""
    environment = task.environment(prompt)
    response = ""
    spoken = ""
    for segment in task.demonstration(prompt):
        if segment.is_sampled:
            spoken = segment.text
            response += spoken
        else:
            assert environment is not None
            reply = environment.reply(spoken)
            if inspect.isawaitable(reply):
                reply = asyncio.run(_result(reply))
            assert reply == segment.text
            response += reply
    return response


async def _result(reply: Awaitable[str | None]) -> str | None:
    return await reply


@pytest.mark.parametrize(("name", "params"), VARIED)
def test_the_demonstration_earns_the_full_reward(name: str, params: dict[str, Any]) -> None:
    made = task(name, params=params)
    for index in (-70, -1, 0, 1, 2, 999):
        prompt = made.prompt(index)
        assert made.score(prompt, converse(made, prompt)) == 1.0, prompt


@pytest.mark.parametrize(("name", "params"), VARIED)
def test_a_prompt_depends_on_seed_and_index_alone(name: str, params: dict[str, Any]) -> None:
    first, second, other = (task(name, seed, params=params) for seed in (3, 3, 4))
    forwards = [first.prompt(index) for index in range(20)]
    backwards = [second.prompt(index) for index in reversed(range(20))][::-1]
    assert forwards == backwards
    assert forwards != [other.prompt(index) for index in range(20)]


@pytest.mark.parametrize(("name", "params"), VARIED)
@pytest.mark.parametrize("response", ["", "=", "<1+", "0" * 50, "?|?|>>", "9?" * 9])
def test_rubbish_scores_between_nothing_and_everything(name: str, params: dict[str, Any], response: str) -> None:
    made = task(name, params=params)
    assert 0.0 <= made.score(made.prompt(0), response) < 1.0


@pytest.mark.parametrize("name", TASKS)
def test_the_built_in_vocabulary_spells_every_task(name: str) -> None:
    made, vocabulary = task(name), CharVocabulary()
    for text in (made.prompt(0).text, *(segment.text for segment in made.demonstration(made.prompt(0)))):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert all(len(vocabulary.encode(stop)) == 1 for stop in made.stop)


def test_partial_credit_counts_right_places() -> None:
    sort = task("sort")
    prompt = Prompt(text="s:321=", answer="123")
    assert sort.score(prompt, "124") == pytest.approx(2 / 3)
    assert sort.score(prompt, "1234") == pytest.approx(3 / 4)


def test_chain_lengths_have_a_long_tail() -> None:
    chain = task("chain", params={"min_terms": 2, "mean_terms": 6, "max_terms": 24})
    lengths = sorted(len(cast(str, chain.prompt(index).answer)) for index in range(2000))
    assert 5 <= sum(lengths) / len(lengths) <= 6.5
    assert lengths[len(lengths) // 2] <= 5
    assert lengths[-20] >= 15
    assert lengths[-1] <= 24


def test_the_calculator_answers_calls_and_nothing_else() -> None:
    made = task("calculator", params={"max_calls": 2})

    def replies(*turns: str) -> list[str | None]:
        environment = made.environment(made.prompt(0))
        assert environment is not None
        return [asyncio.run(_result(cast(Awaitable[str | None], environment.reply(turn)))) for turn in turns]

    assert replies("<12+34>", "46") == ["46|", None]
    assert replies("<12+>", "<2*3>", "<2*3>") == ["?|", "6|", None]


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean 'sort'.*reasoning-gym:NAME"):
        task("sorted")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"task\.params\.digit: .*did you mean 'digits'"):
        task("sort", params={"digit": 3})


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"digits": 0}, "0; accepted: a whole number from 1"),
        ({"digits": True}, "True; accepted: a whole number"),
        ({"min_digits": 7, "max_digits": 3}, "7 is more than max_digits 3"),
    ],
)
def test_a_wrong_option_says_what_is_accepted(params: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        task("sort", params=params)


def test_an_unknown_generator_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"nearest: .*chain_sum"):
        task("reasoning-gym:chainsum")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (
            {"min_termz": 2},
            r"^task.params.min_termz: 'reasoning-gym:chain_sum' has no such option; did you mean 'min_terms'\?",
        ),
        (
            {"seed": 2},
            r"^task.params.seed: 'reasoning-gym:chain_sum' has no such option; accepted: suffix, .*min_terms",
        ),
        ({"size": 2}, r"^task.params.size: 'reasoning-gym:chain_sum' has no such option"),
        ({"min_terms": "x"}, r"^task.params.min_terms of 'reasoning-gym:chain_sum': 'x': .*not supported"),
        ({"min_terms": 0}, r"^task.params.min_terms of 'reasoning-gym:chain_sum': 0: min_terms must be positive"),
        ({"max_terms": 1}, r"^task.params.max_terms of 'reasoning-gym:chain_sum': 1: max_terms must be >= min_terms"),
    ],
)
def test_a_generators_own_complaint_is_placed_at_its_option(params: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        task("reasoning-gym:chain_sum", params=params)


def test_a_scorer_that_raises_on_rubbish_gives_nothing() -> None:
    made = task("reasoning-gym:prime_factorization")
    assert made.score(made.prompt(0), "no numbers here") == 0.0


# Files.


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[list[Any]], str]:
    def write(rows: list[Any]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


def test_every_epoch_has_every_row_once_in_another_order(write_rows: Callable[[list[Any]], str]) -> None:
    made = task("file", path=write_rows([{"prompt": f"q{row}", "answer": row} for row in range(20)]))
    epochs = [[made.prompt(epoch * 20 + place).text for place in range(20)] for epoch in (-1, 0, 1)]
    assert all(sorted(epoch) == sorted(f"q{row}" for row in range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_verls_parquet_rows_work_as_they_are(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    row = {
        "data_source": "gsm",
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    made = task("file", path=str(tmp_path / "rows.parquet"), answer_key="reward_model.ground_truth")
    prompt = made.prompt(0)
    assert (prompt.text, prompt.answer) == ("be brief\n1+1\n", "2")
    assert prompt.data is not None
    assert prompt.data["data_source"] == "gsm"
    assert made.score(prompt, " 2\n") == 1.0


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"prompt": "a", "answer": "b"}, "{oops"], r"rows.jsonl line 2: not JSON"),
        (['{"prompt": ' + "[" * 3000 + "]" * 3000 + "}"], r"rows.jsonl line 1: not JSON: .* nested too deeply"),
        (['{"prompt": "a", "answer": ' + "9" * 5000 + "}"], r"line 1: not JSON: an integer has more than 4,300 digits"),
        ([{"prompt": "a", "answer": "b"}, "[1]"], r"rows.jsonl line 2: list"),
        ([{"question": "a", "answer": "b"}], r"rows.jsonl row 1: no 'prompt'; its columns: question, answer"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": 5, "answer": "b"}], r"row 2: 'prompt' is int '5'"),
        ([{"prompt": None, "answer": "b"}], r"row 1: 'prompt' is null; accepted: a text, or a list of messages"),
        ([{"prompt": []}], r"row 1: 'prompt' is list '\[\]'; accepted: a text, or a list of messages"),
        ([{"prompt": ["a"]}], r"row 1: message 1 of 'prompt' is str 'a'; accepted: an object with role and content"),
        ([{"prompt": [{"content": "a"}]}], r"row 1: message 1 of 'prompt' is dict"),
        ([{"prompt": [{"role": "user", "content": None}]}], r"message 1 of 'prompt' has content null; .*tool_calls"),
        ([{"prompt": [{"role": "user", "content": ["a"]}]}], r"message 1 of 'prompt' has content list"),
        ([{"prompt": "a"}], r"row 1: no 'answer' .*task.reward"),
        ([], r"rows.jsonl has no rows"),
    ],
)
def test_a_bad_row_is_named(write_rows: Callable[[list[Any]], str], rows: list[Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        task("file", path=write_rows(rows))


@pytest.mark.parametrize(
    ("answer", "text"),
    [(42, "42"), (True, "true"), (["4", "four"], '["4", "four"]'), ({"unit": "cm²"}, '{"unit": "cm²"}'), ("4", "4")],
)
def test_an_answer_is_compared_as_json_and_given_to_rewards_as_it_is(
    write_rows: Callable[[list[Any]], str], answer: Any, text: str
) -> None:
    made = task("file", path=write_rows([{"prompt": "a", "answer": answer}]))
    prompt = made.prompt(0)
    assert (prompt.answer, prompt.expected) == (text, answer)
    assert made.score(prompt, text) == 1.0


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8-sig")
    assert task("file", path=str(path)).prompt(0).text == "a"


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(UserError, match=r"bad.parquet is not a readable parquet file"):
        task("file", path=str(tmp_path / "bad.parquet"))
    with pytest.raises(UserError, match=r"no file .*absent.jsonl"):
        task("file", path=str(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match=r"task.path"):
        task("file")

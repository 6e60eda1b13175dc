"""Prompts and rewards are checked before anything starts: one line with file and row, or with the reward."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import CONFIG, write_checkpoint

from rlmux.rl.config import ModelConfig, SftWarmupConfig
from rlmux.rl.user_code.reward_preflight import complaint_about
from rlmux.rl.vocabulary import CharVocabulary

GOOD = {"prompt": "1+1=", "answer": "2"}
NO_WARMUP = SftWarmupConfig()


@pytest.fixture
def rows_complaint(tmp_path: Path, make_config: Callable[..., Any]) -> Callable[..., str | None]:
    """What is wrong with a file of these rows."""

    def complain(*rows: dict[str, Any], **changes: Any) -> str | None:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        changes = {"max_prompt_tokens": 8, "max_new_tokens": 4, **changes}
        warmup = changes.pop("sft_warmup", NO_WARMUP)
        model = changes.pop("model", ModelConfig())
        path = str(tmp_path / "rows.jsonl")
        return complaint_about(make_config("file", path=path, rollout=changes, sft_warmup=warmup, model=model))

    return complain


def test_every_row_of_a_file_is_checked_and_the_first_bad_one_named(rows_complaint, tmp_path) -> None:
    assert rows_complaint(GOOD, GOOD) is None
    many = [GOOD] * 2345
    path = tmp_path / "rows.jsonl"
    assert rows_complaint(*many, {"prompt": "café", "answer": "4"}) == (
        f"{path} row 2346: the character 'é' in 'café' is not in the built-in vocabulary (printable ASCII and "
        "newline); a model.path with its own tokenizer takes any text"
    )
    assert rows_complaint(*many, {"prompt": "123456+1=", "answer": "4"}) == (
        f"{path} row 2346: the prompt has 9 tokens; accepted: 1 to 8 (rollout.max_prompt_tokens)"
    )
    assert "row 1: the prompt has 0 tokens; accepted: 1 to 8" in str(rows_complaint({"prompt": "", "answer": "4"}))


def test_answers_are_checked_where_a_warmup_shows_them(rows_complaint) -> None:
    bad = {"prompt": "1+1=", "answer": "two, I believe"}
    warmup = SftWarmupConfig(num_updates=1)
    assert rows_complaint(GOOD, bad) is None
    assert "row 2: the answer has 14 tokens; accepted: 0 to 3 (rollout.max_new_tokens, less the end" in str(
        rows_complaint(GOOD, bad, sft_warmup=warmup)
    )
    assert "row 1: the character 'é'" in str(rows_complaint({"prompt": "1", "answer": "é"}, sft_warmup=warmup))


def test_rows_are_counted_in_tokens_a_thousand_at_once_and_none_twice(tmp_path, make_config, monkeypatch) -> None:
    """A checkpoint's tokenizer is quicker with many texts: so it is not called for each."""
    rows = [{"prompt": f"what is {number} + {number} ?", "answer": str(2 * number)} for number in range(10_500)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    batches: list[list[str]] = []
    count_tokens = CharVocabulary.count_tokens

    def count(self: CharVocabulary, texts: Sequence[str]) -> list[int]:
        batches.append(list(texts))
        return count_tokens(self, texts)

    monkeypatch.setattr(CharVocabulary, "count_tokens", count)
    assert complaint_about(make_config("file", path=str(path), sft_warmup=NO_WARMUP)) is None
    assert [len(batch) for batch in batches] == [1000] * 10 + [500]
    assert [text for batch in batches for text in batch] == [row["prompt"] for row in rows]


def test_prompts_of_a_built_in_task_that_are_too_long_are_found(make_config) -> None:
    complaint = complaint_about(make_config("sort", params={"digits": 30}, rollout={"max_prompt_tokens": 20}))
    assert complaint == (
        "prompt 0 of task 'sort': the prompt has 33 tokens; accepted: 1 to 20 (rollout.max_prompt_tokens)"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def score(text): return 0.0", "task.reward: '{name}:score' takes (text); accepted: verl's (data_source, "),
        ("def score(solution_str, level): return 0.0", "on a sample raised TypeError: score() missing 1 required"),
        ("def score(solution_str): return 'good'", "returned str 'good'; accepted: a finite number"),
        ("def score(solution_str): return float('nan')", "returned nan; accepted: a finite number"),
        ("def score(completions): return [0.0]", "returned 1 rewards for 2 completions"),
        ("def score(solution_str): 1 / 0", "on a sample raised ZeroDivisionError: division by zero"),
        ("def score(solution_str):\n  while True: pass", "on a sample did not return within 2 s"),
        ("while True: pass", "importing {name}:score did not return within 2 s"),
        ("import absent_xyz", "imports 'absent_xyz', which is not installed"),
    ],
)
def test_a_reward_is_called_once_on_a_sample(make_config, tmp_path, monkeypatch, source, text) -> None:
    name = f"rewards_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    limit_s = 2.0 if "within 2 s" in text else 60.0  # what ends is to be told for what it does, on a busy machine too
    complaint = str(complaint_about(make_config("sort", reward=f"{name}:score", reward_timeout_s=limit_s)))
    assert complaint.startswith("task.reward: ")
    assert text.format(name=name) in complaint
    assert "\n" not in complaint


@pytest.mark.parametrize(
    "source",
    [
        "async def score(solution_str, ground_truth): return float(solution_str == ground_truth)",
        "def score(prompts, completions, **columns): return [1.0] * len(completions)",
    ],
)
def test_a_good_reward_of_either_signature_passes(make_config, tmp_path, monkeypatch, source) -> None:
    name = f"rewards_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert complaint_about(make_config("sort", reward=f"{name}:score")) is None


def test_a_checkpoint_without_tokenizer_is_refused_unless_it_embeds_the_built_in_one(make_config, tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    config = make_config("sort", model=ModelConfig(path=str(folder)))
    assert CONFIG["vocab_size"] == CharVocabulary.vocab_size
    assert complaint_about(config) is None
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    assert complaint_about(config) == (
        f"model.path: {folder} has no tokenizer for its 300 tokens; accepted: a folder with one of tokenizer.json, "
        "tokenizer.model, vocab.json"
    )


def test_a_stop_text_of_several_tokens_is_refused(make_config, tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    CharVocabulary().save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": ">"}, "content": ">>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = make_config("calculator", model=ModelConfig(path=str(folder)), sft_warmup=NO_WARMUP)
    assert complaint_about(config) == "model.path: its tokenizer makes 2 tokens of the stop text '>', not 1"


def test_rows_are_counted_in_the_tokens_of_the_checkpoint(rows_complaint, tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    CharVocabulary().save_pretrained(folder)
    model = ModelConfig(path=str(folder))
    assert rows_complaint(GOOD, model=model) is None
    long = {"prompt": "123456+1=", "answer": "4"}
    assert "row 2: the prompt has 9 tokens; accepted: 1 to 8" in str(rows_complaint(GOOD, long, model=model))


def test_a_tokenizer_that_cannot_be_read_or_embedded_is_refused(make_config, tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    config = make_config("sort", model=ModelConfig(path=str(folder)))
    CharVocabulary().save_pretrained(folder)
    assert complaint_about(config) is None
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 90}))
    assert complaint_about(config) == (
        f"model.path: {folder} embeds 90 tokens, fewer than its tokenizer's 98; accepted: a tokenizer that fits"
    )
    (folder / "tokenizer.json").write_text("{")
    assert str(complaint_about(config)).startswith(f"model.path: the tokenizer in {folder} cannot be read: ")

"""The env worker keeps what was said, and a step never waits for it or fails by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlmux.report.samples import SampleReader
from rlmux.rl.types import TrainingBatch, Trajectory, TrajectoryId
from rlmux.rl.vocabulary import CharVocabulary
from rlmux.runtime.records.sample_archive import SampleKeeper

VOCABULARY = CharVocabulary()


def batch(step: int) -> TrainingBatch:
    parts = (("ask", True), ("told", False), ("so", True))
    tokens = tuple(token for text, _ in parts for token in VOCABULARY.encode(text))
    is_sampled = tuple(is_one for text, is_one in parts for _ in text)
    one = Trajectory(
        id=TrajectoryId(step, 0, 0),
        prompt_tokens=VOCABULARY.encode("what?"),
        tokens=(*tokens, VOCABULARY.eos_token),
        is_sampled=(*is_sampled, True),
        logprobs=(0.0,) * (len(tokens) + 1),
        versions=(step - 1,) * (len(tokens) + 1),
        reward=0.25,
        stop_reason="stop",
        num_turns=2,
    )
    return TrainingBatch(step=step, trajectories=(one,), advantages=(0.5,))


def test_what_was_said_is_kept_turn_by_turn(tmp_path):
    keeper = SampleKeeper(tmp_path / "samples.db", VOCABULARY)
    keeper.keep(batch(1))
    keeper.close()
    with SampleReader(tmp_path / "samples.db") as reader:
        one = reader.one(1, 0, 0)
    assert one["prompt_text"] == "what?"
    assert [(turn["role"], turn["text"]) for turn in one["said"]] == [
        ("model", "ask"), ("environment", "told"), ("model", "so"),
    ]  # fmt: skip
    assert (one["reward"], one["advantage"], one["tokens"]) == (0.25, 0.5, 10)
    texts = [[token["text"] for token in turn["tokens"]] for turn in one["said"] if turn["role"] == "model"]
    assert texts == [["a", "s", "k"], ["s", "o", ""]]
    assert one["said"][0]["tokens"][0] == {"text": "a", "logprob": 0.0, "version": 0}


def test_special_tokens_are_kept_beside_the_texts(tmp_path):
    keeper = SampleKeeper(tmp_path / "samples.db", VOCABULARY)
    keeper.keep(batch(1))
    keeper.close()
    with SampleReader(tmp_path / "samples.db") as reader:
        one = reader.one(1, 0, 0, special_tokens=True)
    assert [turn["text"] for turn in one["said"]] == ["ask", "told", "so<eos>"]
    assert [token["text"] for token in one["said"][2]["tokens"]] == ["s", "o", "<eos>"]


def test_an_empty_reply_stands_between_its_turns(tmp_path):
    made, eos = batch(1), VOCABULARY.eos_token
    tokens = (*VOCABULARY.encode("a"), eos, *VOCABULARY.encode("b"), eos)
    figures = {"is_sampled": (True,) * 4, "logprobs": (0.0, -1.0, -2.0, -3.0), "versions": (0,) * 4}
    one = replace(made.trajectories[0], tokens=tokens, **figures)
    keeper = SampleKeeper(tmp_path / "samples.db", VOCABULARY)
    keeper.keep(replace(made, trajectories=(one,)))
    keeper.close()
    with SampleReader(tmp_path / "samples.db") as reader:
        said = reader.one(1, 0, 0, special_tokens=True)["said"]
    assert [(turn["role"], turn["text"]) for turn in said] == [
        ("model", "a<eos>"), ("environment", ""), ("model", "b<eos>"),
    ]  # fmt: skip
    assert [token["logprob"] for token in said[2]["tokens"]] == [-2.0, -3.0]


def test_nothing_but_the_file_itself_is_left_beside_a_run(tmp_path):
    keeper = SampleKeeper(tmp_path / "samples.db", VOCABULARY)
    for step in (1, 2):
        keeper.keep(batch(step))
    keeper._thread.submit(lambda: None).result()  # all is written; the process may be killed from here on
    assert [path.name for path in tmp_path.iterdir()] == ["samples.db"]
    keeper.close()


def test_a_disk_that_is_full_costs_trajectories_and_no_step(tmp_path, capsys):
    keeper = SampleKeeper(Path("/dev/full"), VOCABULARY)
    for step in range(1, 9):
        keeper.keep(batch(step))
    keeper.close()
    assert "of step 1 were not kept" in capsys.readouterr().out


def test_a_folder_that_is_gone_costs_trajectories_and_no_step(tmp_path, capsys):
    keeper = SampleKeeper(tmp_path / "gone" / "samples.db", VOCABULARY)
    keeper.keep(batch(1))
    keeper.close()
    assert "not kept: " in capsys.readouterr().out

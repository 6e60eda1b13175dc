"""Trajectories of a run as text: found by step, reward and words, replaced with their step, bounded."""

from __future__ import annotations

import sqlite3

import pytest

from rlmux.core.errors import LogError
from rlmux.report.samples import Sample, SampleReader, SampleWriter


def sample(prompt: int, place: int, answer: str = "an answer", *, reward: float = 0.0, **fields) -> Sample:
    figures = {"advantage": 0.0, "stop": "stop", "tokens": len(answer), "num_turns": 1, "first_version": 3}
    turns = ((True, answer),)
    return Sample(
        **{"prompt_text": f"prompt {prompt}", "turns": turns, "last_version": 3, **figures, **fields},
        prompt=prompt,
        sample=place,
        reward=reward,
    )


@pytest.fixture
def writer(tmp_path):
    made = SampleWriter(tmp_path / "samples.db")
    yield made
    made.close()


def found(writer, tmp_path, **asked):
    sort = asked.pop("sort", "step")
    with SampleReader(tmp_path / "samples.db") as reader:
        return [(one["step"], one["prompt"], one["sample"]) for one in reader.find(asked, sort=sort)]


def test_they_are_found_by_step_reward_and_words(writer, tmp_path):
    writer.add(1, [sample(0, 0, "carry the one", reward=1.0), sample(0, 1, "one, carry the", reward=0.2)])
    writer.add(2, [sample(0, 0, "CARRY THE ONE!", reward=0.5, stop="length")])
    assert found(writer, tmp_path) == [(1, 0, 0), (1, 0, 1), (2, 0, 0)]
    assert found(writer, tmp_path, step=1, least=0.5) == [(1, 0, 0)]
    assert found(writer, tmp_path, most=0.5, sort="-reward") == [(2, 0, 0), (1, 0, 1)]
    assert found(writer, tmp_path, text="carry the one") == [(1, 0, 0), (2, 0, 0)]
    assert found(writer, tmp_path, text="prompt 0 ", stop="length") == [(2, 0, 0)]
    assert found(writer, tmp_path, text="the on") == []
    assert found(writer, tmp_path, text="the one, car") == []
    assert found(writer, tmp_path, text="one, car") == [(1, 0, 1)]


@pytest.mark.parametrize(
    "text", ['"', "a OR b", "*", "prompt:x", "NEAR(a b)", "^a", "\x00", "(", "'; DROP TABLE body; --"]
)
def test_no_sign_of_a_search_is_an_operator(writer, tmp_path, text):
    writer.add(1, [sample(0, 0, f"before {text} after")])
    assert set(found(writer, tmp_path, text=text)) <= {(1, 0, 0)}
    assert found(writer, tmp_path, text="before") == [(1, 0, 0)]


def test_a_trajectory_comes_back_with_all_that_was_said(writer, tmp_path):
    turns = ((True, "ask \ud800"), (False, "42\n"), (True, "<script>"))
    writer.add(7, [sample(5, 3, turns=turns, advantage=-0.5, last_version=6)])
    with SampleReader(tmp_path / "samples.db") as reader:
        one = reader.one(7, 5, 3)
        assert reader.one(7, 5, 4) is None
    assert [(turn["role"], turn["text"]) for turn in one["said"]] == [
        ("model", "ask ?"), ("environment", "42\n"), ("model", "<script>"),
    ]  # fmt: skip
    assert (one["advantage"], one["first_version"], one["last_version"]) == (-0.5, 3, 6)


def test_a_step_that_is_done_again_replaces_what_was_kept_of_it(writer, tmp_path):
    writer.add(1, [sample(0, 0, "first attempt"), sample(0, 1)])
    writer.add(2, [sample(0, 0, "later")])
    writer.add(1, [sample(0, 0, "second attempt")])
    assert found(writer, tmp_path) == [(1, 0, 0), (2, 0, 0)]
    assert found(writer, tmp_path, text="first attempt") == []
    assert found(writer, tmp_path, text="second attempt") == [(1, 0, 0)]


def test_whole_old_steps_go_where_the_file_would_outgrow_its_bound(tmp_path):
    writer = SampleWriter(tmp_path / "samples.db", max_bytes=300_000)
    for step in range(1, 60):
        writer.add(step, [sample(0, place, f"{step} {place} {hash((step, place))} " * 20) for place in range(16)])
    writer.close()
    kept = {step for step, _, _ in found(writer, tmp_path, sort="-step")}
    with SampleReader(tmp_path / "samples.db") as reader:
        first, last = reader.steps()
        assert len(reader.find({"step": first}, sort="step")) == 16
        assert reader.find({"text": "1 0"}) == [] or first == 1
    assert last == max(kept) == 59
    assert first > 1
    assert (tmp_path / "samples.db").stat().st_size < 450_000


def test_a_step_that_cannot_be_written_leaves_what_was_there(writer, tmp_path):
    writer.add(1, [sample(0, 0)])
    with pytest.raises(ValueError, match="too large"):
        writer.add(2, [sample(0, 0), sample(2**20, 0)])
    assert found(writer, tmp_path) == [(1, 0, 0)]


def test_a_file_that_is_not_there_or_is_none_is_said(tmp_path):
    with pytest.raises(LogError, match="no trajectories were kept"):
        SampleReader(tmp_path / "samples.db")
    (tmp_path / "samples.db").write_bytes(b"not a database" * 100)
    with pytest.raises(LogError, match="no trajectories that can be read"):
        SampleReader(tmp_path / "samples.db")
    with pytest.raises(sqlite3.Error):
        SampleWriter(tmp_path / "samples.db")

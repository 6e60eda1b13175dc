"""Trajectories of a run as text: found by step, reward and words, replaced with their step, bounded."""

from __future__ import annotations

import random
import sqlite3

import pytest

from rlmux.core.errors import LogError, UserError
from rlmux.report import samples
from rlmux.report.samples import KeptSample, SampledToken, SampleReader, SampleWriter, SpecialTexts, whole_of


def sample(prompt: int, place: int, answer: str = "an answer", *, reward: float = 0.0, **fields) -> KeptSample:
    figures = {"advantage": 0.0, "stop": "stop", "tokens": len(answer), "num_turns": 1, "first_version": 3}
    turns = ((True, answer),)
    return KeptSample(
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


@pytest.mark.parametrize("many", [0, 1000])
def test_words_of_many_and_of_few_are_found_alike(writer, tmp_path, monkeypatch, many):
    monkeypatch.setattr(samples, "_MANY", many)
    for step in (1, 2):
        writer.add(step, [sample(0, at, "carry" if at % 2 else "borrow", reward=at / 10) for at in range(6)])
    assert found(writer, tmp_path, text="carry") == [(step, 0, at) for step in (1, 2) for at in (1, 3, 5)]
    assert found(writer, tmp_path, text="carry", sort="-step") == [(step, 0, at) for step in (2, 1) for at in (5, 3, 1)]
    assert found(writer, tmp_path, text="carry", step=2, least=0.2) == [(2, 0, 3), (2, 0, 5)]
    best = [(step, 0, at) for at in (5, 3, 1) for step in (1, 2)]
    assert found(writer, tmp_path, text="carry", sort="-reward") == best
    assert found(writer, tmp_path, text="carry", sort="-reward", most=0.4) == best[2:]
    assert found(writer, tmp_path, text="carry", sort="reward", least=0.2, step=1) == [(1, 0, 3), (1, 0, 5)]
    assert found(writer, tmp_path, text="carry", sort="-step", step=1) == [(1, 0, 5), (1, 0, 3), (1, 0, 1)]
    assert found(writer, tmp_path, text="carry", sort="-step", least=0.5) == [(2, 0, 5), (1, 0, 5)]
    assert found(writer, tmp_path, text="carry", sort="-step", least=2.0) == []


@pytest.mark.parametrize("many", [0, 3, 1000])
def test_every_way_to_search_finds_what_a_filter_in_python_finds(writer, tmp_path, monkeypatch, many):
    monkeypatch.setattr(samples, "_MANY", many)
    draw, kept = random.Random(many), {}
    for step in (1, 2, 3):
        made = [
            sample(at // 3, at % 3, draw.choice(["carry", "borrow", "carry on"]), reward=draw.randint(0, 4) / 4)
            for at in range(9)
        ]
        writer.add(step, made)
        kept |= {(step, one.prompt, one.sample): one for one in made}
    for sort in samples.SORTS:
        for asked in ({}, {"step": 2}, {"least": 0.5}, {"most": 0.25}, {"least": 0.25, "most": 0.75, "step": 3}):
            expected = [
                place
                for place, one in kept.items()
                if "carry" in one.turns[0][1]
                and asked.get("step", place[0]) == place[0]
                and asked.get("least", 0.0) <= one.reward <= asked.get("most", 1.0)
            ]
            key = sort.removeprefix("-")
            if key == "step":
                expected.sort(reverse=sort[0] == "-")
            else:
                sign = -1 if sort[0] == "-" else 1
                expected.sort(key=lambda place: (sign * getattr(kept[place], key), place))
            assert found(writer, tmp_path, text="carry", sort=sort, **asked) == expected, (sort, asked)


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


def test_tokens_come_back_by_turn_with_their_versions_and_log_probs_in_half_precision(writer, tmp_path):
    turns = ((True, "carry"), (False, "42"), (True, " one"))
    tokens = ((SampledToken("ca", -0.25, 6), SampledToken("rry\ud800", -1e9, 7)), (SampledToken(" one", -3.001, 7),))
    writer.add(7, [sample(5, 3, turns=turns, tokens_by_turn=tokens), sample(5, 4)])
    with SampleReader(tmp_path / "samples.db") as reader:
        one, other = whole_of(reader, 7, 5, 3), whole_of(reader, 7, 5, 4)
    first, between, second = one["said"]
    assert first["tokens"][0] == {"text": "ca", "logprob": -0.25, "version": 6}
    assert (first["tokens"][1]["text"], first["tokens"][1]["version"]) == ("rry?", 7)
    assert first["tokens"][1]["logprob"] < -50000
    assert second["tokens"][0]["logprob"] == pytest.approx(-3.001, rel=1e-3)
    assert "tokens" not in between
    assert "tokens" not in other["said"][0]
    writer.add(7, [sample(5, 3)])
    with SampleReader(tmp_path / "samples.db") as reader:
        assert "tokens" not in reader.one(7, 5, 3)["said"][0]


def test_texts_with_special_tokens_are_shown_where_they_are_wanted(writer, tmp_path):
    turns = ((True, "carry"), (False, "42 \ud800" * 50_000), (True, " one"))
    tokens = ((SampledToken("carry", -0.25, 6), SampledToken("", -1.0, 6)), (SampledToken(" one", -3.0, 7),))
    texts = ("carry<end>", turns[1][1] + "<end>", " one")
    special = SpecialTexts(prompt_text="<bos><bos>prompt", turns=texts, names_by_turn=({1: "<end>"}, {}))
    writer.add(7, [sample(5, 3, turns=turns, tokens_by_turn=tokens, special=special)])
    with SampleReader(tmp_path / "samples.db") as reader:
        plain, one = (reader.one(7, 5, 3, special_tokens=shows) for shows in (False, True))
    assert plain["prompt_text"] == "prompt 5"
    assert [token["text"] for token in plain["said"][0]["tokens"]] == ["carry", ""]
    assert one["prompt_text"] == "<bos><bos>prompt"
    assert [turn["text"] for turn in one["said"]] == [text.replace("\ud800", "?") for text in texts]
    assert [token["text"] for token in one["said"][0]["tokens"]] == ["carry", "<end>"]
    writer.add(7, [sample(5, 3)])
    with (
        SampleReader(tmp_path / "samples.db") as reader,
        pytest.raises(UserError, match=r"^special tokens of this trajectory were not kept; accepted: a run of this"),
    ):
        reader.one(7, 5, 3, special_tokens=True)


def test_a_file_without_tokens_of_an_earlier_version_is_read_and_goes_on(writer, tmp_path):
    writer.add(1, [sample(0, 0)])
    writer.close()
    with sqlite3.connect(tmp_path / "samples.db") as connection:
        connection.execute("DROP TABLE token")
        connection.execute("DROP TABLE special")
    connection.close()
    with SampleReader(tmp_path / "samples.db") as reader:
        assert reader.one(1, 0, 0)["said"][0]["text"] == "an answer"
    later = SampleWriter(tmp_path / "samples.db")
    later.add(2, [sample(0, 0, tokens_by_turn=((SampledToken("a", -1.0, 1),),))])
    later.close()
    with SampleReader(tmp_path / "samples.db") as reader:
        assert reader.one(2, 0, 0)["said"][0]["tokens"] == [{"text": "a", "logprob": -1.0, "version": 1}]


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

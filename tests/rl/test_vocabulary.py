from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.config import ModelConfig
from rlmux.rl.vocabulary import CharVocabulary, FolderVocabulary, load_vocabulary


@given(st.text(alphabet=CharVocabulary.CHARACTERS))
def test_characters_round_trip(text: str) -> None:
    vocabulary = CharVocabulary()
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_special_tokens_decode_to_nothing() -> None:
    vocabulary = CharVocabulary()
    assert vocabulary.decode((*vocabulary.encode("12"), vocabulary.eos_token, vocabulary.pad_token)) == "12"


def test_a_foreign_character_is_named() -> None:
    with pytest.raises(PipelineError, match="'é'"):
        CharVocabulary().encode("café")


def test_a_saved_vocabulary_is_read_back_as_a_tokenizer_that_agrees(tmp_path: Path) -> None:
    built_in = CharVocabulary()
    built_in.save_pretrained(tmp_path)
    read = load_vocabulary(ModelConfig(path=str(tmp_path)))
    assert isinstance(read, FolderVocabulary)
    text = "s:52=\n a' b . , ~"
    assert read.encode(text) == built_in.encode(text)
    assert read.decode((*read.encode(text), read.eos_token)) == text
    assert (read.vocab_size, read.eos_token, read.pad_token) == (built_in.vocab_size, 1, 0)


def test_every_token_that_the_generation_config_lists_stops(tmp_path: Path) -> None:
    CharVocabulary().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert FolderVocabulary(tmp_path).stop_tokens == (1, 7)


def test_a_folder_without_tokenizer_takes_characters(tmp_path: Path) -> None:
    assert isinstance(load_vocabulary(ModelConfig(path=str(tmp_path))), CharVocabulary)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(UserError, match="no folder nowhere/here"):
        load_vocabulary(ModelConfig(path="nowhere/here"))

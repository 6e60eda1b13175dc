from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("text", ["{", "[" * 3000 + "]" * 3000, "[1]"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_of_a_checkpoint_that_is_not_an_object_is_named(tmp_path: Path, name: str, text: str) -> None:
    CharVocabulary().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"^model\.path: .*{name}|^model\.path: the tokenizer"):
        FolderVocabulary(tmp_path)


def test_a_folder_without_tokenizer_takes_characters(tmp_path: Path) -> None:
    assert isinstance(load_vocabulary(ModelConfig(path=str(tmp_path))), CharVocabulary)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(UserError, match="no folder nowhere/here"):
        load_vocabulary(ModelConfig(path="nowhere/here"))


def save_checkpoint(folder: Path, tokenizer: Any) -> FolderVocabulary:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return FolderVocabulary(folder)


def byte_level(folder: Path) -> FolderVocabulary:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return save_checkpoint(folder, tokenizer)


def byte_fallback(folder: Path) -> FolderVocabulary:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "n"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return save_checkpoint(folder, tokenizer)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_make_the_text_and_none_has_a_sign_for_half_a_letter(make, tmp_path: Path) -> None:
    vocabulary = make(tmp_path)
    text = "a né 😀\n"
    tokens = vocabulary.encode(text)
    found = [vocabulary.token_bytes(token) for token in (*tokens, vocabulary.eos_token)]
    assert b"".join(each for each in found if each is not None) == text.encode()
    assert None not in found
    assert found[-1] == b"", "a special token adds nothing"
    assert max(map(len, found)) == 1


def test_an_added_token_has_the_bytes_of_its_text_and_one_beyond_the_vocabulary_none(tmp_path: Path) -> None:
    vocabulary = byte_level(tmp_path)
    assert vocabulary.token_bytes(vocabulary.encode("<think>")[0]) == b"<think>"
    assert vocabulary.token_bytes(vocabulary.vocab_size + 5) is None


def test_special_tokens_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    for vocabulary in (CharVocabulary(), byte_level(tmp_path)):
        tokens = (*vocabulary.encode("12"), vocabulary.eos_token)
        assert vocabulary.decode(tokens, special_tokens=True) == "12<eos>"

"""Text to tokens and back, behind one small protocol.

    load_vocabulary(model) ──▶ CharVocabulary     one token per printable character: built-in, no import
                           └─▶ FolderVocabulary   the tokenizer of a local Hugging Face checkpoint

A prompt of plain text begins with what the tokenizer puts before a text (BOS). A chat template writes its own.

Control tokens in text. A text that its author writes whole (a prompt of plain text, an answer, a reply to one) may have
them. In a chat the template alone writes them: what messages of other roles than the assistant's contain is text, be it
the name of a control token.

Invariant: `decode(encode(text)) == text` for what `encode` accepts; special tokens decode to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from rlmux.core.errors import PipelineError, UserError
from rlmux.core.json_text import parse_json
from rlmux.rl.config import ModelConfig
from rlmux.rl.literal_chat import LiteralChat
from rlmux.rl.token_bytes import TokenBytes
from rlmux.rl.types import Prompt

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


RenderChat = Callable[[Sequence[Mapping[str, Any]]], str]
"""Makes one text of messages."""


class Vocabulary(Protocol):
    """What tasks, env workers and engines need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""

    @property
    def pad_token(self) -> int:
        """Fills rows of a micro-batch; never predicted."""

    @property
    def eos_token(self) -> int:
        """Ends an answer; appended to demonstrations."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """All tokens that end an answer, `eos_token` first."""

    @property
    def opening_tokens(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts before a text, such as BOS."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` writes the special tokens of a chat."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, without any special token added. Raises PipelineError for a text that has none."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], rendered: str, render: RenderChat | None = None
    ) -> tuple[int, ...]:
        """Tokens of `rendered`, which `render` made of these messages, with no control token out of their text.

        `render`: None: `render_chat`.
        """

    def has_control_names(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message that is not the assistant's contains the name of a control token: `encode_chat` then makes
        other tokens than `encode`."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens `encode` makes of each text."""

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of tokens, special tokens left out or written by name."""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text, part of a character perhaps; none for a special token.

        None where the tokenizer does not tell them.
        """

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_answered: bool = False,
    ) -> str:
        """One prompt text from messages of `role` and `content`. `is_answered`: the last one is an answer, and closed.

        Raises UserError where there is no chat template, or it refuses them.
        """

    def render_reply(self, text: str) -> tuple[int, ...]:
        """Tokens between two turns of the model in a chat, for a message of role `tool`. Needs a chat template."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained(folder)` reads."""


class CharVocabulary:
    """One token per printable ASCII character and newline, shared by all built-in tasks."""

    PAD = "<pad>"
    EOS = "<eos>"
    CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))

    def __init__(self) -> None:
        self._text_by_token = ["", "", *self.CHARACTERS]
        self._token_by_char = {char: token for token, char in enumerate(self.CHARACTERS, start=2)}

    pad_token = 0
    eos_token = 1
    stop_tokens: tuple[int, ...] = (1,)
    opening_tokens: tuple[int, ...] = ()
    has_chat_template = False
    vocab_size = 2 + len(CHARACTERS)

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple([self._token_by_char[char] for char in text])
        except KeyError as missing:
            raise PipelineError(
                f"the character {missing.args[0]!r} in {text[:40]!r} is not in the built-in vocabulary "
                "(printable ASCII and newline); a model.path with its own tokenizer takes any text"
            ) from None

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(self.encode(text)) for text in texts]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], rendered: str, render: RenderChat | None = None
    ) -> tuple[int, ...]:
        return self.encode(rendered)

    def has_control_names(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        return False

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        text_by_token = [self.PAD, self.EOS, *self.CHARACTERS] if special_tokens else self._text_by_token
        return "".join([text_by_token[token] for token in tokens])

    def token_bytes(self, token: int) -> bytes | None:
        text: str = self._text_by_token[token]
        return text.encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_answered: bool = False,
    ) -> str:
        """Their contents, one a line: there is no chat template, and no place for tools."""
        return "\n".join(message["content"] for message in messages) + "\n"

    def render_reply(self, text: str) -> tuple[int, ...]:
        return self.encode(text)

    def save_pretrained(self, folder: Path) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocab = {self.PAD: self.pad_token, self.EOS: self.eos_token, **self._token_by_char}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=self.PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer,
            pad_token=self.PAD,
            eos_token=self.EOS,
            padding_side="right",
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)


class FolderVocabulary:
    """The tokenizer of a local Hugging Face checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the formats of tokenizers fail in their own ways
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"model.path: the tokenizer in {folder} cannot be read: {reason}") from error
        if self._tokenizer.eos_token_id is None:
            raise UserError(f"model.path: the tokenizer in {folder} names no eos_token")
        self.eos_token: int = self._tokenizer.eos_token_id
        pad_token = self._tokenizer.pad_token_id
        self.pad_token: int = self.eos_token if pad_token is None else pad_token
        self.vocab_size: int = len(self._tokenizer)
        num_embedded = _num_embedded(folder)
        if num_embedded is not None and num_embedded < self.vocab_size:
            raise UserError(
                f"model.path: {folder} embeds {num_embedded} tokens, fewer than its tokenizer's {self.vocab_size}; "
                "accepted: a tokenizer that fits"
            )
        self.stop_tokens = _stop_tokens(folder, self.eos_token)
        self.opening_tokens = _opening_tokens(self._tokenizer)
        self.has_chat_template = self._tokenizer.chat_template is not None

    def encode(self, text: str) -> tuple[int, ...]:
        check_unicode(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], rendered: str, render: RenderChat | None = None
    ) -> tuple[int, ...]:
        check_unicode(rendered)
        if self.has_control_names(messages):
            return self._literal_chat.encode(messages, render or self.render_chat)
        return self.encode(rendered)

    def has_control_names(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        return self._literal_chat.is_needed(messages)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        for text in texts:
            check_unicode(text)
        return [len(tokens) for tokens in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token: int) -> bytes | None:
        return self._bytes_of_tokens.of(token)

    @cached_property
    def _literal_chat(self) -> LiteralChat:
        return LiteralChat(self._tokenizer, self.stop_tokens)

    @cached_property
    def _bytes_of_tokens(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        is_answered: bool = False,
    ) -> str:
        if not self.has_chat_template:
            raise UserError(
                "model.path: its tokenizer has no chat template for messages; accepted: texts, or a tokenizer with one"
            )
        is_prefilled = messages[-1]["role"] == "assistant" and not is_answered
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                tools=None if tools is None else list(tools),
                add_generation_prompt=not is_prefilled and not is_answered,
                continue_final_message=is_prefilled,
            )
        except Exception as error:  # a template is the checkpoint's own program
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"model.path: its chat template refuses these messages: {reason}") from error
        return text

    def render_reply(self, text: str) -> tuple[int, ...]:
        """What a chat template renders behind the token that ended the turn, as in TRL's GRPOTrainer.

        Raises UserError for a template that refuses such messages, or leaves them out.
        """
        prompt = [{"role": "user", "content": "a"}]
        answered = [*prompt, {"role": "assistant", "content": "b"}]
        replied = [*answered, {"role": "tool", "content": text}]
        before = self.encode(self._render(answered))
        render = partial(self._render, add_generation_prompt=True)
        if self.has_control_names(replied):
            whole = self._literal_chat.encode(replied, render)
        else:
            whole = self.encode(render(replied))
        if text and whole == self.encode(render(answered)):
            raise UserError(
                "model.path: its chat template leaves out a message of role 'tool'; accepted: one with tools"
            )
        num_prompt = len(self.encode(self._render(prompt)))
        ends = [place for place, token in enumerate(before) if place >= num_prompt and token in self.stop_tokens]
        num_before = ends[-1] + 1 if ends else len(before)
        if whole[:num_before] != before[:num_before]:
            raise UserError(
                "model.path: its chat template changes earlier messages for one of role 'tool'; accepted: one that "
                "adds it behind them"
            )
        return whole[num_before:]

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is the checkpoint's own program
            role = messages[-1]["role"]
            raise UserError(f"model.path: its chat template refuses a message of role {role!r}: {error}") from error
        return text

    def save_pretrained(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def load_vocabulary(model: ModelConfig) -> Vocabulary:
    """The checkpoint's own tokenizer where it has one, else one token per character."""
    if model.path is None:
        return CharVocabulary()
    folder = Path(model.path)
    if not folder.is_dir():
        raise UserError(f"model.path: no folder {model.path}; a local Hugging Face checkpoint is accepted")
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return FolderVocabulary(folder)
    if (num_embedded := _num_embedded(folder)) not in (None, CharVocabulary.vocab_size):
        raise UserError(
            f"model.path: {folder} has no tokenizer for its {num_embedded} tokens; accepted: a folder with one of "
            f"{', '.join(_TOKENIZER_FILES)}"
        )
    return CharVocabulary()


def opening_tokens_of(vocabulary: Vocabulary, prompt: Prompt) -> tuple[int, ...]:
    """The special tokens before a prompt's text: none where a chat template wrote them into it."""
    return () if _is_chat(vocabulary, prompt) else vocabulary.opening_tokens


def reply_tokens_of(vocabulary: Vocabulary, prompt: Prompt, text: str) -> tuple[int, ...]:
    """Tokens of an environment's reply as the model meets them: in a chat, a message of role `tool`."""
    return vocabulary.render_reply(text) if _is_chat(vocabulary, prompt) else vocabulary.encode(text)


def prompt_tokens_of(vocabulary: Vocabulary, prompt: Prompt) -> tuple[int, ...]:
    """Tokens of a prompt as the model meets them, in rollouts and in demonstrations."""
    if prompt.messages is None:
        return vocabulary.opening_tokens + vocabulary.encode(prompt.text)
    return opening_tokens_of(vocabulary, prompt) + vocabulary.encode_chat(prompt.messages, prompt.text)


def stop_tokens_of(vocabulary: Vocabulary, stop: Sequence[str]) -> tuple[int, ...]:
    """The tokens that end a turn: those of the vocabulary, then one for each stop text of a task.

    Raises UserError for a stop text that is not one token.
    """
    tokens = list(vocabulary.stop_tokens)
    for text in stop:
        encoded = vocabulary.encode(text)
        if len(encoded) != 1:
            raise UserError(f"model.path: its tokenizer makes {len(encoded)} tokens of the stop text {text!r}, not 1")
        tokens += encoded
    return tuple(dict.fromkeys(tokens))


def check_unicode(text: str) -> None:
    """Raises PipelineError for a text with half of a surrogate pair: it has no UTF-8, and no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half, first = text[error.start], max(0, error.start - 20)
        raise PipelineError(
            f"{half!r} in {text[first : error.start + 20]!r} is half of a surrogate pair; accepted: whole characters"
        ) from None


def _is_chat(vocabulary: Vocabulary, prompt: Prompt) -> bool:
    return prompt.messages is not None and vocabulary.has_chat_template


def _opening_tokens(tokenizer: Any) -> tuple[int, ...]:
    """What tokenizer(text) puts before a text. What it puts behind one is left out: the model continues the text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    tokens, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
    num_opening = is_special.index(0) if 0 in is_special else 0
    return tuple(tokens[:num_opening])


def _num_embedded(folder: Path) -> int | None:
    """Rows of a checkpoint's embedding; None if its config.json lacks the number."""
    path = folder / "config.json"
    found = _read_object(path).get("vocab_size")
    return found if isinstance(found, int) else None


def _stop_tokens(folder: Path, eos_token: int) -> tuple[int, ...]:
    """Stop tokens; chat models often have several, which are only in generation_config.json."""
    path = folder / "generation_config.json"
    listed = _read_object(path).get("eos_token_id")
    extra = listed if isinstance(listed, list) else [listed]
    return (eos_token, *(token for token in extra if token is not None and token != eos_token))


def _read_object(path: Path) -> dict[str, Any]:
    """The keys of a checkpoint's file; none without the file."""
    try:
        found = parse_json(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: {path} is not JSON: {error}; accepted: a file as transformers writes it"
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            f"model.path: {path} is a {type(found).__name__}; accepted: an object, as transformers writes it"
        )
    return found

"""Prompts become tokens as the checkpoint's own tokenizer says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.rl.config import ModelConfig, SftWarmupConfig, TrainingConfig
from rlmux.rl.demonstrations import demonstration_batch
from rlmux.rl.tasks import make_task
from rlmux.rl.user_code.pipeline_env import PipelineEnv
from rlmux.rl.user_code.reward_preflight import complaint_about
from rlmux.rl.vocabulary import CharVocabulary, load_vocabulary

BOS = CharVocabulary.vocab_size
MakeConfig = Callable[..., TrainingConfig]
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def bos_folder(tmp_path: Path) -> Path:
    """A tokenizer that begins texts with BOS and ends them with EOS, as tokenizer(text) shows."""
    return save_tokenizer(tmp_path / "bos")


def save_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    CharVocabulary().save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    marks = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=marks)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    assert tokenizer("a")["input_ids"] == [BOS, *CharVocabulary().encode("a"), 1]
    return folder


def file_config(make_config: MakeConfig, folder: Path, prompt: Any, **changes: Any) -> TrainingConfig:
    rows = folder.parent / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": prompt, "answer": "b"}) + "\n")
    return make_config("file", path=str(rows), model=ModelConfig(path=str(folder)), **changes)


def prompt_tokens(config: TrainingConfig) -> tuple[int, ...]:
    return PipelineEnv(config).begin_step(1)[0].prompt_tokens


def test_a_plain_prompt_begins_with_the_tokenizers_bos(make_config: MakeConfig, bos_folder: Path) -> None:
    config = file_config(make_config, bos_folder, "a?")
    assert prompt_tokens(config) == (BOS, *CharVocabulary().encode("a?"))


def test_demonstrations_begin_with_it_too_and_answers_do_not(make_config: MakeConfig, bos_folder: Path) -> None:
    config = file_config(make_config, bos_folder, "a?", sft_warmup=SftWarmupConfig(num_updates=1, batch_size=1))
    vocabulary = load_vocabulary(config.model)
    task = make_task(config.task, seed=0, vocabulary=vocabulary)
    (shown,) = demonstration_batch(config, task, vocabulary, 0)
    assert shown.prompt_tokens == prompt_tokens(config)
    assert shown.answer_tokens == (*CharVocabulary().encode("b"), 1)


@pytest.mark.parametrize(("length", "complaint"), [(63, None), (64, "the prompt has 65 tokens; accepted: 1 to 64")])
def test_the_check_before_a_run_counts_bos(
    make_config: MakeConfig, bos_folder: Path, length: int, complaint: str | None
) -> None:
    found = complaint_about(file_config(make_config, bos_folder, "a" * length))
    assert found is None if complaint is None else complaint in (found or "")


def test_a_rendered_chat_template_gets_no_second_bos(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "chat", CHAT_TEMPLATE)
    config = file_config(make_config, folder, [{"role": "user", "content": "a?"}])
    assert prompt_tokens(config) == (BOS, *CharVocabulary().encode("[user]a?[assistant]"))


def test_messages_without_a_template_are_refused_before_the_start(make_config: MakeConfig, bos_folder: Path) -> None:
    config = file_config(make_config, bos_folder, [{"role": "user", "content": "a?"}])
    assert complaint_about(config) == (
        f"{config.task.path} row 1: model.path: its tokenizer has no chat template for messages; accepted: texts, or a "
        "tokenizer with one"
    )


@pytest.mark.parametrize("role", ["system", "user"])
def test_messages_that_the_template_refuses_are_refused_by_row_in_its_words(
    make_config: MakeConfig, tmp_path: Path, role: str
) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHAT_TEMPLATE
    config = file_config(make_config, save_tokenizer(tmp_path / "chat", strict), [{"role": role, "content": "a?"}])
    refused = f"{config.task.path} row 1: model.path: its chat template refuses these messages: no system here"
    assert complaint_about(config) == (refused if role == "system" else None)


def test_a_call_of_a_tool_without_content_reaches_the_template(make_config: MakeConfig, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}<{{ m.tool_calls[0].function.name }}"
        "({{ m.tool_calls[0].function.arguments | tojson }}){{ m.content }}>{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": {"of": ["a"], "at": None}}}
    asked = [
        {"role": "user", "content": "a?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_calls": None},
    ]
    config = file_config(make_config, save_tokenizer(tmp_path / "chat", template), asked)
    assert prompt_tokens(config) == CharVocabulary().encode('a?<find({"of": ["a"]})>1')


def test_a_tokenizer_without_bos_adds_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    CharVocabulary().save_pretrained(tmp_path / "plain")
    config = file_config(make_config, tmp_path / "plain", "a?")
    assert prompt_tokens(config) == CharVocabulary().encode("a?")


TOOL_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}~{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL_MODULE = """
class Tool:
    def __init__(self, row):
        self.row = row

    def reply(self, turn):
        return None if turn == self.row["answer"] else "no"

def score(prompts, completions, **kwargs):
    wanted = [("assistant", "a"), ("tool", "no"), ("assistant", "b")]
    return [float([(m["role"], m["content"]) for m in messages] == wanted) for messages in completions]
"""


@pytest.fixture
def tool_config(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str | None], TrainingConfig]]:
    """A row of messages with an environment of the user's, and a tokenizer with this chat template."""
    (tmp_path / "tool_module.py").write_text(TOOL_MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def make(template: str | None) -> TrainingConfig:
        folder = save_tokenizer(tmp_path / "tools", template)
        asked = [{"role": "user", "content": "a?"}]
        return file_config(make_config, folder, asked, environment="tool_module:Tool", reward="tool_module:score")

    yield make
    sys.modules.pop("tool_module", None)


def encode(text: str) -> tuple[int, ...]:
    """Characters; `$` is the end-of-sequence token."""
    return tuple(1 if char == "$" else CharVocabulary().encode(char)[0] for char in text)


def test_a_reply_in_a_chat_is_a_message_of_a_tool_as_the_template_says(tool_config, finish) -> None:
    env = PipelineEnv(tool_config(TOOL_TEMPLATE))
    requests = env.begin_step(1)
    said = (encode("a$"), True)
    replies, _ = env.on_turns([finish(request, said) for request in requests])
    assert {reply.tokens for reply in replies} == {encode("~[tool]no$~[assistant]")}, (
        "after the token that ended the turn"
    )
    env.on_turns([finish(request, said, (replies[0].tokens, False), (encode("b$"), True)) for request in requests])
    rewards = [each.reward for each in env.finish_step(1).trajectories]
    assert rewards == [1.0] * 6, "the reward gets what the environment said, without the template's marks"


def test_a_reply_to_messages_of_the_built_in_vocabulary_is_plain_text(tool_config, finish) -> None:
    config = tool_config(None)
    env = PipelineEnv(replace(config, model=ModelConfig()))  # the built-in vocabulary
    replies, _ = env.on_turns([finish(env.begin_step(1)[0], (encode("a$"), True))])
    assert replies[0].tokens == encode("no")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (TOOL_TEMPLATE, None),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            "model.path: its chat template refuses a message of role 'tool': no tools here",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "model.path: its chat template leaves out a message of role 'tool'",
        ),
    ],
)
def test_a_template_without_tools_is_refused_before_a_run(tool_config, template: str, complaint: str | None) -> None:
    found = complaint_about(tool_config(template))
    assert found is None if complaint is None else (found or "").startswith(complaint)


def test_an_empty_reply_in_a_chat_stands_in_its_frame(tool_config, finish) -> None:
    config = tool_config(TOOL_TEMPLATE)
    vocabulary = load_vocabulary(config.model)
    assert vocabulary.render_reply("") == encode("~[tool]$~[assistant]")


def test_control_tokens_in_a_reply_are_text(tool_config, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(tool_config(TOOL_TEMPLATE).model)
    assert vocabulary.render_reply("a<eos>b<bos>") == (
        *encode("~[tool]"),
        *CharVocabulary().encode("a<eos>b<bos>"),
        *encode("$~[assistant]"),
    )


def test_control_tokens_in_messages_are_text_but_for_those_of_the_assistant(make_config, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "chat", CHAT_TEMPLATE)
    asked = [{"role": "user", "content": "a<eos>?"}, {"role": "assistant", "content": "b<eos>"}]
    asked += [{"role": "user", "content": "c", "name": "<bos>"}]
    config = file_config(make_config, folder, asked)
    assert prompt_tokens(config) == (
        *(BOS, *CharVocabulary().encode("[user]a<eos>?[assistant]b"), 1),
        *CharVocabulary().encode("[user]c[assistant]"),
    )


def test_control_tokens_in_a_prompt_of_text_are_the_authors(make_config: MakeConfig, bos_folder: Path) -> None:
    config = file_config(make_config, bos_folder, "a<eos>b")
    assert prompt_tokens(config) == (BOS, *CharVocabulary().encode("a"), 1, *CharVocabulary().encode("b"))


@pytest.mark.parametrize("length", [46, 47])
def test_the_check_before_a_run_counts_control_tokens_as_text(make_config, tmp_path: Path, length: int) -> None:
    folder = save_tokenizer(tmp_path / "chat", CHAT_TEMPLATE)
    asked = [{"role": "user", "content": "<eos>" + "a" * (length - 5)}]
    found = complaint_about(file_config(make_config, folder, asked)) or ""
    assert ("the prompt has 65 tokens" in found) == (length == 47)


def test_half_a_surrogate_pair_in_a_row_is_refused_by_row(make_config: MakeConfig, bos_folder: Path) -> None:
    found = complaint_about(file_config(make_config, bos_folder, "a\ud83d?")) or ""
    assert found.endswith(r"row 1: '\ud83d' in 'a\ud83d?' is half of a surrogate pair; accepted: whole characters")

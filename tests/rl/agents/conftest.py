"""Tokenizers with the chat templates of well-known models, made here; configs of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlmux.rl.vocabulary import FolderVocabulary

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PLAIN = (
    "{% for m in messages %}" + _TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Without tools."""
_SYSTEM = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n"
)
_TOOL = (
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    _SYSTEM + "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}" + _TURN + "{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ m.content }}" + _CALLS + _TOOL
)
"""With tools, as Qwen 2.5 has them."""
THINKING = (
    _SYSTEM + "{% set ns = namespace(last_query=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}" + _TURN + "{% elif m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last_query and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}" + _CALLS + _TOOL
)
"""As Qwen 3: what was thought before the last question is left out, and a last answer has a place for thoughts."""


@pytest.fixture(scope="session")
def vocabulary_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FolderVocabulary]:
    """A byte-level tokenizer with this chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["assistant user tool system the name arguments"] * 20, trainer)

    def make(template: str) -> FolderVocabulary:
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        made = FolderVocabulary(folder)
        made.folder = folder  # type: ignore[attr-defined]
        return made

    return make

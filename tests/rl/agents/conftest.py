"""Tokenizers with the chat templates of well-known models, made here; configs of programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.rl.agents.fake_engine import FakeEngine, Say, play

from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, TaskConfig, TrainingConfig
from rlmux.rl.types import TrainingBatch
from rlmux.rl.user_code.pipeline_env import PipelineEnv
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


class Pipelines:
    """Makes pipelines of programs, each with its engine, in one folder; ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.code.mkdir()
        self.made: list[PipelineEnv] = []

    def make(
        self,
        program: str | None = None,
        *,
        say: Say | None = lambda before: "yes",
        rows: Sequence[Mapping[str, Any]] = ({"prompt": "Well?"},),
        group_size: int = 2,
        model: Path | None = None,
        rollout: Mapping[str, Any] | None = None,
        **task: Any,
    ) -> tuple[PipelineEnv, FakeEngine]:
        """`program`: the source of the command's file, behind `ask` and `report`. `task`: keys of the task."""
        if program is not None:
            (self.code / "agent.py").write_text(PROLOGUE + dedent(program))
            task.setdefault("command", "python agent.py")
        if task.get("name", "agent") == "agent":
            (self.folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            task = {"name": "agent", "path": str(self.folder / "rows.jsonl"), **task}
        config = TrainingConfig(
            name="p",
            seed=3,
            model=ModelConfig(path=None if model is None else str(model)),
            task=TaskConfig(**task),
            algorithm=AlgorithmConfig(prompts_per_step=len(rows), group_size=group_size),
            rollout=RolloutConfig(**{"max_new_tokens": 400, "max_prompt_tokens": 400, **(rollout or {})}),
        )
        env = PipelineEnv(config, code_folder=self.code)
        self.made.append(env)
        return env, FakeEngine(env.vocabulary, say)

    def play(self, program: str | None = None, **options: Any) -> TrainingBatch:
        return play(*self.make(program, **options))

    def log(self) -> list[str]:
        """The lines that programs wrote with `note`."""
        path = self.code / "log"
        return path.read_text().splitlines() if path.exists() else []


PROLOGUE = """
import json, os, sys, urllib.request
TASK = json.load(open(os.environ["RLMUX_TASK_FILE"]))

def post(path, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)

def ask(*texts, **more):
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    body = {"model": TASK["model"], "messages": messages, **more}
    return post("/chat/completions", body)["choices"][0]["message"]["content"]

def report(reward):
    open(os.environ["RLMUX_REWARD_FILE"], "w").write(str(reward))

def note(text):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "log")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (str(text) + chr(10)).encode())
    os.close(file)

"""
"""What programs of tests begin with."""


@pytest.fixture
def pipelines(tmp_path: Path) -> Iterator[Pipelines]:
    made = Pipelines(tmp_path)
    yield made
    for env in made.made:
        env._conversations.close()  # type: ignore[union-attr]

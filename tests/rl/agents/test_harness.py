"""A public harness, unchanged, is a command of a pipeline: mini-swe-agent works in its sandbox until it submits.

RLMUX_TEST_MINI names the program `mini` of an environment with mini-swe-agent (`pip install mini-swe-agent`); without
it, one on PATH is taken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from tests.rl.agents.conftest import QWEN, Pipelines

from rlmux.rl.vocabulary import FolderVocabulary

pytestmark = pytest.mark.slow
COMMAND = (
    "env MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors MSWEA_SILENT_STARTUP=1 "
    "{mini} --model openai/p --yolo --exit-immediately --cost-limit 0 --output run.traj.json --task {prompt}"
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def test_mini_swe_agent_is_a_program(
    pipelines: Pipelines, vocabulary_of: Callable[[str], FolderVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = os.environ.get("RLMUX_TEST_MINI") or shutil.which("mini")
    if mini is None:
        pytest.skip("no mini-swe-agent: neither RLMUX_TEST_MINI nor `mini` on PATH")
    monkeypatch.delenv("MSWEA_GLOBAL_CONFIG_DIR", raising=False)
    marked = pipelines.folder / "made"

    def say(before: str) -> str:
        command = SUBMIT if "<tool_response>" in before else f"echo fox | tee -a {marked}"
        return f'I work.\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'

    batch = pipelines.play(
        command=COMMAND.replace("{mini}", mini),
        rows=[{"prompt": "Write the word fox."}],
        reward_from="exit_code",
        num_retries=0,
        say=say,
        model=vocabulary_of(QWEN).folder,  # type: ignore[attr-defined]
        rollout={"max_prompt_tokens": 8000, "max_new_tokens": 8000},
    )
    assert [(each.reward, each.outcome) for each in batch.trajectories] == [(1.0, "ended")] * 2
    assert marked.read_text() == "fox\n" * 2
    for each in batch.trajectories:
        assert (each.num_turns, len(each.sequences)) == (2, 1), "one conversation, never made of text again"
        roles = [message["role"] for message in each.messages or ()]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        assert "fox" in (each.messages or ())[3]["content"]

"""What a program needs to ask: any client of OpenAI's or Anthropic's does the same, with nothing changed."""

import json
import os
import urllib.request
from pathlib import Path

TASK = json.loads(Path(os.environ["RLMUX_TASK_FILE"]).read_text())
"""The row of the trajectory, the name of the model, a seed."""


def ask(messages: list[dict[str, str]], max_tokens: int = 8) -> str:
    """The model's answer, which is put behind the messages."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": TASK["model"], "messages": messages, "max_tokens": max_tokens}).encode(),
        headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": answer})
    return answer


def report(reward: float) -> None:
    """The reward of the trajectory."""
    Path(os.environ["RLMUX_REWARD_FILE"]).write_text(str(reward))

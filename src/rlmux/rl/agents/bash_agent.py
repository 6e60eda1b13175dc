"""The program that `harbor` runs by default: a model with one tool, a shell in the sandbox.

    instruction ──▶ model ──▶ commands between ```bash fences ──▶ what they print ──▶ model ──▶ ... ──▶ no command: done

Commands stand in the text, so that a model without a chat template for tools can be trained. Run by its path: it
imports the standard library alone, as a container has no other.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

MAX_TURNS = 30
MAX_OUTPUT = 4000
COMMAND_S = 60
SYSTEM = (
    "You work in a Linux shell. Answer with one command between ```bash and ``` at a time; you are shown what it "
    "prints. When the task is done, answer without a command."
)
FENCED = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


def main() -> None:
    task = json.loads(Path(os.environ["RLMUX_TASK_FILE"]).read_text())
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["row"]["instruction"]}]
    for _ in range(MAX_TURNS):
        answer = ask(task["model"], messages)
        messages.append({"role": "assistant", "content": answer})
        found = FENCED.search(answer)
        if found is None:
            return
        messages.append({"role": "user", "content": run(found[1])})


def ask(model: str, messages: list[dict[str, str]]) -> str:
    """The model's answer; ends the program where the session has reached its limit."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": model, "messages": messages}).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as response:
            return str(json.load(response)["choices"][0]["message"]["content"] or "")
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace"), file=sys.stderr)
        sys.exit(0)


def run(command: str) -> str:
    """What a command prints, with its exit code."""
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_S,
            check=False,
        )
        printed, code = done.stdout, str(done.returncode)
    except subprocess.TimeoutExpired as late:
        printed, code = late.stdout or b"", f"none: it did not end within {COMMAND_S} s"
    return f"exit code {code}\n{printed.decode(errors='replace')[-MAX_OUTPUT:]}"


if __name__ == "__main__":
    main()

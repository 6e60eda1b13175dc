"""An agent with one turn: the model's answer is run as a command where the task's files are."""

import subprocess

from chat import TASK, ask

command = ask([{"role": "user", "content": TASK["row"]["instruction"]}], max_tokens=24)
subprocess.run(["timeout", "5", "bash", "-c", command], check=False)

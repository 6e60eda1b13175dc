"""What programs as environments cost, and what their waits give to others.

    python benchmarks/agents.py [--parts address,waits,kills] [--programs 64] [--questions 20] [--rounds 3]
                                [--wait-s 0.1,1,10] [--steps 4] [--trajectories 1000] [--json FILE]

Part `address`: so many programs ask at once, each one question after another in one growing chat, in a process of its
own with as many connections. Their questions are answered at once, by a stand-in for the rollout engine that takes no
time: what is left is the address. Milliseconds a question are elapsed seconds over all questions, and processor
seconds of the env worker over all questions.

Part `waits`: two pipelines of agents that wait for a tool between two questions, and one with single answers, on two
cores under `colocated` and under `rlmux`, a run each, one after the other; the ratio of their times.

Part `kills`: a thousand programs, killed at random while they run, each started again where it was; all of them must
end with the answers that they get undisturbed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from rlmux.rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, TaskConfig, TrainingConfig
from rlmux.rl.types import FinishedTurn, TrajectoryId, TrajectoryRequest
from rlmux.rl.user_code.pipeline_env import PipelineEnv

ANSWER_TOKENS = 16


class InstantEngine:
    """Answers each question at once, with the same tokens for the same place."""

    def __init__(self, env: PipelineEnv) -> None:
        self._env = env
        self._contexts: dict[TrajectoryId, tuple[TrajectoryRequest | None, list[int]]] = {}
        self.num_questions = 0

    def run_step(self, step: int) -> Any:
        """Run all programs of a step; its batch."""
        due = [FinishedTurn.opening(request.id) for request in self._env.begin_step(step)]
        while not self._env.is_step_complete(step):
            replies, _ = self._env.on_turns(due, 0.05)
            due = [self._answered(reply) for reply in replies]
        return self._env.finish_step(step)

    def _answered(self, reply: Any) -> FinishedTurn:
        self.num_questions += 1
        request, tokens = self._contexts.get(reply.id, (None, []))
        if reply.context is not None:
            request = reply.context.request
            tokens = [*reply.context.tokens, *reply.context.pending_tokens]
        else:
            tokens = [*tokens, *reply.tokens]
        assert request is not None
        made = [2 + (request.seed + len(tokens) + place) % 90 for place in range(ANSWER_TOKENS - 1)] + [1]
        self._contexts[reply.id] = request, [*tokens, *made]
        num = len(tokens) + len(made)
        return FinishedTurn(
            id=reply.id,
            tokens=(*tokens, *made),
            is_sampled=(True,) * num,
            logprobs=(-1.0,) * num,
            versions=(0,) * num,
            stop_reason="stop",
            num_turns=1,
        )


def write_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(50)))


def config_of(folder: Path, num_prompts: int, **task: Any) -> TrainingConfig:
    """A pipeline of programs, eight trajectories a prompt."""
    write_rows(folder)
    return TrainingConfig(
        name="agent",
        num_steps=100,
        model=ModelConfig(),
        task=TaskConfig(name="agent", path=str(folder / "rows.jsonl"), answer_key=None, **task),
        algorithm=AlgorithmConfig(prompts_per_step=num_prompts, group_size=8),
        rollout=RolloutConfig(max_prompt_tokens=256, max_new_tokens=4096),
    )


# --- the address ----------------------------------------------------------------------------------------------------


def serve_agent(num_questions: int, wait_s: float, ready: Any) -> None:
    """The user's agent: a server with a thread for each trajectory, which waits before each question but the first."""

    class Agent(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            pass

        def do_POST(self) -> None:
            task = json.loads(self.rfile.read(int(self.headers["content-length"])))
            connection = HTTPConnection("127.0.0.1", int(task["anthropic_base_url"].rsplit(":", 1)[1]))
            chat = [{"role": "user", "content": task["row"]["prompt"]}]
            for number in range(num_questions):
                time.sleep(wait_s if number else 0)
                body = json.dumps({"model": task["model"], "messages": chat, "max_tokens": ANSWER_TOKENS})
                headers = {"authorization": f"Bearer {task['api_key']}", "content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = json.loads(connection.getresponse().read())["choices"][0]["message"]
                chat += [answer, {"role": "user", "content": "more"}]
            out = json.dumps({"reward": len(set(chat[1]["content"])) / ANSWER_TOKENS}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Agent)
    ready.put(server.server_address[1])
    server.serve_forever()


@contextmanager
def agent_at(num_questions: int, wait_s: float) -> Iterator[str]:
    """The address of a user's agent in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    agent = context.Process(target=serve_agent, args=(num_questions, wait_s, ready), daemon=True)
    agent.start()
    try:
        yield f"http://127.0.0.1:{ready.get()}/"
    finally:
        agent.kill()


def measure_address(num_programs: int, num_questions: int) -> dict[str, float]:
    """Milliseconds of a question, of the second step of programs that all ask at once."""
    with agent_at(num_questions, 0.0) as url, tempfile.TemporaryDirectory() as scratch:
        env = PipelineEnv(config_of(Path(scratch), num_programs // 8, url=url, num_programs=num_programs))
        engine = InstantEngine(env)
        engine.run_step(1)
        asked, start, cpu = engine.num_questions, time.perf_counter(), time.process_time()
        engine.run_step(2)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        env.close()
    asked = engine.num_questions - asked
    return {"questions": asked, "ms": 1e3 * seconds / asked, "cpu_ms": 1e3 * cpu_s / asked}


# --- waits ----------------------------------------------------------------------------------------------------------

SPEC = """
cluster: {{pools: {{rollout: {{devices: 1}}, train: {{devices: 1}}}}}}
policy: {policy}
defaults:
  steps: {steps}
  model: {{hidden_size: 96, layers: 3, heads: 4, kv_heads: 2, intermediate_size: 192}}
  algorithm: {{name: grpo, prompts_per_step: 8, group_size: 8, learning_rate: 1e-3}}
  rollout: {{max_prompt_tokens: 32, max_new_tokens: 96, slots: 64}}
pipelines:
  - {{name: first, seed: 1, task: {{name: agent, path: rows.jsonl, answer_key: null, url: "{url}", programs: 64}}}}
  - {{name: second, seed: 2, task: {{name: agent, path: rows.jsonl, answer_key: null, url: "{url}", programs: 64}}}}
  - {{name: single, seed: 3, steps: {single_steps}, task: {{name: sort, digits: 16}}, rollout: {{max_new_tokens: 64}}}}
"""


def measure_waits(wait_s: float, steps: int) -> dict[str, float]:
    """Seconds of a run under each policy, without those in which processes start."""
    found = {}
    with agent_at(2, wait_s) as url, tempfile.TemporaryDirectory() as scratch:
        write_rows(Path(scratch))
        for policy in ("colocated", "rlmux"):
            file, out = Path(scratch, f"{policy}.yaml"), Path(scratch, policy)
            file.write_text(SPEC.format(policy=policy, url=url, steps=steps, single_steps=6 * steps))
            command = [sys.executable, "-m", "rlmux", "run", str(file), "--out", str(out), "--json"]
            found[policy] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["makespan_s"]
    return found


# --- kills ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(open(os.environ["RLMUX_TASK_FILE"]))
chat = [{"role": "user", "content": task["row"]["prompt"]}]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": task["model"], "messages": chat}).encode(),
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    chat += [json.load(urllib.request.urlopen(request))["choices"][0]["message"], {"role": "user", "content": "more"}]
open(os.environ["RLMUX_REWARD_FILE"], "w").write("1")
"""


def measure_kills(num_trajectories: int) -> dict[str, Any]:
    """Run programs of which a random one is killed every few milliseconds; what became of them."""
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch, "killed_program.py")
        program.write_text(PROGRAM)
        command = f"{sys.executable} {program}"
        config = config_of(Path(scratch), num_trajectories // 8, command=command, num_programs=4, num_retries=10)
        undisturbed = PipelineEnv(config)
        expected = InstantEngine(undisturbed).run_step(1)
        undisturbed.close()
        env, is_over, killed = PipelineEnv(config), threading.Event(), [0]

        def kill() -> None:
            chance = random.Random()
            while not is_over.wait(0.03):
                for process in psutil.process_iter(["cmdline"]):
                    if str(program) in (process.info["cmdline"] or []) and chance.random() < 0.15:
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
                            killed[0] += 1

        killer = threading.Thread(target=kill)
        killer.start()
        batch = InstantEngine(env).run_step(1)
        is_over.set()
        killer.join()
        env.close()
    same = sum(
        found.tokens == wanted.tokens and found.reward == wanted.reward
        for found, wanted in zip(batch.trajectories, expected.trajectories, strict=True)
    )
    return {
        "trajectories": len(batch.trajectories),
        "killed": killed[0],
        "retries": batch.logged["outcomes/retries"],
        "failed": batch.logged["outcomes/failed"],
        "as undisturbed": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="address,waits,kills")
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait-s", default="0.1,1,10")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parts, console = given.parts.split(","), Console()
    found: dict[str, Any] = {}
    if "address" in parts:
        rounds = [measure_address(given.programs, given.questions) for _ in range(given.rounds)]
        found["address"] = rounds
        table = Table("programs", "questions", "ms a question", "processor ms of the env worker")
        for each in rounds:
            table.add_row(str(given.programs), str(each["questions"]), f"{each['ms']:.2f}", f"{each['cpu_ms']:.2f}")
        console.print(table)
    if "waits" in parts:
        table = Table("wait s", "colocated s", "rlmux s", "colocated / rlmux")
        found["waits"] = {wait_s: measure_waits(float(wait_s), given.steps) for wait_s in given.wait_s.split(",")}
        for wait_s, seconds in found["waits"].items():
            ratio = seconds["colocated"] / seconds["rlmux"]
            table.add_row(wait_s, f"{seconds['colocated']:.1f}", f"{seconds['rlmux']:.1f}", f"{ratio:.2f}")
        console.print(table)
    if "kills" in parts:
        found["kills"] = measure_kills(given.trajectories)
        table = Table(*found["kills"])
        table.add_row(*(f"{value:g}" for value in found["kills"].values()))
        console.print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Real runs of a pipeline whose trajectories are sessions of programs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from tests.runtime.killed_runs import check_killed_twice
from tests.runtime.test_faults import KillsAtStages, pid_of

from rlmux.core.events import ChunkFinished, PipelineRestarted, ReplyArrived, StagePaused, WorkerLost
from rlmux.core.model import Cluster, Phase, Pool, Stage
from rlmux.rl.config import RolloutConfig

PROGRAM = """
    import json, os, time, urllib.request

    task = json.load(open(os.environ["RLMUX_TASK_FILE"]))

    def ask(messages):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            data=json.dumps({"model": task["model"], "messages": messages, "max_tokens": 8}).encode(),
            headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        )
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

    chat = [{"role": "user", "content": task["row"]["prompt"]}]
    chat.append(ask(chat))
    aside = ask([{"role": "user", "content": "aside " + chat[-1]["content"]}])
    time.sleep(WAIT_S)
    chat.append({"role": "user", "content": "and? " + aside["content"]})
    chat.append(ask(chat))
    text = chat[1]["content"] + chat[3]["content"]
    open(os.environ["RLMUX_REWARD_FILE"], "w").write(str(len(set(text)) / 10))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent.py").write_text(dedent(PROGRAM).replace("WAIT_S", "0.0"))
    (folder / "slow.py").write_text(dedent(PROGRAM).replace("WAIT_S", "0.6"))
    rows = [{"prompt": f"{number} + {number} = "} for number in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def agent_of(real, files: Path, program: str = "agent.py", *, num_steps: int = 3, **fields):
    """A pipeline of programs that ask twice in one chat, and once aside."""
    fields = {"command": f"{sys.executable} {files / program}", "num_programs": 6, "answer_key": None, **fields}
    given = real.submission(
        "agent", task="agent", num_steps=num_steps, seed=3, task_fields={"path": str(files / "rows.jsonl"), **fields}
    )
    rollout = RolloutConfig(max_prompt_tokens=24, max_new_tokens=64, num_slots=8)
    sft_warmup = replace(given.config.sft_warmup, num_updates=0)
    return replace(
        given,
        config=replace(given.config, rollout=rollout, sft_warmup=sft_warmup),
        pipeline=replace(given.pipeline, has_sft_warmup=False),
    )


@pytest.fixture(scope="module")
def undisturbed(real, files, tmp_path_factory):
    run = real.run(tmp_path_factory.mktemp("undisturbed"), [agent_of(real, files)])
    assert run.status == {"agent": "finished"}, run.scheduler.query.reason("agent")
    return run


def test_programs_train_to_the_same_weights_alone_and_beside_others(real, files, undisturbed, tmp_path):
    given = [agent_of(real, files), real.submission("busy", seed=2, num_steps=4)]
    shared = real.run(tmp_path, given, policy="rlmux")
    assert shared.status == {"agent": "finished", "busy": "finished"}
    assert shared.sha256["agent"] == undisturbed.sha256["agent"]


def test_logprobs_of_sessions_are_those_of_a_full_forward(undisturbed):
    gaps = [note.metrics["logprob_gap"] for note in undisturbed.recorder.notes if note.type == "step"]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4


def test_a_worker_of_each_role_may_die_while_programs_ask(real, files, undisturbed, tmp_path):
    """The rollout worker's successor gets the chats as they are; with the env worker all programs begin anew."""
    kills = KillsAtStages("agent", [("rollout", Stage.GENERATE), ("env", Stage.GENERATE), ("train", Stage.UPDATE)])
    run = real.run(tmp_path, [agent_of(real, files)], watch=kills)
    assert kills.left == []
    assert run.status == {"agent": "finished"}, run.scheduler.query.reason("agent")
    assert any(isinstance(event, WorkerLost | PipelineRestarted) for event in run.recorder.events)
    assert run.sha256 == undisturbed.sha256


class KillsRolloutsInTheMiddle:
    """Kills the rollout worker as some of its sessions have answers and some wait, up to `count` times."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.seen = 0
        self.killed: int | None = None

    def __call__(self, backend, recorder) -> bool:
        new, self.seen = recorder.events[self.seen :], len(recorder.events)
        is_amid = any(isinstance(event, ChunkFinished) and event.num_waiting_for_env and event.tokens for event in new)
        pid = pid_of(recorder, "agent", "rollout")
        if self.left and is_amid and pid is not None and pid != self.killed:
            self.left, self.killed = self.left - 1, pid
            os.kill(pid, signal.SIGKILL)
        return False


@pytest.mark.slow
def test_a_rollout_worker_may_die_in_the_middle_of_chats(real, files, tmp_path):
    alone = real.run(tmp_path / "alone", [agent_of(real, files, "slow.py")])
    kills = KillsRolloutsInTheMiddle(3)
    run = real.run(tmp_path / "run", [agent_of(real, files, "slow.py")], watch=kills)
    assert kills.left == 0, "nothing was killed: the test shows nothing"
    assert run.status == {"agent": "finished"}, run.scheduler.query.reason("agent")
    assert run.sha256 == alone.sha256


def test_devices_go_to_others_while_programs_compute(real, files, tmp_path):
    one = Cluster(pools={"core": Pool(name="core", phase=Phase.TRAIN, num_nodes=1)})
    given = [agent_of(real, files, "slow.py", num_steps=2), real.submission("busy", num_steps=6)]
    shared = real.run(tmp_path, given, policy="jigsaw", on=one)
    assert shared.status == {"agent": "finished", "busy": "finished"}
    assert any(isinstance(event, StagePaused) and event.is_waiting for event in shared.recorder.events)
    assert any(isinstance(event, ReplyArrived) for event in shared.recorder.events)


class KillsPrograms:
    """Kills programs at random while they run, some before they ask. A third of them, however slowly they run: what
    becomes of each is drawn when it is first seen."""

    def __init__(self, script: Path, seed: int) -> None:
        self.script, self.random, self.num_killed = str(script), random.Random(seed), 0
        self.looks_left: dict[int, int | None] = {}
        """Looks after which a process is killed, by its id; None: it is left alone."""

    def __call__(self, backend, recorder) -> bool:
        for process in psutil.process_iter(["cmdline", "pid"]):
            if self.script not in (process.info["cmdline"] or []):
                continue
            is_killed = self.random.random() < 1 / 3
            left = self.looks_left.setdefault(process.pid, self.random.randrange(4) if is_killed else None)
            if left == 0:
                self.num_killed += 1
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    process.kill()
            self.looks_left[process.pid] = None if not left else left - 1
        return False


def test_killed_programs_are_started_again_and_none_is_lost(real, files, undisturbed, tmp_path):
    """A program is deterministic, so one that was killed and started again asks and gets the same."""
    kills = KillsPrograms(files / "agent.py", seed=os.getpid())
    run = real.run(tmp_path, [agent_of(real, files, num_retries=10)], watch=kills)
    assert kills.num_killed > 0
    assert run.status == {"agent": "finished"}, run.scheduler.query.reason("agent")
    logged = [note.metrics for note in run.recorder.notes if note.type == "step"]
    assert sum(metrics["outcomes/retries"] for metrics in logged) > 0
    if not any(metrics["outcomes/failed"] for metrics in logged):
        assert run.sha256 == undisturbed.sha256


FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults:
  steps: 7
  model: {hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64}
  algorithm: {prompts_per_step: 4, group_size: 4}
  rollout: {max_prompt_tokens: 24, max_new_tokens: 64, slots: 8}
pipelines:
  - name: agent
    task: {name: agent, path: rows.jsonl, answer_key: null, command: python agent.py, programs: 6}
  - name: reverse
    task: {name: reverse, letters: 4}
"""


@pytest.mark.slow
def test_a_run_of_programs_that_is_killed_and_resumed_trains_to_the_same_weights(files):
    check_killed_twice(files, FILE, "agent")


def test_no_program_outlives_its_pipeline(files, undisturbed):
    scripts = [str(files / name) for name in ("agent.py", "slow.py")]
    assert [p for p in psutil.process_iter(["cmdline"]) if set(scripts) & set(p.info["cmdline"] or [])] == []

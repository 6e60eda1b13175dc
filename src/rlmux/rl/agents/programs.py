"""Programs: started once a trajectory, some at once, tried again where they fail, and ended with what they started.

    command, function    a process in a sandbox, with the gateway's address and a key of its own in its environment
    url                  one request to the user's agent, answered when it is done
    harbor               a process in the sandbox of its task, then the task's tests in the same one

    waiting ──a place is free──▶ running ──▶ ended, or over a limit ──▶ Outcome
                                   ▲  └────▶ failed ─┐
                                   └── again, fresh ─┘  at most `task.retries` times, then Outcome

All of it runs on the gateway's event loop; what blocks has threads.

A module of its own: what becomes of a program is told apart from what its session holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.agents.gateway import Caller, Gateway
from rlmux.rl.agents.outcomes import ENDED, Outcome, reward_in
from rlmux.rl.agents.session import Ask
from rlmux.rl.config import TrainingConfig
from rlmux.rl.sandboxes import make_sandbox
from rlmux.rl.sandboxes.harbor_suite import HarborTask, HarborVerdict, prepare, read_suite, verify
from rlmux.rl.sandboxes.sandbox import Gateway as SandboxGateway
from rlmux.rl.sandboxes.sandbox import RunningProgram, Sandbox, SandboxLimits
from rlmux.rl.types import Prompt, TrajectoryId

_LOOK_S = 0.05
"""Seconds between two looks at a running program."""
_OUTPUT_BYTES = 200_000_000
"""Largest file that a program writes, its output among them."""
_LAST_WORDS = 200
"""Characters of a program's output in the line of its outcome."""
_COLUMN = re.compile(r"\{([^{}]*)\}")
_FUNCTION_PROGRAM = Path(__file__).with_name("function_program.py")
_BASH_AGENT = Path(__file__).with_name("bash_agent.py")


class _FailedError(Exception):
    """The program failed; its text is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trajectory, as its program is started for it."""

    id: TrajectoryId
    prompt: Prompt
    seed: int
    """Of the program's own random numbers: a function of the pipeline's seed and the trajectory."""
    put: Callable[[Ask], None]
    note_refusal: Callable[[str], None]
    restart: Callable[[], None]
    """Called before each program."""
    state: Callable[[], tuple[int, str | None, str | None]]
    """(questions, limit that one ran into, first refusal) of the present program's session."""


def trial_seed(seed: int, id: TrajectoryId) -> int:
    """A number of 31 bits for one trajectory's program."""
    word = hashlib.blake2b(repr((seed, *id[:3])).encode(), digest_size=4).digest()
    return int.from_bytes(word, "little") >> 1


class Programs:
    """The programs of one pipeline."""

    def __init__(self, config: TrainingConfig, gateway: Gateway, folder: Path, code_folder: Path | None) -> None:
        """`folder`: where sandboxes are made. `code_folder`: where a command's files are looked for first."""
        self._config, self._task = config, config.task
        self._gateway = gateway
        self._folder, self._code_folder = folder, code_folder
        self._places = asyncio.Semaphore(config.task.num_programs)
        self._threads = ThreadPoolExecutor(2 * config.task.num_programs + 2, thread_name_prefix="program")
        self._numbers = 0
        memory_gb = config.task.program_memory_gb
        self._limits = SandboxLimits(
            memory_bytes=None if memory_gb is None else int(memory_gb * 1e9), file_bytes=_OUTPUT_BYTES
        )

    @cached_property
    def _suite(self) -> Mapping[str, HarborTask]:
        return {task.name: task for task in read_suite(Path(self._task.path or ""))}

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """The client of the user's agent; one takes as long to make as some programs run."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._task.num_programs)
        return httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)

    async def run(self, trial: Trial) -> Outcome:
        """Run the trial's program, again where it fails; its outcome."""
        async with self._places:
            num_retries = 0
            while True:
                trial.restart()
                outcome = await self._attempt(trial)
                if outcome.kind != "failed" or num_retries == self._task.num_retries:
                    return replace(outcome, num_retries=num_retries)
                num_retries += 1

    async def _attempt(self, trial: Trial) -> Outcome:
        key = f"rlmux-{secrets.token_hex(16)}"
        caller = Caller(put=trial.put, note_refusal=trial.note_refusal)
        self._gateway.register(key, caller)
        try:
            if self._task.url is not None:
                reward = await self._call_url(trial, key, caller)
            else:
                reward = await self._run_program(trial, key, caller)
        except _FailedError as failed:
            return self._limited(trial, str(failed), None) or self._failed(trial, str(failed))
        except TimeoutError:
            text = f"was ended after {self._task.time_limit_s:g} s (task.time_limit_s)"
            return Outcome(kind="time", text=text)
        except (PipelineError, UserError, OSError) as error:
            return self._failed(trial, f"lost its sandbox: {error}")
        finally:
            self._gateway.forget(key)
        limited = self._limited(trial, "", reward)
        if limited is not None:
            return limited
        num_asks, _, refusal = trial.state()
        if num_asks == 0:
            why = f": {refusal}" if refusal else ""
            return self._failed(trial, f"ended without a question that was answered{why}")
        if reward is None and self._task.reward is None:
            return self._failed(trial, f"gave no reward{self._reported(caller)}")
        return Outcome(kind=ENDED, text=ENDED, reward=reward)

    def _limited(self, trial: Trial, how: str, reward: float | None) -> Outcome | None:
        _, limit, refusal = trial.state()
        if limit is None:
            return None
        text = f"ran into its limit of {limit}"
        return Outcome(kind=limit, text=": ".join(filter(None, [text, refusal, how])), reward=reward)

    def _failed(self, trial: Trial, text: str) -> Outcome:
        refusal = trial.state()[2]
        if refusal and refusal not in text:
            text = f"{text}; its first refused question: {refusal}"
        return Outcome(kind="failed", text=" ".join(text.split()))

    def _reported(self, caller: Caller) -> str:
        if caller.reward is None:
            return "; accepted: a number in $RLMUX_REWARD_FILE, a POST to /v1/reward, or task.reward"
        return f": it reported {caller.reward!r}; accepted: a finite number"

    # --- a user's agent at an address -------------------------------------------------------------------------

    async def _call_url(self, trial: Trial, key: str, caller: Caller) -> float | None:
        assert self._task.url is not None
        post = asyncio.ensure_future(self._client.post(self._task.url, json=self._described(trial, key)))
        try:
            await self._until(post.done, caller)
            response = post.result()
        except httpx.HTTPError as error:
            raise _FailedError(f"{self._task.url} did not answer: {type(error).__name__} {error}") from None
        finally:
            post.cancel()
        if response.status_code >= 400:
            raise _FailedError(f"{self._task.url} answered {response.status_code}: {response.text[:_LAST_WORDS]}")
        try:
            found = response.json()
        except ValueError:
            found = None
        reported = found.get("reward") if isinstance(found, dict) else None
        return self._reward(caller.reward if reported is None else reported, caller)

    def _described(self, trial: Trial, key: str) -> dict[str, Any]:
        return {
            "row": dict(trial.prompt.data or {}),
            "model": self._config.task.model_name or self._config.name,
            "openai_base_url": f"{self._gateway.address}/v1",
            "anthropic_base_url": self._gateway.address,
            "api_key": key,
            "seed": trial.seed,
            "step": trial.id.step,
            "prompt": trial.id.prompt,
            "sample": trial.id.sample,
        }

    # --- processes --------------------------------------------------------------------------------------------

    async def _run_program(self, trial: Trial, key: str, caller: Caller) -> float | None:
        self._numbers += 1
        root = self._folder / f"program-{self._numbers}"
        root.mkdir()
        task = self._suite[str((trial.prompt.data or {})["name"])] if self._task.name == "harbor" else None
        kind = self._task.sandbox or ("folder" if task is None else "process")
        with_end = contextlib.ExitStack()
        with_end.callback(shutil.rmtree, root, ignore_errors=True)
        try:
            sandbox = await self._in_thread(partial(self._opened, kind, root, task, with_end))
            code: int = await self._until_ended(sandbox, trial, key, caller, root / "output.txt")
            if task is not None and (code == 0 or trial.state()[0]):
                return await self._verified(task, sandbox, root / "tests.txt")
            if self._task.reward_from == "exit_code" and code >= 0:
                return float(code == 0)
            if code != 0:
                raise _FailedError(f"{_ending(code)}{_last_words(root / 'output.txt')}")
            reward_file = sandbox.path("/sandbox/reward.txt")
            reported = caller.reward
            if reported is None and reward_file.is_file():
                with open(reward_file, errors="replace") as file:
                    reported = file.read(_LAST_WORDS).strip()
            return self._reward(reported, caller)
        finally:
            await self._in_thread(with_end.close)

    def _reward(self, reported: Any, caller: Caller) -> float | None:
        caller.reward = reported
        return reward_in(reported)

    def _opened(self, kind: str, root: Path, task: HarborTask | None, with_end: contextlib.ExitStack) -> Sandbox:
        shown = () if self._code_folder is None else (self._code_folder,)
        sandbox = make_sandbox(kind, root / "sandbox", limits=self._limits, environment=task, shown=shown)
        with_end.callback(_close, sandbox)
        if task is not None:
            prepare(task, sandbox)
        return sandbox

    async def _until_ended(self, sandbox: Sandbox, trial: Trial, key: str, caller: Caller, output: Path) -> int:
        program: RunningProgram = await self._in_thread(partial(self._started, sandbox, trial, key, output))
        try:
            await self._until(lambda: program.poll() is not None, caller)
        finally:
            await self._in_thread(program.kill)  # with what it has left behind
        code: int | None = program.poll()
        assert code is not None
        return code

    def _started(self, sandbox: Sandbox, trial: Trial, key: str, output: Path) -> RunningProgram:
        described = self._described(trial, key)
        task_file = output.with_name("task.json")
        task_file.write_text(json.dumps(described, ensure_ascii=False, default=str))
        sandbox.put(task_file, "/sandbox/task.json")
        home = str(sandbox.path("/sandbox")) if not sandbox.has_own_root else "/sandbox"
        env = {
            **({} if sandbox.has_own_root else _inherited()),
            "OPENAI_BASE_URL": described["openai_base_url"],
            "OPENAI_API_BASE": described["openai_base_url"],
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": described["anthropic_base_url"],
            "ANTHROPIC_API_KEY": key,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "RLMUX_MODEL": described["model"],
            "RLMUX_SEED": str(trial.seed),
            "RLMUX_TASK_FILE": f"{home}/task.json",
            "RLMUX_REWARD_FILE": f"{home}/reward.txt",
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",
        }
        if self._code_folder is not None:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self._code_folder), env.get("PYTHONPATH", "")]))
        gateway = SandboxGateway(port=self._gateway.port, socket=self._gateway.socket)
        return sandbox.start(self._argv(trial.prompt, sandbox), env=env, output=output, gateway=gateway)

    def _argv(self, prompt: Prompt, sandbox: Sandbox) -> Sequence[str]:
        """Words of the command, with the row's columns in place, and files of the code folder by their whole path."""
        if self._task.function is not None:
            return [sys.executable, str(_FUNCTION_PROGRAM), self._task.function]
        if self._task.command is not None:
            return [self._word(word, prompt) for word in shlex.split(self._task.command)]
        if self._task.sandbox != "docker":
            return [sys.executable, str(_BASH_AGENT)]
        sandbox.put(_BASH_AGENT, "/sandbox/bash_agent.py")  # an image has Pythons and files of its own
        return ["python3", "/sandbox/bash_agent.py"]

    def _word(self, word: str, prompt: Prompt) -> str:
        folder = None if self._task.sandbox == "docker" else self._code_folder
        if word == "python" and self._task.sandbox != "docker":
            return sys.executable
        if folder is not None and os.path.isfile(folder / word):  # False for a word too long
            return str(folder / word)
        columns = {**(prompt.data or {}), "prompt": prompt.text}
        return _COLUMN.sub(lambda found: _written(columns[found[1]]) if found[1] in columns else found[0], word)

    async def _verified(self, task: HarborTask, sandbox: Sandbox, output: Path) -> float:
        verdict: HarborVerdict = await self._in_thread(partial(verify, task, sandbox, output))
        if verdict.reward is None:
            raise _FailedError(verdict.problem or "its tests gave no reward")
        return verdict.reward

    async def _until(self, is_done: Callable[[], bool], caller: Caller) -> None:
        """Wait for a program. Raises TimeoutError after `task.time_limit_s`, waiting for answers left out."""
        used_s, before = 0.0, time.monotonic()
        while not is_done():
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            used_s += 0.0 if caller.num_waiting else now - before
            before = now
            if used_s > self._task.time_limit_s:
                raise TimeoutError

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        """Call in a thread, to its end even where this is cancelled: what the call made is known then, and ended."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


def _inherited() -> dict[str, str]:
    """The environment of a program that is not isolated: ours, but for the addresses and keys of other models."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "ANTHROPIC_", "RLMUX_")) and name not in ("HOME", "TMPDIR")
    }


def _written(value: Any) -> str:
    """A column as a word of a command."""
    return value if isinstance(value, str) else json.dumps(value)


def _close(sandbox: Sandbox) -> None:
    with contextlib.suppress(OSError):
        sandbox.close()


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _last_words(output: Path) -> str:
    """The last line of what a program printed."""
    try:
        with open(output, "rb") as file:
            file.seek(max(0, output.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f": {lines[-1].strip()[:_LAST_WORDS]}" if lines else ""

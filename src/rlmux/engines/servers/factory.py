"""A pipeline's server engine, from its config: the model's folder, the server, and what it can do.

    ModelConfig ── folder ──▶ server, with random weights ── measured, or recalled from the cache ──▶ capabilities
                                                             and with the pipeline's weights

What was measured is recalled by engine, version, device, arguments and the model's shape. The dialect is that of the
server's version, which is asked before it starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from rlmux.core.errors import PipelineError, RlmuxError, UserError
from rlmux.engines.servers import measuring
from rlmux.engines.servers.capabilities import Capabilities
from rlmux.engines.servers.dialect import Dialect
from rlmux.engines.servers.gpu_memory import GpuMemory
from rlmux.engines.servers.model_folder import ModelFolder, new_folder
from rlmux.engines.servers.server_engine import ServerRolloutEngine
from rlmux.engines.servers.settings import ServerSettings
from rlmux.engines.servers.sglang import Sglang
from rlmux.engines.servers.transfer import Buffers, GpuBuffers
from rlmux.engines.servers.vllm import Vllm
from rlmux.rl.config import EngineConfig, TrainingConfig
from rlmux.rl.memory.footprint import server_bytes
from rlmux.rl.memory.model_shape import shape_of
from rlmux.rl.user_code.engine_check import check_version, program_of, release_of, remark_on

_MEMORY_TOLERANCE = 1.1
"""Memory of a server, as a multiple of its limit, that is still accepted."""


def dialect_of(name: str, version: str) -> Dialect:
    """What this version of a server is asked."""
    return Vllm(release_of(version)) if name == "vllm" else Sglang()


def make_server_engine(
    config: TrainingConfig,
    *,
    vocab_size: int,
    is_single_turn: bool,
    device: str,
    on_wait: Callable[[], None] = lambda: None,
    is_remeasured: bool = False,
    new_buffers: Callable[[int], Buffers] | None = None,
) -> ServerRolloutEngine:
    """`new_buffers`: see ServerRolloutEngine; by default those of the GPUs, if any.

    Raises UserError and ServerGoneError for a server that cannot serve this pipeline; nothing is left of it then.
    """
    given = config.rollout.engine
    program = program_of(given)
    version, remark = program.version, remark_on(given.name, program.version)
    if remark is not None:
        print(f"rlmux: rollout.engine: {remark}", file=sys.stderr)
    gpus = None if device == "cpu" else GpuMemory()
    key = _cache_key(config, version, device, 0 if gpus is None else gpus.count)
    known = None if is_remeasured else measuring.recall(key)
    if new_buffers is None and gpus is not None and program.may_take_tensors(given.name):
        new_buffers = GpuBuffers
    settings = replace(
        _settings(config, device, gpus),
        takes_tensors=new_buffers is not None,
        starts_empty=given.url is None and config.adapter is None and (known is None or known.reloads),
    )
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, settings.folder, ignore_errors=True)
        folder = ModelFolder(
            settings.folder, config.model, vocab_size, config.model_seed, config.rollout.dtype, config.adapter
        )
        engine = ServerRolloutEngine(
            dialect_of(given.name, version),
            settings,
            folder,
            config,
            vocab_size=vocab_size,
            is_single_turn=is_single_turn,
            on_wait=on_wait,
            gpus=gpus,
            new_buffers=new_buffers,
        )
        undo.pop_all()
    try:
        _make_ready(engine, given, key, known, remark)
        if gpus is not None:
            check_memory(given.name, engine.memory_bytes(), settings.memory_bytes)
    except RlmuxError as error:
        engine.last_words()
        engine.close()
        raise PipelineError(str(error)) if isinstance(error, UserError) else error from None
    return engine


def _settings(config: TrainingConfig, device: str, gpus: GpuMemory | None) -> ServerSettings:
    given, num_split = config.rollout.engine, config.rollout.tensor_parallel
    num_gpus = num_split if gpus is None else gpus.count  # on cores a copy is all that there is room for
    return ServerSettings(
        folder=new_folder(),
        num_slots=config.rollout.num_slots,
        max_len=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        device=device,
        num_threads=config.train.num_threads,
        dtype=config.rollout.dtype,
        memory_bytes=server_bytes(config, num_gpus),
        device_bytes=0.0 if gpus is None else gpus.device_bytes,
        adapter_rank=0 if config.adapter is None else config.adapter.rank,
        tensor_parallel=num_split,
        data_parallel=max(1, num_gpus // num_split),
        without=given.without,
        variables=given.environment,
        args=given.args,
    )


def _make_ready(
    engine: ServerRolloutEngine, given: EngineConfig, key: str, known: Capabilities | None, remark: str | None
) -> None:
    """Measure the server, or recall what it can; it has the pipeline's weights then."""
    check_version(given.name, engine.server_version, engine.server.url)
    if known is None:
        known = measuring.measure(engine)
        measuring.remember(key, known)
    elif known.reloads and not engine.has_adapter:
        engine.give_weights(known)
    elif not engine.can_restart:
        raise UserError(f"{given.url} does not take new weights; accepted: rollout.engine.python")
    engine.capabilities = known if remark is None else replace(known, remarks=(*known.remarks, remark))


def check_memory(name: str, taken_bytes: float, limit_bytes: float) -> None:
    """Raises UserError for a server that took more device memory than its limit."""
    if taken_bytes > _MEMORY_TOLERANCE * limit_bytes:
        raise UserError(
            f"{name} took {taken_bytes / 1e9:.1f} GB of device memory; its limit is {limit_bytes / 1e9:.1f} GB; "
            f"accepted: rollout.engine.memory_gb: {taken_bytes / 1e9:.0f} or more, or fewer rollout.slots"
        )


def _cache_key(config: TrainingConfig, version: str, device: str, num_gpus: int) -> str:
    given = config.rollout.engine
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    rollout = config.rollout
    own = (
        num_gpus,
        rollout.tensor_parallel,
        given.args,
        given.without,
        sorted(given.environment.items()),
        given.url is None,
    )
    adapter = None if config.adapter is None else asdict(config.adapter)
    rest = repr((asdict(shape_of(config.model)), adapter, rollout.num_slots, rollout.dtype, *own))
    return f"{given.name} {version} {gpu} {hashlib.sha256(rest.encode()).hexdigest()[:16]}"

"""verl on cores, for tests: a platform without a GPU, its FSDP engine there, and a rollout server by transformers.

verl's own classes do everything else: driver, trainer, TransferQueue, agent loops, rewards, workers, FSDP2 (over gloo).
Loaded in each process of verl by VERL_USE_EXTERNAL_MODULES. RECORD gets (monotonic time, NAME@POOL, what, bytes)
whenever a server's weights come or go, as `room.check_never_both` reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import time
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl.utils.distributed as distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform

TOKENS = 8
CORES = SimpleNamespace(
    **dict.fromkeys(
        ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_allocated", "memory_allocated",
         "memory_reserved", "max_memory_reserved", "current_device", "ipc_collect"),
        lambda *_, **__: 0,
    ),
    is_available=lambda: False,
    get_device_name=lambda *_: "CPU",
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
    manual_seed=lambda seed: None,
    manual_seed_all=lambda seed: None,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    set_device=lambda index: None,
)  # fmt: skip


class PlatformCores(PlatformBase):
    """Every "device" is the host."""

    device_name = "cpu"
    vendor_name = "cores"
    device_module = CORES

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str):
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = get_collective_module = _nothing


PlatformCores.__abstractmethods__ = frozenset()
set_platform(PlatformCores())
begin = distributed.initialize_global_process_group_ray
distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: begin(
    timeout_second, "gloo"
)

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # noqa: E402
from verl.workers.rollout.replica import (  # noqa: E402
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)
from verl.workers.rollout.utils import ensure_async_iterator  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)


def record(pool: str, what: str, num_bytes: int) -> None:
    with open(os.environ["RECORD"], "a", encoding="utf-8") as lines:
        lines.write(json.dumps([time.monotonic(), f"{os.environ['RLMUX_JOB']}@{pool}", what, num_bytes]) + "\n")


def computing(method: Any) -> Any:
    """A worker's method, with what it has on the training pool while it computes: its model, by verl's own offload."""

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        size = sum(one.numel() * one.element_size() for one in self.engine.module.parameters())
        record(POOLS["train"], "begins", size)
        if os.environ.get("HANGS_IN") == "train":
            time.sleep(3600)
        try:
            return method(self, *args, **kwargs)
        finally:
            record(POOLS["train"], "ends", 0)

    return functools.wraps(method)(recorded)


POOLS = {"rollout": "gpu0", "train": "gpu0", **json.loads(os.environ.get("POOLS", "{}"))}
for name in ("train_mini_batch", "infer_batch"):
    setattr(TrainingWorker, name, computing(getattr(TrainingWorker, name)))


@ray.remote(num_cpus=0)
class CoresServer:
    """A rollout server whose tokens depend on its version, the request and the tokens before, and on nothing else."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.size = sum(one.numel() * 4 for one in self.model.parameters())
        self.step = 0
        self.is_awake = self.is_held = False

    async def update_weights(self, weights: dict[str, Any], step: int) -> None:
        self.model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=False)
        self.step = step
        digest = hashlib.sha256(b"".join(value.tobytes() for _, value in sorted(weights.items()))).hexdigest()
        self.move(is_awake=True)
        record(POOLS["rollout"], f"weights {step} {digest}", self.size)

    def move(self, *, is_awake: bool) -> None:
        if self.is_awake != is_awake:
            self.is_awake = is_awake
            record(POOLS["rollout"], "loads" if is_awake else "leaves", self.size if is_awake else 0)

    async def wake_up(self) -> None:
        self.move(is_awake=True)

    async def sleep(self) -> None:
        self.move(is_awake=False)

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert (method, kwargs) in (("sleep", {"level": 1}), ("wake_up", {}))
        self.move(is_awake=method == "wake_up")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.is_held = True

    async def resume_generation(self) -> None:
        self.is_held = False

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        while self.is_held:  # as behind vLLM's gate
            await asyncio.sleep(0.01)
        if os.environ.get("HANGS_IN") == "rollout" and self.step > 0:
            record(POOLS["rollout"], "hangs", self.size)
            await asyncio.sleep(3600)
        ids, log_probs = list(prompt_ids), []
        while len(log_probs) < sampling_params.get("max_tokens", TOKENS) and not self.is_held:
            assert self.is_awake, "a server that sleeps was asked"
            text = json.dumps([self.step, ids, request_id])
            generator = torch.Generator().manual_seed(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
            with torch.no_grad():
                scores = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            log_probs.append(float(scores[ids[-1]]))
            await asyncio.sleep(0)
        reason = "aborted" if self.is_held else "completed"
        extra = {"global_steps": self.step}
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :], log_probs=log_probs, stop_reason=reason, extra_fields=extra
        )


class CoresReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        self._server_address = f"cores_server_{self.replica_rank}"
        self._server_handle = CoresServer.options(name=self._server_address).remote(self.model_config.path)
        self.servers = [self._server_handle]
        if self.rollout_mode is RolloutMode.STANDALONE:
            await self._server_handle.wake_up.remote()


class CoresAdapter(BaseRollout):
    """A worker's end of the server."""

    replica_rank = 0
    is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        await ray.get_actor("cores_server_0").wake_up.remote()

    async def release(self) -> None:
        await ray.get_actor("cores_server_0").sleep.remote()

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **options: Any) -> None:
        values = {name: tensor.detach().float().numpy() async for name, tensor in ensure_async_iterator(weights)}
        await ray.get_actor("cores_server_0").update_weights.remote(values, options.get("global_steps"))


@CheckpointEngineRegistry.register("cores")
class FileCheckpointEngine(CheckpointEngine):
    """Weights from trainer to servers by a file."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None: ...

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, servers: int, metadata: list[dict]) -> tuple[dict, dict]:
        return {"rank": list(range(actors))}, {"rank": list(range(servers))}

    def init_process_group(self, rank: int) -> None: ...

    def finalize(self) -> None: ...

    def _path(self, step: int | None) -> str:
        return f"{os.environ['RECORD']}.{os.environ['RLMUX_JOB']}.{step}"

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        torch.save({name: tensor.detach().clone() for name, tensor in weights}, self._path(global_steps) + ".new")
        os.replace(self._path(global_steps) + ".new", self._path(global_steps))

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        while not os.path.exists(self._path(global_steps)):
            await asyncio.sleep(0.01)
        for each in torch.load(self._path(global_steps)).items():
            yield each
        os.remove(self._path(global_steps))


_ROLLOUT_REGISTRY["cores", "async"] = "verl_on_cores.CoresAdapter"
RolloutReplicaRegistry.register("cores", lambda: CoresReplica)

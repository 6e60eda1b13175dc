"""Workloads at the grain of sub-stages: pairs and crowds of recorded pipelines on 4 to 64 GPUs.

    recorded lengths x model costs ─▶ SubStageWorld ─▶ Arrival        deployment ─▶ Cluster

    shared          every device (a tensor-parallel group of GPUs) is there for both phases
    disaggregated   the same devices, some of them in a rollout pool, the others in a training pool

The two deployments have the same GPUs, so policies of either kind can be compared by throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Footprint, Phase, Pipeline, PipelineId, Pool, dense_threshold_of
from rlmux.sim.models.hardware import gpu_spec
from rlmux.sim.models.multi_turn import ToolUse
from rlmux.sim.models.substages import STAGES, SubStageWorld
from rlmux.sim.workloads.arrivals import Arrival, Workload

MEMORY_PART = 0.4
"""Fraction of a device's memory that one resident engine takes, so that two fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A pipeline modelled on a recorded run."""

    model: str
    lengths_of: str
    """Name of the recorded run whose answer lengths are drawn from."""

    @property
    def name(self) -> str:
        return f"{self.lengths_of.split('_')[0]}-{self.model}"


GSM8K_06B = Recorded(model="qwen3-0.6b", lengths_of="gsm8k_qwen3_0_6b")
GSM8K_4B = Recorded(model="qwen3-4b", lengths_of="gsm8k_qwen3_4b")
GSM8K_4B_INSTRUCT = Recorded(model="qwen3-4b", lengths_of="gsm8k_qwen3_4b_instruct")
GSM8K_8B = Recorded(model="llama-3.1-8b", lengths_of="gsm8k_llama3_1_8b")
MATH_06B = Recorded(model="qwen3-0.6b", lengths_of="math_qwen3_0_6b")
MATH_4B = Recorded(model="qwen3-4b", lengths_of="math_qwen3_4b")
MATH_8B = Recorded(model="qwen3-8b", lengths_of="math_qwen3_8b")
AIME_4B = Recorded(model="qwen3-4b", lengths_of="multiturn_aime_qwen3_4b")
AIME_4B_INSTRUCT = Recorded(model="qwen3-4b", lengths_of="multiturn_aime_qwen3_4b_instruct")
MATH_14B = Recorded(model="qwen2.5-14b", lengths_of="math_deepseek")

HOMOGENEOUS = (GSM8K_06B, GSM8K_4B, GSM8K_4B_INSTRUCT, MATH_06B, MATH_4B, MATH_8B, AIME_4B, AIME_4B_INSTRUCT)
MIXED = (
    (GSM8K_06B, GSM8K_8B),
    (MATH_06B, MATH_8B),
    (GSM8K_4B, MATH_4B),
    (GSM8K_4B_INSTRUCT, AIME_4B_INSTRUCT),
)


RECORDED = {entry.lengths_of: entry for entry in (*HOMOGENEOUS, GSM8K_8B, MATH_14B)}
"""Pipelines by the name of the recorded run."""


def pair(
    *,
    first: str = GSM8K_4B.lengths_of,
    second: str = GSM8K_4B.lengths_of,
    num_gpus: int = 8,
    deployment: str = "shared",
    num_steps: int = 6,
    staleness: int = 0,
    tool_calls: float = 0.0,
    tool_wait_s: float = 10.0,
    seed: int = 0,
    name: str = "pair",
) -> Workload:
    """Two pipelines by the names of recorded runs. `tool_calls`: mean calls of a trajectory, of `tool_wait_s` each."""
    for run in (first, second):
        if run not in RECORDED:
            raise UserError(f"workload {name!r}: no pipeline after run {run!r}; accepted: {', '.join(RECORDED)}")
    for key, value in (("tool_calls", tool_calls), ("tool_wait_s", tool_wait_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
            raise UserError(f"workload {name!r}: {key} is {value!r}; accepted: a number, 0 or more")
    return crowd(
        (RECORDED[first], RECORDED[second]), num_gpus=num_gpus, deployment=deployment, num_steps=num_steps,
        staleness=staleness, seed=seed, name=name,
        tools=ToolUse(mean_calls=tool_calls, wait_s=tool_wait_s) if tool_calls else None,
    )  # fmt: skip


def crowd(
    recorded: Sequence[Recorded],
    *,
    num_gpus: int,
    deployment: str = "shared",
    num_steps: int = 6,
    sequences_per_device: int = 256,
    slots: int = 256,
    staleness: int = 0,
    num_parts: int = 1,
    train_part: float = 0.5,
    slo_slowdown: float = float("inf"),
    gpu: str = "H100",
    tp: int = 4,
    tools: ToolUse | None = None,
    fixed_part: float = 1.0,
    seed: int = 0,
    name: str = "",
) -> Workload:
    """These pipelines together. Steps grow with the devices, as batches do in practice.

    `num_parts`: each pipeline requests one of so many equal parts of the cluster. `train_part`: the fraction of the
    devices in the training pool of a disaggregated deployment. `fixed_part`: as in SubStageWorld.
    """
    if num_gpus % tp or num_gpus < tp:
        raise UserError(f"num_gpus is {num_gpus}; accepted: a multiple of tp={tp}")
    num_devices = num_gpus // tp
    cluster, num_rollout, num_train = _deployed(deployment, num_devices, train_part, gpu, tp)
    num_rollout, num_train = max(1, num_rollout // num_parts), max(1, num_train // num_parts)
    arrivals = []
    for number, entry in enumerate(recorded):
        world = SubStageWorld(
            model=entry.model,
            lengths_of=entry.lengths_of,
            num_sequences=sequences_per_device * num_devices,
            num_rollout_devices=num_rollout,
            num_train_devices=num_train,
            seed=seed * 1009 + number,
            gpu=gpu_spec(gpu).name,
            tp=tp,
            slots=slots,
            tools=tools,
            fixed_part=fixed_part,
        )
        pipeline = Pipeline(
            id=PipelineId(f"{entry.name}-{number}"),
            num_steps=num_steps,
            stages=STAGES,
            slo_slowdown=slo_slowdown,
            staleness=staleness,
        )
        arrivals.append(_arrival(pipeline, world, num_steps, is_shared=deployment == "shared"))
    about = " + ".join(entry.name for entry in recorded) + f" on {num_gpus} {gpu}, {deployment}"
    return Workload(name=name or "sub-stages", cluster=cluster, arrivals=tuple(arrivals), seed=seed, about=about)


def _arrival(pipeline: Pipeline, world: SubStageWorld, num_steps: int, *, is_shared: bool) -> Arrival:
    """The pipeline with its world's seconds, submitted at the start."""
    phases = world.mean_phases()
    part = MEMORY_PART * gpu_spec(world.gpu).hbm_gb * 1e9
    return Arrival(
        submit_s=0.0,
        pipeline=replace(
            pipeline,
            num_rollout_nodes=world.num_rollout_devices,
            num_train_nodes=world.num_train_devices,
            estimate=phases,
            colocated_estimate=phases if is_shared else None,
            dense_threshold=dense_threshold_of(world.slots),
            migration=world.migration_estimate(),
            footprint=Footprint(rollout_device_bytes=part, train_device_bytes=part),
        ),
        world=world,
        tokens_per_step=sum(world.tokens(step) for step in range(1, num_steps + 1)) / num_steps,
    )


def _deployed(deployment: str, num_devices: int, train_part: float, gpu: str, tp: int) -> tuple[Cluster, int, int]:
    """The cluster, and the number of devices that a pipeline has for rollouts and for training."""
    memory_bytes = gpu_spec(gpu).hbm_gb * 1e9
    if deployment == "shared":
        pool = Pool(
            name="gpu", phase=Phase.TRAIN, num_nodes=num_devices, gpus_per_node=tp, device_memory_bytes=memory_bytes
        )
        return Cluster(pools={"gpu": pool}), num_devices, num_devices
    if deployment != "disaggregated":
        raise UserError(f"deployment is {deployment!r}; accepted: shared, disaggregated")
    if num_devices < 2:
        raise UserError(f"a disaggregated deployment needs two devices of {tp} GPUs; there is {num_devices}")
    num_train = min(num_devices - 1, max(1, round(train_part * num_devices)))
    num_rollout = num_devices - num_train
    pools = {
        phase.value: Pool(
            name=phase.value, phase=phase, num_nodes=count, gpus_per_node=tp, device_memory_bytes=memory_bytes
        )
        for phase, count in ((Phase.ROLLOUT, num_rollout), (Phase.TRAIN, num_train))
    }
    return Cluster(pools=pools), num_rollout, num_train

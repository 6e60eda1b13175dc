"""The scheduler's view of a file: `Cluster` and `Pipeline` of core, from the typed tree."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict

from rlmux.config.tree import (
    BOTH,
    ClusterConfig,
    EstimateConfig,
    FootprintConfig,
    PipelineConfig,
    PoolConfig,
    gpus_of_device,
    phase_of_pool,
)
from rlmux.core.model import (
    DEFAULT_SLO_PROBABILITY,
    MEAN,
    Cluster,
    Footprint,
    Phase,
    PhaseSeconds,
    Pipeline,
    PipelineId,
    Pool,
    Stage,
    SwitchEstimate,
    Urgency,
    Visibility,
    dense_threshold_of,
)
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.adapter_base import rollout_base, train_base

BYTES_PER_GB = 1e9


def make_cluster(config: ClusterConfig) -> Cluster:
    """Every pool, in the order of the file. Each device or whole node takes one worker."""
    return Cluster(pools={name: _pool(name, pool) for name, pool in config.pools.items()})


def _pool(name: str, config: PoolConfig) -> Pool:
    phase = phase_of_pool(name, config)
    assert phase is not None, "the tree refuses a pool without a phase"
    return Pool(
        name=name,
        phase=Phase.TRAIN if phase == BOTH else Phase(phase),
        serves_both_phases=phase == BOTH,
        num_nodes=config.nodes if config.devices is None else config.devices,
        gpus_per_node=gpus_of_device(config),
        usd_per_gpu_hour=config.usd_per_gpu_hour,
        host_memory_bytes=_bytes(config.host_memory_gb) or math.inf,
        device_memory_bytes=_bytes(config.device_memory_gb) or math.inf,
        spills_to_disk=config.spills_to_disk,
    )


def make_pipeline(config: PipelineConfig) -> Pipeline:
    """The stages of its step, the nodes it requests, its estimates and its limits."""
    solo, colocated = _estimates(config.estimate)
    trained = None if config.is_filler else config.training
    return Pipeline(
        id=PipelineId(config.name),
        num_steps=config.num_steps,
        stages=_stages(config),
        has_sft_warmup=config.sft_warmup.num_updates > 0,
        num_rollout_nodes=config.rollout.num_workers,
        num_train_nodes=config.train.num_workers,
        estimate=solo,
        colocated_estimate=colocated,
        slo_slowdown=math.inf if config.slo_slowdown is None else config.slo_slowdown,
        slo_probability=_probability(config),
        limit=_limit(config.estimate),
        footprint=_footprint(config.footprint),
        dense_threshold=dense_threshold_of(config.rollout.num_slots),
        switch=_warm_switch(config.estimate),
        staleness=config.versions_behind,
        rollout_base="" if trained is None else rollout_base(trained),
        train_base="" if trained is None else train_base(trained),
        alike="" if trained is None else _alike(trained),
        user=config.user or "",
        project=config.project or "",
        urgency=Urgency(config.urgency),
        rank=config.rank,
        visibility=Visibility(config.visibility),
    )


def _alike(config: TrainingConfig) -> str:
    """Hash of what decides how long a step takes: all but names, seeds, and what only the update computes with."""
    algorithm, model = config.algorithm, asdict(config.model)
    del model["seed"]
    content = {
        "model": model,
        "adapter": config.adapter and asdict(config.adapter),
        "task": asdict(config.task),
        "sft_warmup": asdict(config.sft_warmup),
        "algorithm": {
            "staleness": algorithm.staleness,
            "prompts_per_step": algorithm.prompts_per_step,
            "group_size": algorithm.group_size,
            "num_epochs": algorithm.num_epochs,
            "num_minibatches": algorithm.num_minibatches,
            "micro_batch_size": algorithm.sequences_per_pass,
            "has_reference": algorithm.kl_coef > 0,
        },
        "rollout": asdict(config.rollout),
        "train": asdict(config.train),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _probability(config: PipelineConfig) -> float | None:
    """None for a pipeline that is planned with means alone, or is promised nothing."""
    if config.is_filler or config.slo_probability == MEAN:
        return None
    return DEFAULT_SLO_PROBABILITY if config.slo_probability is None else float(config.slo_probability)


def _stages(config: PipelineConfig) -> tuple[Stage, ...]:
    """The stages that a step of the pipeline really has."""
    algorithm = config.algorithm
    if config.is_filler:
        return (Stage.GENERATE, Stage.REWARD)
    reference = (Stage.REFERENCE_LOGPROBS,) if algorithm.kl_coef > 0 else ()
    old = (Stage.OLD_LOGPROBS,) if algorithm.needs_old_logprobs else ()
    return (Stage.GENERATE, Stage.REWARD, *reference, *old, Stage.UPDATE, Stage.PUBLISH)


def _estimates(config: EstimateConfig | None) -> tuple[PhaseSeconds | None, PhaseSeconds | None]:
    """Disaggregated and colocated."""
    if config is None:
        return None, None
    solo = PhaseSeconds(rollout_s=config.rollout_s, train_s=config.train_s or 0.0, sync_s=config.sync_s)
    if config.colocated_rollout_s is None or config.colocated_train_s is None:
        return solo, None
    return solo, PhaseSeconds(rollout_s=config.colocated_rollout_s, train_s=config.colocated_train_s)


def _limit(config: EstimateConfig | None) -> PhaseSeconds | None:
    """A step at the token limit."""
    if config is None or config.limit_rollout_s is None or config.limit_train_s is None:
        return None
    return PhaseSeconds(rollout_s=config.limit_rollout_s, train_s=config.limit_train_s, sync_s=config.sync_s)


def _warm_switch(config: EstimateConfig | None) -> SwitchEstimate | None:
    if config is None or config.rollout_switch_s is None or config.train_switch_s is None:
        return None
    return SwitchEstimate(rollout_s=config.rollout_switch_s, train_s=config.train_switch_s)


def make_cold_switch(config: EstimateConfig | None) -> SwitchEstimate | None:
    """Seconds of the first load of each state, by default of a warm switch; None: unknown."""
    warm = _warm_switch(config)
    if config is None or (warm is None and config.cold_rollout_switch_s is None and config.cold_train_switch_s is None):
        return None
    cold_s = (config.cold_rollout_switch_s, config.cold_train_switch_s)
    warm_s = (warm.rollout_s, warm.train_s) if warm else (0.0, 0.0)
    rollout_s, train_s = (warm if cold is None else cold for cold, warm in zip(cold_s, warm_s, strict=True))
    return SwitchEstimate(rollout_s=rollout_s, train_s=train_s)


def _footprint(config: FootprintConfig) -> Footprint:
    return Footprint(
        rollout_host_bytes=config.rollout_host_gb * BYTES_PER_GB,
        train_host_bytes=config.train_host_gb * BYTES_PER_GB,
        rollout_device_bytes=_bytes(config.rollout_device_gb),
        train_device_bytes=_bytes(config.train_device_gb),
    )


def _bytes(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * BYTES_PER_GB

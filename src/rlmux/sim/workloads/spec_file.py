"""A workload from a user's YAML file: its cluster, its pipelines, durations as estimated and the same at every step.

    plan.yaml ──▶ load_spec ──▶ Spec ──▶ workload_of ──▶ Workload
                  (config)

`cluster_of` reads a cluster from overrides alone, for traces that describe none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmux.config import Purpose, Spec, load_spec
from rlmux.config.derive import make_cold_switch
from rlmux.config.load import parse_spec
from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, Pool
from rlmux.core.settle.filler_placement import CHUNK_S
from rlmux.policies import POLICIES
from rlmux.sim.workloads.arrivals import Arrival, Workload, free_of_costs
from rlmux.sim.world import NO_SWITCH, SwitchSeconds, TrueSeconds


def load(path: str | Path) -> Workload:
    """The file, with all that planning and simulating needs checked. Raises SpecError."""
    return workload_of(load_spec(path, purpose=Purpose.PLAN, policies=list(POLICIES)))


def workload_of(spec: Spec) -> Workload:
    """The file's pipelines as the simulator takes them."""
    arrivals = []
    for pipeline_spec in spec.pipelines:
        pipeline = pipeline_spec.pipeline
        assert pipeline.estimate is not None, "files read for planning have estimates"
        keys = pipeline_spec.keys
        colocated, cold, warm = pipeline.colocated_estimate, make_cold_switch(keys.estimate), pipeline.switch
        arrivals.append(
            Arrival(
                submit_s=keys.submit_at_s,
                safe_point_s=CHUNK_S if pipeline.is_filler else 0.0,
                pipeline=pipeline,
                world=TrueSeconds.of_phases(pipeline.estimate, sync_s=pipeline.estimate.sync_s),
                colocated_world=None if colocated is None else TrueSeconds.of_phases(colocated),
                switch=NO_SWITCH
                if cold is None
                else SwitchSeconds(
                    cold_rollout_s=cold.rollout_s,
                    cold_train_s=cold.train_s,
                    warm_rollout_s=warm.rollout_s if warm else 0.0,
                    warm_train_s=warm.train_s if warm else 0.0,
                ),
            )
        )
    arrivals.sort(key=lambda arrival: arrival.submit_s)
    return Workload(
        name=Path(spec.source).stem,
        cluster=spec.cluster,
        arrivals=tuple(arrivals),
        shares=spec.shares,
        notes=free_of_costs(arrivals),
    )


def cluster_of(cluster: Cluster, overrides: Sequence[str], source: str) -> Cluster:
    """The cluster with `cluster.KEY=VALUE` laid over it. Raises UserError, also where another key is given."""
    for override in overrides:
        if not override.startswith("cluster."):
            raise UserError(
                f"--set {override}: {source} takes overrides of its cluster only, "
                f"such as cluster.pools.{next(iter(cluster.pools))}.usd_per_gpu_hour=2"
            )
    pools = "".join(f"    {name}: {_keys_of(pool)}\n" for name, pool in cluster.pools.items())
    text = f"cluster:\n  pools:\n{pools}pipelines: [{{name: any, estimate: {{rollout_s: 1, train_s: 1}}}}]\n"
    return parse_spec(text, source=source, folder=Path(), overrides=overrides, purpose=Purpose.PLAN).cluster


def _keys_of(pool: Pool) -> str:
    nodes = "" if pool.num_nodes is None else f", nodes: {pool.num_nodes}"
    price = f"gpus_per_node: {pool.gpus_per_node}, usd_per_gpu_hour: {pool.usd_per_gpu_hour:g}"
    return f"{{phase: {pool.phase}{nodes}, {price}}}"

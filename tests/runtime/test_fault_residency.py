"""Memory is too small for all pipelines at once: states are evicted and loaded again, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmux.core.actions import RunStage
from rlmux.core.errors import RefusedError
from rlmux.core.model import Cluster, Footprint
from rlmux.policies import make_policy
from rlmux.runtime.memory.memory_budget import with_footprint
from rlmux.runtime.run import run_pipelines

MEGABYTE = 1e6


@pytest.fixture(scope="module")
def pair(real):
    footprint = Footprint(rollout_device_bytes=6 * MEGABYTE, train_device_bytes=8 * MEGABYTE)
    pair = [
        real.submission("sort", seed=1, num_steps=4),
        real.submission("tool", seed=2, num_steps=4, task="calculator", staleness=1),
        real.submission("reverse", seed=3, num_steps=4, task="reverse"),
    ]
    return [replace(one, pipeline=replace(one.pipeline, footprint=footprint)) for one in pair]


def with_memory(cluster: Cluster, device_bytes: float, host_bytes: float, *, spills_to_disk: bool = False) -> Cluster:
    return Cluster(
        pools={
            name: replace(
                pool,
                device_memory_bytes=device_bytes,
                host_memory_bytes=host_bytes,
                spills_to_disk=spills_to_disk,
            )
            for name, pool in cluster.pools.items()
        }
    )


@pytest.fixture(scope="module")
def roomy(real, pair, tmp_path_factory):
    """A run in which no state has to go."""
    return real.run(tmp_path_factory.mktemp("roomy"), pair, on=with_memory(real.cluster(), 100 * MEGABYTE, 1e12))


def with_processes(submissions, process_bytes: float):
    """Each process counts that much beside its state."""
    for one in submissions:
        footprint = one.pipeline.footprint
        footprint = replace(
            footprint,
            rollout_host_bytes=footprint.rollout_device_bytes + process_bytes,
            train_host_bytes=footprint.train_device_bytes + process_bytes,
        )
        yield replace(one, pipeline=replace(one.pipeline, footprint=footprint))


@pytest.mark.slow
def test_pipelines_that_evict_each_other_train_to_the_same_weights(real, make_backend, pair, roomy, tmp_path):
    small = with_memory(real.cluster(), 15 * MEGABYTE, 1e12)
    tight = real.run(tmp_path / "tight", pair, on=small, make_backend=make_backend)
    evicted = {
        name: [action for action in run.recorder.actions if isinstance(action, RunStage) and action.evicted]
        for name, run in (("roomy", roomy), ("tight", tight))
    }
    assert evicted["roomy"] == []
    assert len(evicted["tight"]) > 6
    assert set(tight.status.values()) == {"finished"}
    assert tight.sha256 == roomy.sha256


@pytest.mark.slow
def test_states_that_find_no_host_memory_go_to_disk_and_come_back_exactly(real, make_backend, pair, roomy, tmp_path):
    """Of each phase, three processes and one state fit; devices hold one or two."""
    tight = with_memory(real.cluster(), 15 * MEGABYTE, 12 * MEGABYTE, spills_to_disk=True)
    crowded = [with_footprint(one, tight) for one in with_processes(pair, MEGABYTE)]
    run = real.run(tmp_path / "run", crowded, on=tight, make_backend=make_backend)
    spilled = {note.worker.partition("-")[0] for note in run.recorder.notes if note.type == "spill"}
    assert {worker.partition("/")[2] for worker in spilled} == {"rollout", "train"}
    assert set(run.status.values()) == {"finished"}
    assert run.sha256 == roomy.sha256
    assert not list((tmp_path / "run").glob("*/spilled-*"))


def test_what_cannot_fit_is_refused_with_the_numbers_before_anything_starts(real, pair, tmp_path):
    small = with_memory(real.cluster(), 5 * MEGABYTE, 1e12)
    with pytest.raises(RefusedError, match=r"sort.*(0\.006|0\.01|6|8).*GB") as caught:
        run_pipelines(small, pair, make_policy("rollmux"), tmp_path / "run", spec={})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_host_memory_is_a_budget_for_all_pipelines_of_a_node(real, pair, tmp_path):
    """Two of the three fit the host memory of the one node there is; the third waits until one has left."""
    footprint = replace(pair[0].pipeline.footprint, rollout_host_bytes=4e9, train_host_bytes=4e9)
    hungry = [replace(one, pipeline=replace(one.pipeline, footprint=footprint)) for one in pair]
    run = real.run(tmp_path / "run", hungry, on=with_memory(real.cluster(), 100 * MEGABYTE, 9e9))
    assert set(run.status.values()) == {"finished"}
    waits = [action for action in run.recorder.actions if type(action).__name__ == "Queue"]
    assert {action.pipeline for action in waits} == {"reverse"}
    assert "memory" in waits[0].reason

"""Host memory is a budget: states that find no room there go to disk, and processes that find none are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rlmux.core.errors import RefusedError
from rlmux.core.model import Cluster, DeviceId, Footprint, Phase, Pool
from rlmux.rl.config import AdapterConfig, EngineConfig
from rlmux.rl.memory.adapter_base import rollout_base, train_base
from rlmux.rl.memory.footprint import device_parts
from rlmux.rl.memory.memory_parts import CUDA_CONTEXT_BYTES
from rlmux.runtime.memory.memory_budget import (
    HostMemory,
    MachineMemory,
    check_each_fits,
    own_bases,
    with_footprint,
    with_machine_memory,
)

DEVICE, OTHER_NODE = DeviceId("train", 0, 0), DeviceId("train", 1, 0)
FOOTPRINT = Footprint(rollout_host_bytes=1e9, rollout_device_bytes=2e9, train_host_bytes=1e9, train_device_bytes=4e9)


def cluster(*, host_bytes: float, spills_to_disk: bool = True) -> Cluster:
    more = {"host_memory_bytes": host_bytes, "spills_to_disk": spills_to_disk}
    return Cluster(
        pools={
            "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=1, **more),
            "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=2, **more),
        }
    )


def small_devices(num_bytes: float) -> Cluster:
    whole = cluster(host_bytes=1e12)
    return replace(
        whole, pools={name: replace(pool, device_memory_bytes=num_bytes) for name, pool in whole.pools.items()}
    )


def pinned(host_bytes: float, workers: str, device: DeviceId = DEVICE) -> HostMemory:
    memory = HostMemory(cluster(host_bytes=host_bytes))
    for worker in workers:
        memory.pin(worker, device, FOOTPRINT, Phase.TRAIN)
    return memory


def test_the_state_that_finds_no_room_goes_to_disk_and_those_before_it_stay():
    memory = pinned(3e9 + 2 * 4e9, "abc")
    assert [memory.offload(worker) for worker in "abc"] == [True, True, False]
    memory.load("a")
    assert memory.offload("c")
    assert not memory.offload("a")


def test_processes_count_whether_their_state_is_there_or_not():
    assert pinned(5e9, "a").offload("a")
    assert not pinned(5e9, "ab").offload("a")
    memory = pinned(5e9, "ab")
    memory.leave("b")
    assert memory.offload("a")


def test_every_node_has_a_memory_of_its_own():
    memory = pinned(5e9, "a")
    memory.pin("b", OTHER_NODE, FOOTPRINT, Phase.TRAIN)
    assert memory.offload("a")
    assert memory.offload("b")


def test_a_pool_that_does_not_spill_keeps_all_in_host_memory():
    memory = HostMemory(cluster(host_bytes=1.0, spills_to_disk=False))
    memory.pin("a", DEVICE, FOOTPRINT, Phase.TRAIN)
    assert memory.offload("a")


def test_a_worker_that_does_not_fit_is_refused_with_its_parts_largest_first(real):
    given = with_footprint(real.submission("big"), cluster(host_bytes=1e12, spills_to_disk=False))
    with pytest.raises(RefusedError) as caught:
        check_each_fits(small_devices(1e5), [given])
    line = str(caught.value)
    parts = re.search(r"its rollout worker needs [\d.]+ GB of device memory \((.*)\), and there are 0.0001 GB; ", line)
    assert parts is not None, line
    sizes = [float(part.split()[-2]) for part in parts[1].split(", ")]
    assert sizes == sorted(sizes, reverse=True)
    assert {"weights", "KV cache"} <= {part.rsplit(" ", 2)[0] for part in parts[1].split(", ")}
    by_file = replace(given.pipeline, footprint=replace(given.pipeline.footprint, rollout_device_bytes=3e9))
    with pytest.raises(RefusedError, match=r"needs 3.000 GB of device memory, and there are 0.0001 GB"):
        check_each_fits(small_devices(1e5), [replace(given, pipeline=by_file)])


def test_where_states_may_spill_a_process_has_to_fit_or_is_refused_with_the_numbers(real):
    given = real.submission("big")
    footprint = replace(FOOTPRINT, rollout_host_bytes=3e9, train_host_bytes=5e9)
    given = replace(given, pipeline=replace(given.pipeline, footprint=footprint))
    for spills_to_disk in (True, False):
        narrow = cluster(host_bytes=1.5e9, spills_to_disk=spills_to_disk)
        counted = with_footprint(given, narrow)
        if spills_to_disk:
            check_each_fits(narrow, [counted])
        else:
            with pytest.raises(RefusedError, match=r"big.*rollout.*3.000 GB of host memory.*1.500 GB"):
                check_each_fits(narrow, [counted])
    too_narrow = cluster(host_bytes=0.5e9)
    with pytest.raises(RefusedError, match=r"1.000 GB of host memory, with its state on disk.*0.500 GB"):
        check_each_fits(too_narrow, [with_footprint(given, too_narrow)])


@pytest.mark.parametrize(
    ("machine", "is_shared"),
    [
        (MachineMemory(num_cores=4), False),
        (MachineMemory(num_cores=3), True),
        (MachineMemory(gpu_by_device={DeviceId("a", 0, 0): "0", DEVICE: "1", OTHER_NODE: "2"}, num_cores=2), False),
        (MachineMemory(gpu_by_device={DeviceId("a", 0, 0): "0", DEVICE: "0", OTHER_NODE: "1"}, num_cores=64), True),
    ],
    ids=["cores to spare", "no core for anything else", "a GPU each", "two on one GPU"],
)
def test_devices_share_hardware_where_there_is_less_of_it_than_devices_and_a_controller(machine, is_shared):
    assert machine.is_shared(3) is is_shared


def test_on_a_gpu_the_base_of_several_pipelines_is_counted_once(real):
    """Two share a process for each phase; a third one on the same base, with other slots, samples by itself."""
    gpus = MachineMemory(
        gpu_by_device={DeviceId("rollout", 0, 0): "0", DEVICE: "1", OTHER_NODE: "2"},
        free_bytes_by_gpu=dict.fromkeys("012", 20e9),
    )
    submissions = [tenant(real, name, slots) for name, slots in (("a", 8), ("b", 8), ("c", 4))]
    alone = with_machine_memory(cluster(host_bytes=1e12, spills_to_disk=False), submissions[2:], gpus)
    together = with_machine_memory(cluster(host_bytes=1e12, spills_to_disk=False), submissions, gpus)
    own = [own_bases(one, submissions, is_gpu=True) for one in submissions]
    assert own == [(), (), (Phase.ROLLOUT,)]
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        lost = alone.pools[phase].device_memory_bytes - together.pools[phase].device_memory_bytes
        base = device_parts(submissions[0].config, phase, is_gpu=True)["base"]
        assert lost - base == pytest.approx(2 * CUDA_CONTEXT_BYTES)
        whole, part = (
            getattr(
                with_footprint(submissions[0], alone, is_gpu=True, own_bases=phases).pipeline.footprint,
                f"{phase}_device_bytes",
            )
            for phases in ((Phase.ROLLOUT, Phase.TRAIN), ())
        )
        assert whole - part == pytest.approx(base)


def test_a_server_has_its_base_for_itself_on_cores_too(real):
    own = tenant(real, "own", 8)
    server = replace(own.config.rollout, engine=EngineConfig(name="vllm", python="python"))
    served = replace(own, config=replace(own.config, name="served", rollout=server))
    assert own_bases(own, [own, served], is_gpu=False) == ()
    assert own_bases(served, [own, served], is_gpu=False) == (Phase.ROLLOUT,)
    given = [with_footprint(each, cluster(host_bytes=1e12), own_bases=()) for each in (own, served)]
    one, both = (
        with_machine_memory(cluster(host_bytes=1e12), some, MachineMemory(host_bytes=64e9)).pools["rollout"]
        for some in (given[:1], given)
    )
    assert one.device_memory_bytes == both.device_memory_bytes, "only our engine reads a base in shared memory"


def tenant(real, name: str, slots: int):
    one = real.submission(name)
    config = replace(one.config, model=replace(one.config.model, seed=5), adapter=AdapterConfig(rank=2, alpha=2.0))
    config = replace(config, rollout=replace(config.rollout, num_slots=slots))
    pipeline = replace(one.pipeline, rollout_base=rollout_base(config), train_base=train_base(config))
    return replace(one, config=config, pipeline=pipeline)

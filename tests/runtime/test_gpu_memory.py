"""Memory of GPUs comes from their driver, and each GPU's is counted once. No GPU is needed: the driver's answer is
given."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from rlmux.core.errors import RefusedError, UserError
from rlmux.core.model import Cluster, Footprint, Phase, Pool
from rlmux.rl.memory.memory_parts import CUDA_CONTEXT_BYTES
from rlmux.runtime.local import assign_gpus
from rlmux.runtime.machine_probe import GpuDriver, describe_machine
from rlmux.runtime.memory.memory_budget import MachineMemory, check_each_fits, with_machine_memory

GB = 1e9


class KnownDriver(GpuDriver):
    """Two GPUs, one of them half taken by another program."""

    def free_bytes(self):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        return [139 * 10**9, 70 * 10**9]


class SilentDriver(GpuDriver):
    def free_bytes(self):
        raise RuntimeError("CUDA driver version is insufficient")


def machine(cluster, *free_gb, host_gb=24):
    gpus = [str(index) for index in range(len(free_gb))]
    return MachineMemory(
        host_bytes=host_gb * GB,
        gpu_by_device=assign_gpus(cluster, gpus),
        free_bytes_by_gpu={gpu: free * GB for gpu, free in zip(gpus, free_gb, strict=True)},
    )


def needing(real, *, rollout_gb=1.0, train_gb=1.0, name="a"):
    given = real.submission(name)
    footprint = Footprint(
        rollout_device_bytes=rollout_gb * GB, train_device_bytes=train_gb * GB, rollout_host_bytes=1, train_host_bytes=1
    )
    return replace(given, pipeline=replace(given.pipeline, footprint=footprint))


def device_gb(cluster):
    return {name: round(pool.device_memory_bytes / GB, 3) for name, pool in cluster.pools.items()}


def one_pool():
    return Cluster(
        pools={"gpus": Pool(name="gpus", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=1)},
    )


def test_a_gpu_has_the_memory_that_its_driver_says_whatever_the_host_has(real):
    two = real.cluster(rollout=1, train=1)
    assert device_gb(with_machine_memory(two, [], machine(two, 139, 139))) == {"rollout": 132.05, "train": 132.05}


def test_a_core_has_its_part_of_host_memory(real):
    two = real.cluster(rollout=1, train=1)
    assert device_gb(with_machine_memory(two, [], MachineMemory(host_bytes=24 * GB))) == {
        "rollout": 10.8,
        "train": 10.8,
    }


def test_a_gpu_that_two_pools_name_is_counted_once(real):
    two = real.cluster(rollout=1, train=1)
    shared = device_gb(with_machine_memory(two, [], machine(two, 100)))
    assert sum(shared.values()) == pytest.approx(95.0)


def test_each_device_of_a_shared_gpu_gets_what_its_states_need_first(real):
    two = real.cluster(rollout=1, train=1)
    submissions = [needing(real, rollout_gb=10, train_gb=60), needing(real, rollout_gb=20, train_gb=30, name="b")]
    shared = with_machine_memory(two, submissions, machine(two, 100))
    waiting_gb = 2 * CUDA_CONTEXT_BYTES / GB  # of the workers whose state is off the GPU
    spare_gb = (95 - waiting_gb - 20 - 60) / 2
    assert device_gb(shared) == {"rollout": pytest.approx(20 + spare_gb), "train": pytest.approx(60 + spare_gb)}
    check_each_fits(shared, submissions)


def test_states_that_do_not_fit_a_shared_gpu_together_are_refused_with_the_numbers(real):
    two = real.cluster(rollout=1, train=1)
    with pytest.raises(RefusedError) as caught:
        with_machine_memory(two, [needing(real, rollout_gb=40, train_gb=60)], machine(two, 100))
    assert str(caught.value) == (
        "cluster: GPU 0 has 95.000 GB for 2 devices, whose largest states need 100.000 GB together: "
        "40.000 GB for rollout-0.0 + 60.000 GB for train-0.0; give one pool with phase: both, where states take turns, "
        "or fewer devices"
    )


def test_in_one_pool_for_both_phases_states_take_turns(real):
    submissions = [needing(real, rollout_gb=40, train_gb=60)]
    pool = one_pool()
    shared = with_machine_memory(pool, submissions, machine(pool, 100))
    assert device_gb(shared) == {"gpus": pytest.approx(95 - CUDA_CONTEXT_BYTES / GB)}
    check_each_fits(shared, submissions)
    with pytest.raises(RefusedError, match=r"train worker needs 96\.000 GB of device memory, and there are 94\.100 GB"):
        check_each_fits(shared, [needing(real, train_gb=96)])


def test_a_refusal_shows_numbers_that_differ_however_small_they_are(real):
    two = real.cluster(rollout=1, train=1)
    small = with_machine_memory(two, [], MachineMemory(host_bytes=0.001 * GB))
    with pytest.raises(RefusedError, match=r"needs 0\.001 GB of device memory, and there are 0\.00045 GB"):
        check_each_fits(small, [needing(real, rollout_gb=0.001)])


def test_nodes_of_a_pool_have_the_least_memory_of_its_gpus(real):
    two = real.cluster(rollout=1, train=2)
    uneven = with_machine_memory(two, [], machine(two, 100, 80, 40))
    assert device_gb(uneven) == {"rollout": 95.0, "train": 38.0}


def test_the_file_makes_a_devices_memory_less_and_never_more(real):
    two = real.cluster(rollout=1, train=1)
    given = Cluster(
        pools={
            "rollout": replace(two.pools["rollout"], device_memory_bytes=10 * GB),
            "train": replace(two.pools["train"], device_memory_bytes=1000 * GB),
        }
    )
    assert device_gb(with_machine_memory(given, [], machine(given, 100, 100))) == {"rollout": 10.0, "train": 95.0}


def test_the_driver_is_asked_in_a_process_that_sees_the_gpus(real):
    described = describe_machine(real.cluster(), gpus=["0", "1"], make_driver=KnownDriver)
    assert described.free_bytes_by_gpu == {"0": 139e9, "1": 70e9}
    assert {str(device): gpu for device, gpu in described.gpu_by_device.items()} == {
        "rollout-0.0": "0",
        "train-0.0": "1",
    }


def test_a_driver_that_fails_or_knows_other_gpus_is_told_in_one_line(real):
    with pytest.raises(UserError, match=r"memory of GPUs 0 is not known: RuntimeError: CUDA driver version"):
        describe_machine(real.cluster(), gpus=["0"], make_driver=SilentDriver)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPUs of this machine")
def test_gpus_that_torch_cannot_use_are_told_with_what_to_do(real):
    with pytest.raises(UserError, match="this machine has GPUs that torch cannot use"):
        describe_machine(real.cluster(), gpus=["0"])


def gang(size=2, *, rollout=1, train=1):
    return Cluster(
        pools={
            "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=rollout, gpus_per_node=size),
            "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=train),
        }
    )


def test_a_device_of_several_gpus_has_the_memory_of_all_and_the_fullest_decides():
    two = gang()
    assert device_gb(with_machine_memory(two, [], machine(two, 100, 100, 100))) == {"rollout": 190.0, "train": 95.0}
    assert device_gb(with_machine_memory(two, [], machine(two, 100, 60, 100))) == {"rollout": 114.0, "train": 95.0}


def test_on_a_shared_gpu_a_state_takes_its_part_of_each(real):
    """Training shares the first of the two GPUs."""
    two = gang()
    submissions = [needing(real, rollout_gb=100, train_gb=40)]
    shared = with_machine_memory(two, submissions, machine(two, 100, 100))
    assert device_gb(shared) == {"rollout": pytest.approx(100 + 2 * 2.5), "train": pytest.approx(40 + 2.5)}
    check_each_fits(shared, submissions)
    with pytest.raises(RefusedError, match=r"GPU 0 has 95.000 GB for 2 devices, .*: 60.000 GB for rollout-0.0 \+ 40"):
        with_machine_memory(two, [needing(real, rollout_gb=120, train_gb=40)], machine(two, 100, 100))


def test_cores_and_host_memory_are_counted_as_the_gpus_would_be():
    two = gang(3)
    memory = with_machine_memory(two, [], MachineMemory(host_bytes=40 * GB, num_cores=5))
    assert device_gb(memory) == {"rollout": 27.0, "train": 9.0}
    assert [pool.host_memory_bytes / GB for pool in memory.pools.values()] == [pytest.approx(27.0), pytest.approx(9.0)]
    assert not memory.pools["rollout"].shares_hardware
    fewer = with_machine_memory(two, [], MachineMemory(host_bytes=40 * GB, num_cores=4))
    assert fewer.pools["rollout"].shares_hardware


@pytest.mark.parametrize(("num_gpus", "is_shared"), [(3, False), (2, True)])
def test_hardware_is_shared_where_devices_have_gpus_in_common(num_gpus, is_shared):
    two = gang()
    shared = with_machine_memory(two, [], machine(two, *[100] * num_gpus))
    assert {pool.shares_hardware for pool in shared.pools.values()} == {is_shared}


def test_a_device_of_more_gpus_than_there_are_is_refused_before_anything_starts():
    with pytest.raises(UserError, match="a device has 4 GPUs, and this machine has 2"):
        describe_machine(gang(4), gpus=["0", "1"], make_driver=KnownDriver)

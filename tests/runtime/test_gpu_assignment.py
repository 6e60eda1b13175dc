"""Which GPU a device of this machine is. The assignment alone: no GPU is needed."""

from __future__ import annotations

import os

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, DeviceId, Phase, Pool
from rlmux.runtime import gpus_here, local
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.mps import MpsDaemon


def names(assigned):
    return {str(device): gpu for device, gpu in assigned.items()}


def test_each_device_is_a_gpu_in_the_order_of_the_file(real):
    assigned = local.assign_gpus(real.cluster(rollout=2, train=1), ["0", "1", "2"])
    assert names(assigned) == {"rollout-0.0": "0", "rollout-1.0": "1", "train-0.0": "2"}


def test_gpus_are_shared_when_there_are_more_devices(real):
    assigned = local.assign_gpus(real.cluster(rollout=1, train=1), ["3"])
    assert set(assigned.values()) == {"3"}
    assert all(isinstance(device, DeviceId) for device in assigned)


def test_without_gpus_devices_are_cores(real):
    assert local.assign_gpus(real.cluster(), []) == {}


def test_a_pool_without_a_number_is_told_how_many_gpus_there_are():
    unlimited = Cluster(pools={"rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=None)})
    with pytest.raises(UserError, match="this machine has 2 GPUs"):
        local.assign_gpus(unlimited, ["0", "1"])


@pytest.mark.parametrize(
    ("variable", "version", "has_driver", "gpus"),
    [
        ("1,3", "2.13.0", True, ["1", "3"]),
        ("", "2.13.0", True, []),
        (None, "2.13.0", True, ["0", "1"]),
        ("1", "2.13.0+cpu", True, []),
        ("1", "2.13.0", False, []),
    ],
)
def test_only_gpus_that_may_be_used_are_seen(monkeypatch, tmp_path, variable, version, has_driver, gpus):
    driver, listed = tmp_path / "nvidiactl", tmp_path / "gpus"
    if has_driver:
        driver.touch()
        for name in ("0000:01:00.0", "0000:02:00.0"):
            (listed / name).mkdir(parents=True)
    monkeypatch.setattr(gpus_here, "_DRIVER", driver)
    monkeypatch.setattr(gpus_here, "_GPUS", listed)
    monkeypatch.setattr(gpus_here.importlib.metadata, "version", lambda _: version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert gpus_here.visible_gpus() == gpus


class _Environment:
    """A worker that shows its variables."""

    def of(self, names):
        return [os.environ.get(name) for name in names]


@pytest.mark.parametrize("shares_devices", [True, False])
def test_workers_of_gpus_that_pipelines_share_have_the_runs_mps_daemon(
    real, monkeypatch, tmp_path, capsys, shares_devices
):
    """Without CUDA: the daemon is of ours, and the GPU a name."""
    started, ended, shown = [], [], []
    daemon = MpsDaemon()
    daemon.environment = {"CUDA_MPS_PIPE_DIRECTORY": "here"}
    daemon.missing = "it is not installed here"
    monkeypatch.setattr(daemon, "end", lambda: ended.append(1))
    monkeypatch.setattr(MpsDaemon, "start", lambda: started.append(1) or daemon)
    monkeypatch.setattr(local, "visible_gpus", lambda: ["0"])
    cluster = real.cluster(rollout=1, train=1)
    backend = local.local_backend(cluster, tmp_path, options=WorkerOptions(shares_devices=shares_devices))
    try:
        worker = backend.workplace.spawn(
            "shown", _Environment, (), device=DeviceId("rollout", 0, 0), log_path=tmp_path / "log", call_limit_s=60.0
        )
        worker.call(0.0, "of", (["CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"],), shown.append)
        while not shown:
            for ready in backend.workplace.wait(60.0):
                ready.receive(0.0)
        backend.workplace.forget(worker)
        worker.kill()
    finally:
        backend.close()
    assert shown == [["here", "0"] if shares_devices else [None, "0"]]
    assert len(started) == len(ended) == int(shares_devices)
    line = "rlmux: MPS: it is not installed here: pipelines take turns on a GPU that they share\n"
    assert (line in capsys.readouterr().err) == shares_devices


def several(size: int, *, rollout: int = 1, train: int = 1) -> Cluster:
    pools = {
        "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=train),
        "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=rollout, gpus_per_node=size),
    }
    return Cluster(pools=pools)


def test_a_device_of_several_gpus_has_neighbouring_ones_and_training_the_rest():
    assigned = local.assign_gpus(several(3, rollout=2, train=2), list("01234567"))
    assert names(assigned) == {
        "rollout-0.0": "0,1,2",
        "rollout-1.0": "3,4,5",
        "train-0.0": "6",
        "train-1.0": "7",
    }


def test_devices_of_several_gpus_share_all_of_them_or_none():
    assigned = names(local.assign_gpus(several(4, rollout=3), list("012345")))
    assert [assigned[f"rollout-{index}.0"] for index in range(3)] == ["0,1,2,3"] * 3
    assert assigned["train-0.0"] == "0"


def test_a_device_of_more_gpus_than_there_are_is_one_line():
    with pytest.raises(UserError) as caught:
        local.assign_gpus(several(4), ["0", "1"])
    line = "cluster.pools.rollout: a device has 4 GPUs, and this machine has 2; accepted: gpus_per_device up to 2"
    assert str(caught.value) == line


def test_on_a_machine_without_gpus_a_device_has_as_many_cores(monkeypatch):
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert names(local.assign_cores(several(2, rollout=2))) == {
        "train-0.0": (0,),
        "rollout-0.0": (1, 2),
        "rollout-1.0": (0, 1),
    }
    assert local.assign_cores(several(8))[DeviceId("rollout", 0, 0)] == (1, 2, 0), "each core once"


@pytest.mark.parametrize(("gpus", "noted"), [(5, ""), (4, "2 devices of 5 GPUs share 4 GPUs of this machine")])
def test_too_few_gpus_for_all_devices_are_told_of(monkeypatch, gpus, noted):
    monkeypatch.setattr(local, "visible_gpus", lambda: [str(index) for index in range(gpus)])
    assert noted in "".join(local.notes_of_devices(several(4)))
    assert bool(local.notes_of_devices(several(4))) == bool(noted)


def test_a_run_signs_for_every_gpu_of_its_devices_and_its_worker_sees_them(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "visible_gpus", lambda: ["0", "1", "2"])
    shown = []
    backend = local.local_backend(several(2), tmp_path)
    try:
        held = local.neighbours_on(local.SharedMemoryFolder.path_of(tmp_path).parent, ["GPU 1"], but=[])
        worker = backend.workplace.spawn(
            "shown", _Environment, (), device=DeviceId("rollout", 0, 0), log_path=tmp_path / "log", call_limit_s=60.0
        )
        worker.call(0.0, "of", (["CUDA_VISIBLE_DEVICES"],), shown.append)
        while not shown:
            for ready in backend.workplace.wait(60.0):
                ready.receive(0.0)
        backend.workplace.forget(worker)
        worker.kill()
    finally:
        backend.close()
    assert str(tmp_path) in [neighbour.folder for neighbour in held]
    assert shown == [["0,1"]]

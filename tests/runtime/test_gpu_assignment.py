"""Which GPU a device of this machine is. The assignment alone: no GPU is needed."""

from __future__ import annotations

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import Cluster, DeviceId, Phase, Pool
from rlmux.runtime import local


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
    monkeypatch.setattr(local, "_DRIVER", driver)
    monkeypatch.setattr(local, "_GPUS", listed)
    monkeypatch.setattr(local.importlib.metadata, "version", lambda _: version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert local.visible_gpus() == gpus

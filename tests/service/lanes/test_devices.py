"""No two lanes have a device in common, whatever the file says and whatever went before."""

from __future__ import annotations

import json
import os
import signal

import pytest

from rlmux.config.load import parse_spec
from rlmux.config.service_file import Lane
from rlmux.core.errors import UserError
from rlmux.log.folder_lock import FolderLock
from rlmux.runtime.local import SharedMemoryFolder
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.devices import (
    NOT_HELD,
    LaneDevices,
    check_devices,
    neighbours_of,
    num_devices,
    parts_of,
)

GPUS = [f"GPU {index}" for index in range(4)]
CORES = [f"core {index}" for index in range(4)]


def lanes(tmp_path, **devices: int):
    text = "cluster: {{pools: {{train: {{phase: both, devices: {}}}}}}}"
    return {
        name: parse_spec(text.format(num), source="service.yaml", folder=tmp_path, may_be_empty=True)
        for name, num in devices.items()
    }


def test_lanes_have_devices_of_their_own_in_the_files_order(tmp_path):
    assert parts_of(tmp_path, lanes(tmp_path, a=2, b=1), GPUS) == {
        "a": LaneDevices(gpus=("0", "1")),
        "b": LaneDevices(gpus=("2",)),
    }


def test_a_lane_keeps_its_devices_when_others_come_before_it(tmp_path):
    parts_of(tmp_path, lanes(tmp_path, b=1, c=1), CORES)
    found = parts_of(tmp_path, lanes(tmp_path, a=1, c=1, b=1), CORES)
    assert found == {"a": LaneDevices(cores=(2,)), "b": LaneDevices(cores=(0,)), "c": LaneDevices(cores=(1,))}


def test_one_lane_alone_may_have_more_devices_than_the_machine_and_is_not_held(tmp_path):
    check_devices(lanes(tmp_path, a=9), CORES)
    assert parts_of(tmp_path, lanes(tmp_path, a=9), CORES) == {"a": NOT_HELD}


def test_lanes_with_more_devices_than_the_machine_are_refused_in_a_line(tmp_path):
    with pytest.raises(
        UserError, match=r"lanes a \(2\), b \(3\) have 5 devices together; accepted: at most 4, the GPU"
    ):
        check_devices(lanes(tmp_path, a=2, b=3), GPUS)


def test_a_damaged_list_of_devices_is_told_in_a_line_and_stands(tmp_path):
    (tmp_path / "devices.json").write_text('{"a": [')
    with pytest.raises(UserError, match=r"devices.json: not JSON .* accepted: remove it where no controller"):
        parts_of(tmp_path, lanes(tmp_path, a=1), CORES)
    assert (tmp_path / "devices.json").read_text() == '{"a": ['


def test_a_lane_that_left_the_file_keeps_its_devices_as_long_as_its_controller_lives(tmp_path):
    parts_of(tmp_path, lanes(tmp_path, gone=2, a=1), CORES)
    (tmp_path / "gone").mkdir()
    with FolderLock.take(tmp_path / "gone") as lock:
        lock.sign()
        assert parts_of(tmp_path, lanes(tmp_path, a=1, b=1), CORES)["b"] == LaneDevices(cores=(3,))
        with pytest.raises(UserError, match=r"lanes gone \(2\), a \(1\), b \(2\)"):
            parts_of(tmp_path, lanes(tmp_path, a=1, b=2), CORES)
    assert parts_of(tmp_path, lanes(tmp_path, a=1, b=2), CORES)["b"] == LaneDevices(cores=(0, 1))
    assert set(json.loads((tmp_path / "devices.json").read_text())) == {"a", "b"}


def test_a_controller_computes_on_the_cores_of_its_lane(tmp_path):
    core = max(os.sched_getaffinity(0))
    lane = LaneController(tmp_path, "a", Lane(spec=lanes(tmp_path, a=1)["a"]), LaneDevices(cores=(core,)))
    lane.poll()
    process = lane._process
    assert process is not None
    try:
        assert os.sched_getaffinity(process.pid) == {core}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_lanes_of_another_service_on_the_same_devices_are_named_and_their_own_are_not(tmp_path):
    devices = ["core 900", "core 901"]
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        parts_of(tmp_path / root, lanes(tmp_path, cpu=2), devices)
    signed = SharedMemoryFolder(tmp_path / "one" / "cpu")
    signed.sign(tmp_path / "one" / "cpu", devices)
    try:
        assert neighbours_of(tmp_path / "one", ["cpu"]) == []
        (found,) = neighbours_of(tmp_path / "two", ["cpu"])
        assert (found.folder, found.devices) == (str(tmp_path / "one" / "cpu"), tuple(devices))
        assert "idle now" in str(found)
    finally:
        signed.close()
    assert neighbours_of(tmp_path / "two", ["cpu"]) == []


def test_a_lane_has_all_gpus_of_its_devices(tmp_path):
    text = "cluster: {pools: {rollout: {devices: 1, gpus_per_device: 2}, train: {devices: 1}}}"
    wide = parse_spec(text, source="service.yaml", folder=tmp_path, may_be_empty=True)
    both = {"wide": wide, **lanes(tmp_path, b=1)}
    other = tmp_path / "other"
    other.mkdir()
    assert num_devices(wide) == 3
    assert parts_of(tmp_path, both, GPUS)["wide"] == LaneDevices(gpus=("0", "1", "2"))
    assert parts_of(other, both, CORES)["wide"] == LaneDevices(cores=(0, 1, 2))

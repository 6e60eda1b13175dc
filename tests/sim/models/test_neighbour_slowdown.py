"""What busy neighbours cost: read from a profile, and taken off the seconds of a log."""

from __future__ import annotations

import json

import pytest

from rlmux.core.errors import UserError
from rlmux.core.model import DeviceId
from rlmux.sim.models.interference import FractionGrid, InterferenceTable
from rlmux.sim.models.neighbour_slowdown import Busy, Neighbours, load_neighbours, seconds_lost

HERE, THERE, ELSEWHERE = DeviceId("rollout", 0, 0), DeviceId("rollout", 0, 1), DeviceId("train", 0, 0)
COSTS = {("dense", "dense"): 1.25, ("dense", "update"): 2.0, ("update", "dense"): 1.6}
TABLE = Neighbours(device="a cpu", measured=COSTS)


def busy(order, device, start_s, end_s, sub_stage="dense"):
    return Busy(order=order, device=device, sub_stage=sub_stage, start_s=start_s, end_s=end_s)


def save(folder, **fields):
    path = folder / "profile.json"
    table = InterferenceTable(device="a cpu", grid=FractionGrid(device="a cpu", num_units=20))
    path.write_text(json.dumps({**table.to_json(), **fields}))
    return path


def test_the_worst_neighbour_counts():
    assert TABLE.slowdown("dense", []) == 1.0
    assert TABLE.slowdown("dense", ["dense", "update", "dense"]) == 2.0


def test_sub_stages_go_by_the_one_that_was_measured_for_them():
    assert TABLE.slowdown("tail", ["prefill"]) == 1.25
    assert TABLE.slowdown("old_logprobs", ["tail"]) == 1.6


def test_a_pair_that_was_not_measured_costs_nothing():
    assert TABLE.slowdown("update", ["update"]) == TABLE.slowdown("tool_wait", ["dense"]) == 1.0


def test_an_order_loses_while_another_computes_beside_it_and_only_then():
    """6 of 10 s beside decoding at 1 / 1.25; the other 6 of 6 s."""
    lost = seconds_lost([busy(1, HERE, 0.0, 10.0), busy(2, THERE, 4.0, 10.0)], TABLE)
    assert lost == {1: pytest.approx(6 * 0.2), 2: pytest.approx(6 * 0.2)}


def test_training_and_decoding_lose_each_as_measured():
    lost = seconds_lost([busy(1, HERE, 0.0, 4.0), busy(2, THERE, 2.0, 9.0, "old_logprobs")], TABLE)
    assert lost == {1: pytest.approx(2 * 0.5), 2: pytest.approx(2 * 0.375)}


def test_another_machine_costs_nothing_unless_the_nodes_are_one_machine():
    pieces = [busy(1, HERE, 0.0, 1.0), busy(2, ELSEWHERE, 0.0, 1.0)]
    assert seconds_lost(pieces, TABLE) == {}
    one = Neighbours(device="a cpu", measured=TABLE.measured, is_one_machine=True)
    assert seconds_lost(pieces, one) == {1: pytest.approx(0.2), 2: pytest.approx(0.2)}


def test_an_order_on_the_same_device_is_no_neighbour():
    assert set(seconds_lost([busy(1, HERE, 0.0, 1.0), busy(2, HERE, 0.0, 1.0)], TABLE).values()) == {0.0}


def test_an_order_on_several_devices_is_no_neighbour_of_itself_and_its_worst_device_counts():
    both = [busy(1, device, 0.0, 8.0, "update") for device in (HERE, THERE)]
    lost = seconds_lost([*both, busy(2, HERE, 0.0, 4.0)], TABLE)
    assert lost[1] == pytest.approx(4 * 0.375)


def test_what_belongs_to_no_order_slows_others_and_loses_nothing():
    assert seconds_lost([busy(None, HERE, 0.0, 1.0), busy(2, THERE, 0.0, 1.0)], TABLE) == {2: pytest.approx(0.2)}


def test_a_profile_gives_back_what_was_measured(tmp_path):
    neighbours, warnings = load_neighbours(save(tmp_path, neighbours=TABLE.to_json()), "a cpu")
    assert (neighbours, warnings) == (TABLE, [])


def test_a_profile_from_before_neighbours_were_measured_has_none(tmp_path):
    neighbours, warnings = load_neighbours(save(tmp_path), "a cpu")
    assert neighbours is None
    assert "has nothing of neighbouring devices: busy neighbours are taken to cost nothing" in warnings[0]


def test_a_profile_of_another_device_is_named_and_not_used(tmp_path):
    neighbours, warnings = load_neighbours(save(tmp_path, neighbours=TABLE.to_json()), "another")
    assert neighbours is None
    assert "was measured on 'a cpu', not on 'another'" in warnings[0]


@pytest.mark.parametrize(
    "entries",
    [
        "fast",
        [{"kind": "dense", "beside": "dense"}],
        [{"kind": "dense", "beside": "dense", "slowdown": 0.9}],
        [{"kind": "dense", "beside": 1, "slowdown": 1.1}],
    ],
)
def test_entries_that_are_no_slowdowns_are_refused(tmp_path, entries):
    with pytest.raises(UserError, match=r"neighbour 1 is .*; expected kind, beside and a slowdown of 1 or more"):
        load_neighbours(save(tmp_path, neighbours=entries), "a cpu")

"""Interference: sound estimates, faithful files, and a named stand-in for whatever a profile lacks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.core.errors import UserError
from rlmux.sim.models.interference import (
    NO_SPLIT,
    SUB_STAGE_PROFILES,
    InterferenceTable,
    SubStageProfile,
    estimated_table,
    fraction_grid,
    load_interference,
    roofline_interference,
)

H100 = fraction_grid("H100")
SUB_STAGES = ("tail", "update")
fractions = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(
    lambda pair: SubStageProfile(compute=pair[0] * (1 - pair[1]), bandwidth=pair[1])
)


def full_table() -> InterferenceTable:
    measured = {
        (a, b, device_fraction): (1.1, 1.3) for a in SUB_STAGES for b in SUB_STAGES for device_fraction in H100.usual()
    }
    return InterferenceTable(device=H100.device, grid=H100, measured=measured)


@given(a=fractions, b=fractions, device_fraction=st.floats(0.05, 1.0))
def test_sharing_makes_neither_faster(a, b, device_fraction):
    slow_a, slow_b = roofline_interference(a, b, device_fraction)
    assert slow_a >= 1 - 1e-9
    assert slow_b >= 1 - 1e-9


@given(a=fractions, b=fractions, two=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)))
def test_a_larger_device_fraction_slows_less(a, b, two):
    low, high = sorted(two)
    assert roofline_interference(a, b, high)[0] <= roofline_interference(a, b, low)[0] + 1e-6


@given(a=fractions, b=fractions, device_fraction=st.floats(0.05, 0.95))
def test_the_two_sides_swap(a, b, device_fraction):
    slow_a, slow_b = roofline_interference(a, b, device_fraction)
    assert roofline_interference(b, a, 1 - device_fraction) == pytest.approx((slow_b, slow_a))


def test_a_tail_beside_an_update_beats_two_updates():
    tail, update = roofline_interference("tail", "update", 0.2)
    assert tail + update < sum(roofline_interference("update", "update", 0.2))
    assert 1 / tail + 1 / update > 1.4


def test_a_tool_wait_disturbs_no_other():
    assert roofline_interference("update", "tool_wait", NO_SPLIT) == (1.0, 1.0)


def test_gpu_fractions_are_whole_groups_of_multiprocessors():
    assert [round(device_fraction * 132) for device_fraction in H100.usual()] == [24, 56, 88, 120, 132]
    assert fraction_grid("cpu", 2).usual() == (0.5, NO_SPLIT)
    assert fraction_grid("cpu", 1).usual() == (NO_SPLIT,)


def test_a_saved_table_loads_as_it_was(tmp_path):
    full_table().save(tmp_path / "h100.json")
    loaded, warnings = load_interference(tmp_path / "h100.json", H100, SUB_STAGES)
    assert warnings == []
    assert loaded == full_table()
    assert loaded.slowdowns("tail", "update", H100.usual()[1]) == (1.1, 1.3)


def test_a_file_of_another_device_is_not_used_and_says_so(tmp_path):
    full_table().save(tmp_path / "h100.json")
    a100 = fraction_grid("A100")
    loaded, warnings = load_interference(tmp_path / "h100.json", a100, SUB_STAGES)
    assert loaded == estimated_table(a100)
    assert len(warnings) == 1
    assert "'H100-80GB-SXM', not on 'A100-80GB-SXM'" in warnings[0]
    assert "every pair is estimated" in warnings[0]


def test_holes_are_counted_named_and_estimated(tmp_path):
    whole = full_table()
    lacking = {key: value for key, value in whole.measured.items() if key[:2] != ("tail", "tail")}
    InterferenceTable(device=whole.device, grid=H100, measured=lacking).save(tmp_path / "holes.json")
    loaded, warnings = load_interference(tmp_path / "holes.json", H100, SUB_STAGES)
    assert len(warnings) == 1
    assert "has 5 holes: (tail, tail, 0.182)" in warnings[0]
    assert "and 1 more; these are estimated" in warnings[0]
    device_fraction = H100.usual()[0]
    assert not loaded.is_measured("tail", "tail", device_fraction)
    assert loaded.slowdowns("tail", "tail", device_fraction) == roofline_interference("tail", "tail", device_fraction)


def test_an_impossible_device_fraction_is_left_out_and_the_nearest_named(tmp_path):
    content = full_table().to_json()
    content["entries"].append({"a": "tail", "b": "update", "level": 0.5, "slowdown_a": 9, "slowdown_b": 9})
    (tmp_path / "odd.json").write_text(json.dumps(content))
    loaded, warnings = load_interference(tmp_path / "odd.json", H100, SUB_STAGES)
    assert len(warnings) == 1
    assert "cannot do fraction 0.5 of (tail, update)" in warnings[0]
    assert "0.485 is the nearest" in warnings[0]
    assert (9, 9) not in loaded.measured.values()


def test_a_missing_pair_is_read_from_its_mirror():
    table = InterferenceTable(device=H100.device, grid=H100, measured={("tail", "update", 24 / 132): (1.2, 1.05)})
    assert table.slowdowns("update", "tail", 108 / 132) != (1.05, 1.2)  # 108 multiprocessors cannot be had
    exact = InterferenceTable(device="cpu", grid=fraction_grid("cpu", 4), measured={("a", "b", 0.25): (1.2, 1.05)})
    assert exact.slowdowns("b", "a", 0.75) == (1.05, 1.2)


def test_no_profile_is_a_warning_and_every_sub_stage_has_an_estimate():
    table, warnings = load_interference(None, H100)
    assert warnings == ["no interference profile for H100-80GB-SXM: every pair is estimated"]
    for sub_stage in SUB_STAGE_PROFILES:
        assert min(table.slowdowns(sub_stage, "update", 0.4)) >= 1.0


def test_a_profile_with_a_name_of_version_0_1_is_read_with_a_hint(tmp_path):
    content = full_table().to_json()
    content["entries"].append({"a": "old_log_probs", "b": "update", "level": 1.0, "slowdown_a": 1.5, "slowdown_b": 1.6})
    (tmp_path / "old.json").write_text(json.dumps(content))
    loaded, warnings = load_interference(tmp_path / "old.json", H100, SUB_STAGES)
    assert loaded.slowdowns("old_logprobs", "update", NO_SPLIT) == (1.5, 1.6)
    assert len(warnings) == 1
    assert "'old_log_probs' is called 'old_logprobs' now" in warnings[0]


def test_a_profile_of_a_sub_stage_that_is_none_is_refused(tmp_path):
    content = full_table().to_json()
    content["entries"][0]["a"] = "sleep"
    (tmp_path / "odd.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="sub-stage 'sleep' is unknown; accepted: prefill, dense"):
        load_interference(tmp_path / "odd.json", H100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "cannot be read"),
        ("[]", "not an interference profile"),
        ('{"schema": 2, "entries": []}', "expected schema 1"),
        ('{"schema": 1, "device": "x", "entries": [{"a": "tail"}]}', "entry 1"),
        (
            '{"schema": 1, "entries": [{"a": "t", "b": "u", "level": 2, "slowdown_a": 1, "slowdown_b": 1}]}',
            r"level in \(0, 1\]",
        ),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_interference(tmp_path / "bad.json", H100)


def test_unknown_sub_stages_and_device_fractions_are_refused():
    with pytest.raises(UserError, match="known: prefill"):
        roofline_interference("sleep", "tail", 0.5)
    with pytest.raises(UserError, match="device fraction is 0;"):
        roofline_interference("tail", "tail", 0)

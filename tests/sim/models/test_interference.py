"""Interference: sound estimates, faithful files, and a named stand-in for whatever a profile lacks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmux.core.errors import UserError
from rlmux.core.estimation.colocation import SharingTriple
from rlmux.core.model import SubStage
from rlmux.sim.models.interference import (
    NO_SPLIT,
    SUB_STAGE_PROFILES,
    InterferenceTable,
    SubStageProfile,
    estimated_table,
    fraction_grid,
    load_interference,
    measured_table,
    rest_of,
    roofline_interference,
    sharing_table,
    split_of_three,
    table_without_interference,
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


def of_two(a, b, device_fraction):
    """Estimated slowdowns of two, the first with that device fraction."""
    return roofline_interference([(a, device_fraction), (b, rest_of(device_fraction))])


@given(a=fractions, b=fractions, device_fraction=st.floats(0.05, 1.0))
def test_sharing_makes_neither_faster(a, b, device_fraction):
    slow_a, slow_b = of_two(a, b, device_fraction)
    assert slow_a >= 1 - 1e-9
    assert slow_b >= 1 - 1e-9


@given(a=fractions, b=fractions, two=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)))
def test_a_larger_device_fraction_slows_less(a, b, two):
    low, high = sorted(two)
    assert of_two(a, b, high)[0] <= of_two(a, b, low)[0] + 1e-6


@given(a=fractions, b=fractions, device_fraction=st.floats(0.05, 0.95))
def test_the_two_sides_swap(a, b, device_fraction):
    slow_a, slow_b = of_two(a, b, device_fraction)
    assert of_two(b, a, 1 - device_fraction) == pytest.approx((slow_b, slow_a))


@given(three=st.tuples(fractions, fractions, fractions), cuts=st.tuples(st.floats(0.1, 0.4), st.floats(0.1, 0.4)))
def test_a_third_on_the_rest_of_a_device_makes_neither_of_two_faster(three, cuts):
    together = list(zip(three, (*cuts, 1.0 - sum(cuts)), strict=True))
    slow = roofline_interference(together)
    alone = roofline_interference(together[:2])
    assert all(of_three >= of_two - 1e-4 for of_three, of_two in zip(slow, alone, strict=False))


def test_three_that_all_fill_a_device_have_a_third_of_it_each_however_it_is_shared():
    busy = SubStageProfile(compute=1.0, bandwidth=0.0)
    assert roofline_interference([(busy, 1 / 3)] * 3) == pytest.approx([3.0] * 3)
    assert min(roofline_interference([(busy, NO_SPLIT)] * 3)) > max(of_two(busy, busy, NO_SPLIT))


def test_a_tail_beside_an_update_beats_two_updates():
    tail, update = of_two("tail", "update", 0.2)
    assert tail + update < sum(of_two("update", "update", 0.2))
    assert 1 / tail + 1 / update > 1.4


def test_a_tool_wait_disturbs_no_other():
    assert of_two("update", "tool_wait", NO_SPLIT) == (1.0, 1.0)


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
    assert loaded.slowdowns("tail", "tail", device_fraction) == of_two("tail", "tail", device_fraction)


THREE = ("dense", "tail", "update")
OF_THREE = SharingTriple(sub_stages=THREE, device_fractions=(40 / 132, 40 / 132, 48 / 132), slowdowns=(1.4, 1.2, 1.9))


def test_a_measured_triple_is_answered_in_any_order_and_another_is_estimated():
    table = InterferenceTable(device=H100.device, grid=H100, triples=(OF_THREE,))
    sides = list(zip(THREE, OF_THREE.device_fractions, strict=True))
    assert table.slowdowns_together(sides) == (1.4, 1.2, 1.9)
    assert table.slowdowns_together(sides[::-1]) == (1.9, 1.2, 1.4)
    other = [("tail", 40 / 132)] * 3
    assert table.slowdowns_together(other) == roofline_interference(other)


def test_saved_triples_load_as_they_were_and_those_that_the_device_cannot_do_are_named(tmp_path):
    table = replace(full_table(), triples=(OF_THREE,))
    table.save(tmp_path / "h100.json")
    assert load_interference(tmp_path / "h100.json", H100, SUB_STAGES) == (table, [])
    content = table.to_json()
    content["triples"].append({"sub_stages": THREE, "levels": [0.2, 0.3, 0.4], "slowdowns": [2, 2, 2]})
    (tmp_path / "odd.json").write_text(json.dumps(content))
    loaded, warnings = load_interference(tmp_path / "odd.json", H100, SUB_STAGES)
    assert loaded == table
    assert "cannot do fractions 0.2, 0.3, 0.4 of (dense, tail, update)" in warnings[0]


@pytest.mark.parametrize(
    "malformed",
    [
        {"levels": None},
        {"sub_stages": ["dense", "tail"]},
        {"sub_stages": [["dense"], "tail", "update"]},
        {"sub_stages": ["tail", "tail", "update"], "levels": [0.2, 0.3, 0.4]},
        {"levels": [0.4, 0.4, 0.4]},
        {"levels": [0, 0.5, 0.5]},
        {"slowdowns": [0.9, 1, 1]},
        {"slowdowns": ["1", 1, 1]},
    ],
)
def test_a_malformed_triple_is_refused_in_one_line(tmp_path, malformed):
    triple = {"sub_stages": THREE, "levels": [0.25, 0.25, 0.5], "slowdowns": [2, 2, 2], **malformed}
    (tmp_path / "bad.json").write_text(json.dumps({**full_table().to_json(), "triples": [triple]}))
    with pytest.raises(UserError, match=r"triple 1 is .*; expected three sub_stages, three levels"):
        load_interference(tmp_path / "bad.json", H100)


def test_three_have_the_fractions_closest_to_thirds_and_two_alike_have_the_same():
    table = estimated_table(H100)
    assert split_of_three(table, THREE, H100.near_thirds()) == (48 / 132, 40 / 132, 40 / 132)
    assert split_of_three(table, ("tail", "tail", "update"), (0.2, 0.4)) == (0.4, 0.4, 0.2)
    assert split_of_three(table, ("tail",) * 3, (0.2, 0.4)) == (0.2,) * 3
    assert split_of_three(table, THREE, (0.1, 0.25, 0.5, 0.75, 0.9)) == (0.25, 0.25, 0.25)
    assert split_of_three(table, THREE, (0.5,)) is None


def test_policies_know_measured_triples_as_measured_and_others_by_the_estimate():
    sharing = sharing_table(InterferenceTable(device=H100.device, grid=H100, triples=(OF_THREE,)))
    assert sharing.rates_beside("tail", ("update", "dense")).slowdown == 1.2
    of_tails = sharing.rates_beside("tail", ("tail", "tail"))
    assert of_tails.slowdown == roofline_interference([("tail", of_tails.device_fraction)] * 3)[0]
    assert sharing_table(estimated_table(fraction_grid("cpu", 2))).most_together == 2


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
        ('{"schema": 1, "device": "x", "entries": [], "triples": ["tail"]}', "triple 1 is 'tail'"),
        ('{"schema": 1, "device": "x", "entries": [], "triples": 3}', "triple 1 is 3"),
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
        of_two("sleep", "tail", 0.5)
    with pytest.raises(UserError, match="device fraction is 0;"):
        of_two("tail", "tail", 0)


def test_the_table_of_the_package_has_measured_pairs_and_a_reference_pass_as_old_logprobs():
    table = measured_table(H100)
    dense, old, reference = SubStage.DENSE_DECODE, SubStage.OLD_LOGPROBS, SubStage.REFERENCE
    assert table.is_measured(dense, SubStage.UPDATE, 0.5455)
    assert table.slowdowns(dense, reference, 0.5455) == table.slowdowns(dense, old, 0.5455)
    assert table.slowdowns(dense, dense, 0.3636) == (1.687, 1.689)
    assert min(min(pair) for pair in table.measured.values()) >= 1.0


def test_nothing_is_slowed_without_interference():
    table = table_without_interference(H100)
    assert table.slowdowns(SubStage.UPDATE, SubStage.DENSE_DECODE, 0.3636) == (1.0, 1.0)
    assert table.slowdowns(SubStage.UPDATE, SubStage.UPDATE, NO_SPLIT) == (1.0, 1.0)

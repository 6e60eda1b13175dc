"""What a policy may know of sharing a device."""

from __future__ import annotations

from rlmux.core.estimation.colocation import (
    BaseBatches,
    SharedRates,
    SharingEntry,
    SharingTable,
    SharingTriple,
    sub_stage_in,
)
from rlmux.core.model import SubStage


def entry(a, b, device_fraction, slow_a, slow_b):
    return SharingEntry(
        sub_stage_a=a, sub_stage_b=b, device_fraction=device_fraction, slowdown_a=slow_a, slowdown_b=slow_b
    )


def test_the_two_sides_of_a_pair_never_have_more_than_the_device():
    table = SharingTable.of(
        entry(a, b, device_fraction, 1.1, 1.4)
        for a in ("x", "y")
        for b in ("x", "y")
        for device_fraction in (0.25, 0.75, 0.9)
    )
    for a in ("x", "y"):
        for b in ("x", "y"):
            assert table.rates_beside(a, (b,)).device_fraction + table.rates_beside(b, (a,)).device_fraction <= 1.0


def test_two_alike_both_get_the_smaller_fraction_and_its_slowdown():
    shared = SharingTable.of([entry("x", "x", 0.75, 1.1, 1.7)]).rates_beside("x", ("x",))
    assert (shared.device_fraction, shared.slowdown) == (0.25, 1.7)


def test_a_pair_that_does_no_more_together_than_one_after_the_other_is_not_in_the_table():
    assert SharingTable.of([entry("x", "y", 0.5, 2.0, 2.0)]).rates_beside("x", ("y",)) is None
    assert SharingTable.of([entry("x", "x", 0.75, 1.1, 2.2)]).rates_beside("x", ("x",)) is None


def triple(*slowdowns):
    return SharingTriple(sub_stages=("x", "y", "z"), device_fractions=(0.5, 0.25, 0.25), slowdowns=slowdowns)


def test_three_share_a_device_where_they_do_more_than_the_best_two_of_them():
    pairs = [entry("x", "y", 0.5, 1.5, 1.5)]
    table = SharingTable.of(pairs, [triple(2.0, 2.0, 2.0)])
    assert (table.most_together, table.rates_beside("y", ("z", "x")).device_fraction) == (3, 0.25)
    assert SharingTable.of(pairs, [triple(2.2, 2.2, 2.2)]).most_together == 2


def test_a_forward_of_training_goes_by_the_most_alike_that_was_measured():
    update = entry("update", "tail", 0.75, 1.2, 1.2)
    by_update = SharingTable.of([update])
    assert by_update.rates_beside("reference", ("tail",)) == by_update.rates_beside("update", ("tail",))
    by_forward = SharingTable.of([update, entry("old_logprobs", "tail", 0.5, 1.1, 1.1)])
    assert by_forward.rates_beside("reference", ("tail",)).slowdown == 1.1
    assert by_forward.rates_beside("update", ("tail",)).slowdown == 1.2


DECODES = (SubStage.DENSE_DECODE, SubStage.TAIL_DECODE)


def on_base(sub_stage):
    return sub_stage_in(sub_stage, "b")


def test_pipelines_of_one_base_share_in_equal_parts_whatever_they_decode():
    table = SharingTable(batches=(BaseBatches(base="b", sub_stages=DECODES, slowdowns=(1.5, 1.8)),))
    dense, tail = map(on_base, DECODES)
    assert table.most_together == 3
    assert table.rates_beside(dense, (tail,)) == SharedRates(0.5, 1.5)
    assert table.rates_beside(tail, (tail, dense)) == SharedRates(1 / 3, 1.8)
    assert table.up_to(2).most_together == 2
    assert table.rates_beside(dense, (sub_stage_in(SubStage.TAIL_DECODE, "other"),)) is None


def test_a_batch_that_does_no_more_than_one_of_a_pipeline_less_is_not_in_the_table():
    assert BaseBatches(base="b", sub_stages=DECODES, slowdowns=(2.0, 2.1)).helpful() == ()
    assert BaseBatches(base="b", sub_stages=DECODES, slowdowns=(1.5, 2.25, 2.3)).helpful() == (1.5,)


def test_a_pipeline_on_a_base_shares_with_others_as_was_measured():
    measured = entry("update", SubStage.DENSE_DECODE, 0.75, 1.2, 1.3)
    table = SharingTable((measured,), batches=(BaseBatches(base="b", sub_stages=DECODES),))
    assert table.rates_beside(on_base(SubStage.DENSE_DECODE), ("update",)).slowdown == 1.3
    assert table.rates_beside("update", (on_base(SubStage.DENSE_DECODE),)).slowdown == 1.2

"""A rollout of a log, decoded again: as long as it took on its devices, as long as its trajectories need on others."""

from __future__ import annotations

import pytest

from rlmux.log.notes import decode
from rlmux.sim.workloads.recorded_rollout import Iterations, RecordedRollout

EVEN = Iterations(rows=(2, 4), seconds=(0.5, 1.0), prompt_s=0.0)


def note(runs, *, group_size=1, slots=4, waits_ms=None, iterations=(), key="iterations"):
    """As a log has it."""
    fields = {"runs": runs, "group_size": group_size, "slots": slots, key: list(iterations)}
    return decode("rollout", fields if waits_ms is None else {**fields, "waits_ms": waits_ms})


def rollout(runs, *, iterations=EVEN, fixed_s=0.0, **changes) -> RecordedRollout:
    return RecordedRollout.of_note(note(runs, **changes), iterations, fixed_s)


def shards_s(record: RecordedRollout, num_devices: int) -> list[float]:
    return [record.shard(index, num_devices).until_over(1.0) for index in range(num_devices)]


def test_an_iteration_costs_what_those_of_its_width_took():
    spent = [["dense", 2, 4, 8, 2.0], ["prefill", 4, 1, 12, 6.0], ["tail", 2, 6, 12, 3.0], ["tail", 4, 10, 35, 20.0]]
    iterations = Iterations.of_notes([note([[5]] * 3, iterations=spent), note([[5]] * 3, iterations=spent)])
    assert [iterations.decode_span_s(active, 0.0, 10) for active in (1, 2, 3, 4, 9)] == pytest.approx(
        [0.005, 0.005, 0.02, 0.02, 0.02]
    )
    assert iterations.prefill_s(3) == pytest.approx(0.006)


def test_notes_of_older_logs_are_read_under_their_old_names():
    spent = [["decode", 2, 10, 20, 5.0], ["prefill", 4, 1, 12, 6.0]]
    old = note([[5]] * 3, iterations=spent, key="bands")
    assert Iterations.of_notes([old]) == Iterations.of_notes([note([[5]] * 3, iterations=spent)])


def test_half_of_the_trajectories_take_more_than_half_of_the_time():
    """Four at once: on one device the long one begins at once and ends last, and so it does on two."""
    record = rollout([[10]] + [[2]] * 7)
    assert shards_s(record, 1) == pytest.approx([4 * 1.0 + 6 * 0.5])
    assert shards_s(record, 2)[0] == pytest.approx(2 * 1.0 + 8 * 0.5)
    assert shards_s(record, 2)[0] > 0.8 * shards_s(record, 1)[0]


def test_prompt_groups_are_dealt_out_whole():
    assert shards_s(rollout([[1], [1], [8], [8]], group_size=2), 2) == pytest.approx([0.5, 4.0])


def test_its_devices_compute_as_long_as_they_did():
    record = rollout([[10]] + [[2]] * 7, fixed_s=0.25).fitted_to(14.0, 0.0, 1)
    assert shards_s(record, 1) == pytest.approx([14.25])
    both = rollout([[10]] + [[2]] * 7, fixed_s=0.25).fitted_to(14.0, 0.0, 2)
    assert sum(shards_s(both, 2)) == pytest.approx(14.5)


def test_waits_pass_whatever_is_computed_meanwhile():
    """The first generates 2 tokens, waits 8 s, reads one, generates another, and ends after 1 s more."""
    record = rollout([[2, 1, 1], [4]], waits_ms=[[8000.0, 1000.0], [0.0]])
    assert shards_s(record, 1) == pytest.approx([2 * 0.5 + 8.0 + 2 * 0.5 + 1.0])
    faster = record.fitted_to(1.5, 18.0, 1)
    assert shards_s(faster, 1) == pytest.approx([1.5 + 18.0], rel=1e-3)


def test_a_trajectory_that_waits_yields_its_slot():
    """Two slots; both generate a token and wait 1 s: the third begins at once, and ends last."""
    record = rollout([[1], [1], [3]], slots=2, waits_ms=[[1000.0], [1000.0], [0.0]])
    assert shards_s(record, 1) == pytest.approx([0.5 + 3 * 0.5])


def test_where_a_crash_lost_waits_all_wait_as_usual():
    record = rollout([[1, 1, 1], [1, 1, 1]], waits_ms=[[4000.0, 2000.0, 3000.0]])
    assert shards_s(record, 1) == pytest.approx([0.5 + 3.0 + 2 * 0.5 + 3.0])


def test_programs_that_never_asked_or_began_with_a_reply_are_decoded_too():
    record = rollout([[], [0, 2, 2]], waits_ms=[[], [1000.0]])
    assert shards_s(record, 1)[0] > 1.0


@pytest.mark.parametrize("runs", [[[30]] + [[2]] * 9, [[3, 1, 2]] * 10])
def test_it_ends_however_it_is_driven(runs):
    waits_ms = [[500.0] * (len(own) // 2 + 1) for own in runs] if len(runs[0]) > 1 else None
    for rate, part in ((1.0, 1.0), (0.5, 0.3), (1.0, 0.01)):
        work = rollout(runs, waits_ms=waits_ms, fixed_s=0.5).shard(0, 1)
        total_s, passed_s = work.until_over(rate), 0.0
        while not work.is_over:
            step_s = max(part * work.until_report(rate), 1e-3)
            work.advance(step_s, rate)
            passed_s += step_s
        assert passed_s == pytest.approx(total_s, rel=0.02)


def test_a_shard_that_takes_over_another_decodes_all_of_it():
    record = rollout([[4]] * 4, slots=4)
    source, target = record.shard(0, 2), record.shard(1, 2)
    source.advance(1.0, 1.0)
    target.advance(1.0, 1.0)
    target.give(source.take(), 0.25)
    assert source.is_over
    assert target.until_over(1.0) == pytest.approx(0.25 + 2 * 1.0)

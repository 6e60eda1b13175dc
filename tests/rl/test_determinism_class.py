"""Which determinism class the checks of a probe leave, and what is said to a pipeline that asks for more."""

from __future__ import annotations

import pytest

from rlmux.rl.determinism_class import DeterminismClass, ProbeCheck, determinism_class_of, refusal


def check(name: str, *, is_equal: bool, **fields: bool) -> ProbeCheck:
    return ProbeCheck(name=name, failure=f"{name} differs", is_equal=is_equal, **fields)


REPEAT = check("repeat", is_equal=True, is_repetition=True)
NOISE = check("repeat", is_equal=False, is_repetition=True)
ALONE = check("alone", is_equal=False)
COPIED = check("recomputation", is_equal=False, is_avoidable=True)


@pytest.mark.parametrize(
    ("checks", "determinism_class"),
    [
        ([REPEAT], DeterminismClass.EXACT),
        ([REPEAT, COPIED], DeterminismClass.EXACT),
        ([REPEAT, ALONE], DeterminismClass.REPLAYABLE),
        ([NOISE], DeterminismClass.STATISTICAL),
        ([NOISE, ALONE], DeterminismClass.STATISTICAL),
    ],
)
def test_the_class_is_what_the_failed_checks_leave(checks, determinism_class):
    assert determinism_class_of(checks) is determinism_class


def test_a_stronger_class_covers_a_weaker_one_and_not_the_other_way_round():
    assert DeterminismClass.EXACT.covers(DeterminismClass.STATISTICAL)
    assert DeterminismClass.REPLAYABLE.covers(DeterminismClass.REPLAYABLE)
    assert not DeterminismClass.REPLAYABLE.covers(DeterminismClass.EXACT)


def test_only_a_pipeline_that_asks_for_more_is_refused_with_the_check_and_what_is_accepted():
    checks = [REPEAT, ALONE, COPIED]
    assert refusal("sort", None, checks) is None
    assert refusal("sort", DeterminismClass.REPLAYABLE, checks) is None
    assert refusal("sort", DeterminismClass.EXACT, checks) == (
        "pipelines.sort.promise: exact is more than its engines keep on these devices, which is replayable "
        "(alone: alone differs); accepted: replayable, statistical, or no promise"
    )


def test_the_weaker_the_class_the_larger_the_gap_that_is_accepted():
    gaps = [determinism_class.max_logprob_gap for determinism_class in DeterminismClass]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0.001

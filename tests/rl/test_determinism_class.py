"""Which class of promise the checks of a probe leave, and what is said to a pipeline that asks for more."""

from __future__ import annotations

import pytest

from rlmux.rl.determinism_class import ProbeCheck, Promise, promise_of, refusal


def check(name: str, *, is_equal: bool, **fields: bool) -> ProbeCheck:
    return ProbeCheck(name=name, failure=f"{name} differs", is_equal=is_equal, **fields)


REPEAT = check("repeat", is_equal=True, is_repetition=True)
NOISE = check("repeat", is_equal=False, is_repetition=True)
ALONE = check("alone", is_equal=False)
COPIED = check("recomputation", is_equal=False, is_avoidable=True)


@pytest.mark.parametrize(
    ("checks", "promise"),
    [
        ([REPEAT], Promise.EXACT),
        ([REPEAT, COPIED], Promise.EXACT),
        ([REPEAT, ALONE], Promise.REPLAYABLE),
        ([NOISE], Promise.STATISTICAL),
        ([NOISE, ALONE], Promise.STATISTICAL),
    ],
)
def test_the_class_is_what_the_failed_checks_leave(checks, promise):
    assert promise_of(checks) is promise


def test_a_stronger_class_covers_a_weaker_one_and_not_the_other_way_round():
    assert Promise.EXACT.covers(Promise.STATISTICAL)
    assert Promise.REPLAYABLE.covers(Promise.REPLAYABLE)
    assert not Promise.REPLAYABLE.covers(Promise.EXACT)


def test_only_a_pipeline_that_asks_for_more_is_refused_with_the_check_and_what_is_accepted():
    checks = [REPEAT, ALONE, COPIED]
    assert refusal("sort", None, checks) is None
    assert refusal("sort", Promise.REPLAYABLE, checks) is None
    assert refusal("sort", Promise.EXACT, checks) == (
        "pipelines.sort.promise: exact is more than its engines keep on these devices, which is replayable "
        "(alone: alone differs); accepted: replayable, statistical, or no promise"
    )


def test_the_weaker_the_promise_the_larger_the_gap_that_is_accepted():
    gaps = [promise.max_logprob_gap for promise in Promise]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0.001

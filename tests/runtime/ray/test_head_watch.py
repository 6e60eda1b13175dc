"""The head of a Ray cluster goes away; here it is a function that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.waiting import until

from rlmux.core.errors import ClusterLostError
from rlmux.runtime.ray.head_watch import HeadWatch


def watch(is_there: list[bool], ended: list[str], *, gone_limit_s: float = 0.05, grace_s: float = 60.0) -> HeadWatch:
    return HeadWatch(
        "10.0.0.1:6379",
        Path("runs/two"),
        answers=lambda: is_there[-1],
        end_process=ended.append,
        gone_limit_s=gone_limit_s,
        grace_s=grace_s,
        look_every_s=0.01,
    )


def raises(head: HeadWatch) -> str | None:
    try:
        head.check()
    except ClusterLostError as error:
        return str(error)
    return None


def test_a_head_that_is_gone_is_one_line_with_the_command_that_continues():
    is_there, ended = [True], []
    head = watch(is_there, ended)
    head.check()
    assert not head.is_away()
    is_there.append(False)
    until(lambda: raises(head), "the loss of the head")
    line = raises(head)
    assert line is not None
    assert "\n" not in line
    assert "head of the Ray cluster 10.0.0.1:6379 is gone" in line
    assert line.endswith("rlmux resume runs/two --address HOST:PORT")
    head.close()
    assert ended == []


def test_a_head_that_comes_back_in_time_changes_nothing():
    is_there, ended = [False], []
    head = watch(is_there, ended, gone_limit_s=60.0)
    until(lambda: head.is_away(), "the absence of the head")
    is_there.append(True)
    until(lambda: not head.is_away(), "the return of the head")
    head.check()
    head.close()


def test_a_controller_that_ray_blocks_is_ended_with_the_same_line():
    ended: list[str] = []
    head = watch([False], ended, grace_s=0.05)
    until(lambda: ended, "the end of the process")
    with pytest.raises(ClusterLostError) as caught:
        head.check()
    assert ended == [str(caught.value)]
    head.close()

"""Dispatch rules that several policies share. Whole devices only; nothing is ever paused.

    first_come     every ready work whose devices are free, oldest first        work-conserving
    in_turn        the same, but only on its turn in the meta-iteration         RollMux section 5.1

A training phase is several stages in a row; between two of them its devices are free for a moment. All rules here
prefer continuations, so that nobody slips in between and pays two switches for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlmux.core.model import DeviceId
from rlmux.core.state import ReadyWork
from rlmux.core.views import GroupView, RunWork


def first_come(view: GroupView) -> Iterator[RunWork]:
    """Oldest ready work first, continuations before all; never idle while something grantable waits."""
    return first_fit(view, sorted(view.ready, key=_age))


def in_turn(view: GroupView) -> Iterator[RunWork]:
    """Strict meta-iteration: each member one rollout and one training phase per cycle, in cyclic order.

    A device waits for the member whose turn it is, even if another is ready. Warm starts come before the first
    cycle and take no turn.
    """
    on_turn = (
        work for work in sorted(view.ready, key=_age) if work.is_continuation or work.step == 0 or view.is_turn(work)
    )
    return first_fit(view, on_turn)


def first_fit(view: GroupView, works: Iterable[ReadyWork]) -> Iterator[RunWork]:
    """Grant, in the given order, every work whose devices are free and not granted to one before it."""
    taken: set[DeviceId] = set()
    for work in works:
        if taken.isdisjoint(work.devices) and view.is_free(work.devices):
            taken.update(work.devices)
            yield RunWork(work=work)


def _age(work: ReadyWork) -> tuple[bool, int]:
    return (not work.is_continuation, work.sequence)

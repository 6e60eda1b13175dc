"""`gap-ratio`: elastic rollouts, each pipeline's share by its remaining work (what RLix does).

Everybody's rollouts may use all rollout nodes of the shared set; who holds which device at a moment is decided in
`dispatch`. Sets are those of `fifo`. SLOs play no part.

    remaining  unfinished shares of a pipeline's open rollout
    target     devices x remaining / remaining of all
    next       the ready share whose pipeline is furthest below its target, as a part of it; the oldest of equals

A free device is always given to somebody: targets are not rounded. Nothing that runs is stopped for a target: a share
keeps its device until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import Phase, Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import impossible, queue, sharing_everything
from rlmux.core.policies.dispatching import first_fit
from rlmux.core.state import ReadyWork
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRatio:
    name: str = "gap-ratio"
    reacts_to_progress: bool = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        return impossible(pipeline, view) or sharing_everything(pipeline, view) or queue(pipeline, view)

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        free = [work for work in sorted(view.ready, key=_age) if view.is_free(work.devices)]
        shares = [work for work in free if work.phase is Phase.ROLLOUT and not work.is_continuation]
        others = [work for work in free if work.phase is not Phase.ROLLOUT or work.is_continuation]
        yield from first_fit(view, [*others, *_by_gap(view, shares)])


def _by_gap(view: GroupView, shares: list[ReadyWork]) -> list[ReadyWork]:
    """One share for each free device, in the order of choosing."""
    remaining = {member.id: len(member.unfinished_rollout_devices) for member in view.members}
    num_devices = len({device for member in view.members for device in member.rollout_devices})
    per_share = num_devices / max(1, sum(remaining.values()))
    held = dict.fromkeys(remaining, 0)
    for order in view.running:
        held[order.pipeline] += order.phase is Phase.ROLLOUT
    chosen: list[ReadyWork] = []
    while shares:
        best = min(shares, key=lambda work: held[work.pipeline] / (per_share * remaining[work.pipeline]))
        chosen.append(best)
        held[best.pipeline] += 1
        shares = [work for work in shares if work.devices != best.devices]
    return chosen


def _age(work: ReadyWork) -> tuple[bool, int]:
    return (not work.is_continuation, work.sequence)

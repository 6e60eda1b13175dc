"""`random`: a random group that has room, or a new one, and random rollout nodes there (RollMux section 8.2).

SLOs play no part. The draw depends on the seed, the pipeline's name and how many are placed, so that the same
submissions get the same places.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rlmux.core.model import GroupId, Pipeline
from rlmux.core.placement import PlacementChoice, PlacementView, Refusal, Relocation
from rlmux.core.policies.candidates import any_room, founding, impossible, queue
from rlmux.core.policies.dispatching import first_come
from rlmux.core.views import GroupView, RunWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGroups:
    name: str = "random"
    reacts_to_progress: bool = False
    seed: int = 0

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice | Refusal:
        refusal = impossible(pipeline, view)
        if refusal is not None:
            return refusal
        generator = random.Random(f"{self.seed}/{pipeline.id}/{view.num_pipelines}")
        choices = [choice for group in view.groups() for choice in any_room(group, pipeline)]
        by_group: dict[GroupId | None, list[PlacementChoice]] = {}
        for choice in choices:
            by_group.setdefault(choice.group, []).append(choice)
        fresh = founding(pipeline, view)
        if fresh is not None:
            by_group[None] = [fresh]
        if not by_group:
            return queue(pipeline, view)
        return generator.choice(by_group[generator.choice(list(by_group))])

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        return ()

    def dispatch(self, view: GroupView) -> Iterator[RunWork]:
        return first_come(view)

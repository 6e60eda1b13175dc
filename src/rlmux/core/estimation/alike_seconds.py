"""What the steps of pipelines took: the first estimate of the next one alike that comes without.

    a pipeline is planned with its own seconds ─▶ keep ─▶ the newest, by key and nodes ─▶ of ─▶ the next one submitted

Alike are pipelines with the same `Pipeline.alike`, on as many nodes for each phase, which are apart or serve both. What
is taken over counts as if the pipeline had been measured before: its own first steps are measured, and it is placed
again where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmux.core.model import AlikeSeconds, MeasuredSeconds, Pipeline

MAX_KEPT = 1024
"""Largest number of keys; the least recently renewed are dropped first."""


@dataclass(slots=True)
class KeptSeconds:
    """The newest seconds of each key and numbers of nodes. See the module docstring."""

    _newest: dict[tuple[str, int, int, bool], MeasuredSeconds] = field(default_factory=dict)
    """By key, rollout nodes, training nodes, and whether these serve both phases, in the order of renewal."""

    def keep(self, seconds: AlikeSeconds) -> None:
        key = seconds.alike, seconds.num_rollout_nodes, seconds.num_train_nodes, seconds.is_colocated
        self._newest.pop(key, None)
        self._newest[key] = seconds.measured
        if len(self._newest) > MAX_KEPT:
            del self._newest[next(iter(self._newest))]

    def of(self, pipeline: Pipeline, num_shared: int | None) -> MeasuredSeconds | None:
        """What a pipeline without an estimate is planned with; None where it has one, or none alike was measured.

        `num_shared`: nodes that serve both phases where it would join others; None: it has nodes apart.
        """
        if pipeline.estimate is not None or not pipeline.alike:
            return None
        num_rollout = pipeline.num_rollout_nodes if num_shared is None else num_shared
        return self._newest.get((pipeline.alike, num_rollout, pipeline.num_train_nodes, num_shared is not None))

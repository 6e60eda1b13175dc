"""A pipeline that its policy relocates between two steps: the same weights."""

from __future__ import annotations

import psutil
import pytest

from rlmux.core.actions import Release, Relocate
from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Policy
from rlmux.core.events import PipelineRestarted
from rlmux.core.model import AdmissionKind, NodeId, Pipeline, PipelineId
from rlmux.core.placement.choice import PlacementChoice, Relocation
from rlmux.core.placement.view import PlacementView
from rlmux.policies.lookahead.dispatching import start_oldest_first

ON_NEW_NODES = PlacementChoice(kind=AdmissionKind.NEW, group=None, num_new_rollout_nodes=1, num_new_train_nodes=1)


class RelocatesOnce(Policy):
    """Nodes of its own for each pipeline; when one leaves, the last one relocates to the nodes that became free."""

    name = "relocates-once"

    def __init__(self) -> None:
        self.has_relocated = False
        self.has_seen_both = False

    def place(self, pipeline: Pipeline, view: PlacementView) -> PlacementChoice:
        return ON_NEW_NODES

    def rebalance(self, view: PlacementView) -> tuple[Relocation, ...]:
        self.has_seen_both |= view.num_pipelines == 2
        if self.has_relocated or not self.has_seen_both or view.num_pipelines != 1:
            return ()
        self.has_relocated = True
        return (Relocation(pipeline=PipelineId("long"), choice=ON_NEW_NODES),)

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        return plan.choose(*start_oldest_first(plan))


class HoldsBack:
    """Stops the trainer of `short` until `long` has a step's checkpoint, then that of `long` until `short` has left:
    so `long` is in the middle of its steps when it relocates."""

    def __init__(self) -> None:
        self.held: dict[str, psutil.Process] = {}

    def __call__(self, backend, recorder) -> bool:
        checkpoints = [note for note in recorder.notes if note.type == "checkpoint"]
        has_checkpoint = any(note.pipeline == "long" and note.step >= 1 for note in checkpoints)
        has_left = any(isinstance(action, Release) and action.pipeline == "short" for action in recorder.actions)
        self.hold(backend, "short", not has_checkpoint)
        self.hold(backend, "long", has_checkpoint and not has_left)
        return False

    def hold(self, backend, pipeline: str, is_held: bool) -> None:
        workers = backend.workers_by_pipeline.get(pipeline)
        if not is_held and pipeline in self.held:
            self.held.pop(pipeline).resume()
        elif is_held and pipeline not in self.held and workers is not None and workers.trainer.pid is not None:
            self.held[pipeline] = psutil.Process(workers.trainer.pid)
            self.held[pipeline].suspend()


@pytest.mark.slow
def test_a_pipeline_relocated_between_two_steps_trains_the_same_weights(real, make_backend, tmp_path):
    pair = [real.submission("short", num_steps=6), real.submission("long", task="reverse", seed=2, num_steps=16)]
    two = real.cluster(rollout=2, train=2)
    alone = real.run(tmp_path / "alone", [pair[1]], policy="solo")
    relocated = real.run(
        tmp_path / "relocated", pair, policy=RelocatesOnce(), on=two, watch=HoldsBack(), make_backend=make_backend
    )
    (relocation,) = [action for action in relocated.recorder.actions if isinstance(action, Relocate)]
    assert relocation.placement.rollout_nodes == (NodeId("rollout", 0),), "from rollout-1, to what became free"
    (restart,) = [event for event in relocated.recorder.events if isinstance(event, PipelineRestarted)]
    assert restart.restored_step >= 1
    steps = [note for note in relocated.recorder.notes if note.type == "step"]
    assert [note.step for note in steps if note.pipeline == "long"] == [*range(1, 17)], "none is done twice"
    assert relocated.status == {"short": "finished", "long": "finished"}, relocated.recorder.notes
    assert relocated.sha256["long"] == alone.sha256["long"]

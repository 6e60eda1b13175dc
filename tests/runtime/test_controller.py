"""The order in which a tick's actions are carried out."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from tests import scheduling

from rlmux.core.actions import Action, RunStage
from rlmux.core.model import Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.backend import Submission
from rlmux.runtime.controller import Controller
from rlmux.runtime.fake_backend import FakeBackend

SECONDS = {Stage.GENERATE: 2.0, Stage.REWARD: 0.5, Stage.UPDATE: 1.0}


class Watched(FakeBackend):
    """Notes when each order for a stage was carried out."""

    def __init__(self) -> None:
        super().__init__(lambda order: SECONDS[order.stage])
        self.orders: list[tuple[float, bool]] = []
        """(time, is it for a device) of each, oldest first."""

    def execute(self, action: Action) -> None:
        if isinstance(action, RunStage):
            self.orders.append((self.now_s(), bool(action.devices)))
        super().execute(action)


def test_orders_for_devices_go_out_before_those_for_user_code() -> None:
    """When a rollout ends, the next pipeline's rollout begins before the rewards of the first are asked for."""
    backend = Watched()
    given = [scheduling.pipeline(name, stages=tuple(SECONDS)) for name in ("a", "b")]
    submissions = [Submission(pipeline=one, config=TrainingConfig(name=one.id)) for one in given]
    assert Controller(Scheduler(scheduling.cluster(), make_policy("rollmux")), backend, None).run(submissions)
    ticks = [[is_device for _, is_device in orders] for _, orders in groupby(backend.orders, key=itemgetter(0))]
    assert [True, False] in ticks, "no tick has both"
    assert [False, True] not in ticks

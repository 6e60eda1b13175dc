"""Two workers of different pipelines on one device at once, for real."""

from __future__ import annotations

import pytest

from rlmux.core.actions import RunStage, SetDeviceFraction
from rlmux.core.events import StageFinished, StagePaused
from rlmux.core.model import DeviceId, OrderId
from rlmux.policies import make_policy
from rlmux.runtime.memory.memory_budget import with_footprint
from rlmux.sim.models.interference import estimated_table, fraction_grid, sharing_table

ESTIMATED = sharing_table(estimated_table(fraction_grid("core", num_units=4)))
"""What the simulator's roofline estimates of a device in four parts. On one core no pair was measured to help, so a
measured table would let nothing share here. The tests below say what sharing changes, not what it gains."""


class SideBySide:
    """Watches a run: which pipelines computed on one device at once, by orders and the events that end them."""

    def __init__(self) -> None:
        self.pairs: set[tuple[DeviceId, tuple[str, ...]]] = set()
        """Device and names of the pipelines that had orders there at the same time, where more than one had."""
        self._running: dict[OrderId, RunStage] = {}
        self._num_events = self._num_actions = 0

    def __call__(self, _, recorder) -> bool:
        for event in recorder.events[self._num_events :]:
            if isinstance(event, StageFinished | StagePaused):
                self._running.pop(event.order, None)
        new = [one for one in recorder.actions[self._num_actions :] if isinstance(one, RunStage)]
        self._running |= {one.order: one for one in new if one.devices}
        self._num_events, self._num_actions = len(recorder.events), len(recorder.actions)
        for device in {device for one in self._running.values() for device in one.devices}:
            names = sorted({one.pipeline for one in self._running.values() if device in one.devices})
            if len(names) > 1:
                self.pairs.add((device, tuple(names)))
        return False


def fractions(recorder) -> set[float]:
    """Device fractions of every order that had a device."""
    orders = [one for one in recorder.actions if isinstance(one, RunStage | SetDeviceFraction)]
    return {one.device_fraction for one in orders} - {0.0}


@pytest.fixture(scope="module")
def submissions(real):
    """The policy gives each of them both devices."""
    return [
        with_footprint(real.submission("first", num_steps=3), real.cluster()),
        with_footprint(real.submission("second", num_steps=3, task="reverse", seed=2), real.cluster()),
    ]


def test_sharing_devices_at_estimated_fractions_changes_no_weights(real, make_backend, submissions, tmp_path):
    on = real.cluster(rollout=1, train=1)
    whole, side_by_side = SideBySide(), SideBySide()
    alone = real.run(tmp_path / "alone", submissions, policy=make_policy("jigsaw"), on=on, watch=whole)
    sharing = make_policy("jigsaw", sharing=ESTIMATED)
    shared = real.run(
        tmp_path / "shared", submissions, policy=sharing, on=on, make_backend=make_backend, watch=side_by_side
    )
    assert shared.sha256 == alone.sha256
    assert not whole.pairs
    assert {names for _, names in side_by_side.pairs} == {("first", "second")}
    assert fractions(alone.recorder) == {1.0}
    assert fractions(shared.recorder) - {1.0}
    assert fractions(shared.recorder) <= {0.25, 0.5, 0.75, 1.0}
    assert shared.status == {"first": "finished", "second": "finished"}

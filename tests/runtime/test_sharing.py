"""Two workers of different pipelines on one device at once, for real."""

from __future__ import annotations

import pytest

from rlmux.core.actions import RunStage, SetDeviceFraction
from rlmux.core.sharing import SharingEntry, SharingTable
from rlmux.policies import make_policy
from rlmux.runtime.memory import with_footprint

SUB_STAGES = ("dense", "tail", "update")
HELPFUL = SharingTable.of(
    SharingEntry(sub_stage_a=a, sub_stage_b=b, device_fraction=0.75, slowdown_a=1.2, slowdown_b=1.5)
    for a in SUB_STAGES
    for b in SUB_STAGES
)
"""As if sharing helped every pair. On one core none does; what is computed does not mind."""


@pytest.fixture(scope="module")
def submissions(real):
    """The policy gives each of them both devices."""
    return [
        with_footprint(real.submission("first", num_steps=3), real.cluster()),
        with_footprint(real.submission("second", num_steps=3, task="reverse", seed=2), real.cluster()),
    ]


def test_sharing_devices_at_fractions_changes_nothing_but_time(real, make_backend, submissions, tmp_path):
    on = real.cluster(rollout=1, train=1)
    alone = real.run(tmp_path / "alone", submissions, policy=make_policy("jigsaw"), on=on)
    helped = make_policy("jigsaw", sharing=HELPFUL)
    shared = real.run(tmp_path / "shared", submissions, policy=helped, on=on, make_backend=make_backend)
    assert shared.sha256 == alone.sha256
    fractions = {a.device_fraction for a in shared.recorder.actions if isinstance(a, RunStage | SetDeviceFraction)}
    assert {0.25, 0.75} <= fractions
    assert {a.device_fraction for a in alone.recorder.actions if isinstance(a, RunStage)} <= {0.0, 1.0}
    assert shared.status == {"first": "finished", "second": "finished"}

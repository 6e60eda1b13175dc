"""A backlog comes back from its bytes as it was, and anything else is refused."""

from __future__ import annotations

import pytest

from rlmux.core.errors import CheckpointError
from rlmux.engines.train.state.checkpoint import begin_checkpoint, end_checkpoint
from rlmux.rl.config import InterruptibleConfig, RolloutConfig, TrainingConfig
from rlmux.rl.prompts.backlog import Backlog, SampledTokens, num_trajectories_of
from rlmux.rl.prompts.epoch_clock import ClockState
from rlmux.rl.types import TrajectoryId
from rlmux.runtime.weights.checkpoints import backlog_of

ENDED, SEATED, FRESH = TrajectoryId(1, 1, 0), TrajectoryId(2, 0, 1), TrajectoryId(2, 1, 0)
BACKLOG = Backlog(
    clock=ClockState(
        num_begun=7,
        tokens_by_seated={SEATED: 3, FRESH: 0},
        ended=(ENDED,),
        oldest_versions={(1, 1): 0, (2, 0): 1},
    ),
    sampled={
        ENDED: SampledTokens(tokens=(5, 9), logprobs=(-0.1, -1e-300), versions=(0, 0), stop_reason="stop"),
        SEATED: SampledTokens(tokens=(1, 2, 3), logprobs=(-0.3, -1 / 3, -2.5), versions=(0, 1, 1), stop_reason=None),
    },
)


def test_packing_loses_nothing():
    packed = BACKLOG.pack()
    assert Backlog.unpack(packed, "here") == BACKLOG
    assert num_trajectories_of(packed) == 3


@pytest.mark.parametrize("damage", [lambda packed: packed[:-1], lambda packed: packed[:-8], lambda packed: b"x" * 40])
def test_anything_else_is_refused_in_one_line(damage):
    with pytest.raises(CheckpointError) as error:
        Backlog.unpack(damage(BACKLOG.pack()), "step_3/backlog.bin")
    assert str(error.value).startswith("step_3/backlog.bin is no backlog of a rollout: ")


def test_cut_to_a_tick_it_goes_on():
    part = BACKLOG.sampled[ENDED].first(1)
    assert part == SampledTokens(tokens=(5,), logprobs=(-0.1,), versions=(0,), stop_reason=None)


@pytest.mark.parametrize(("version", "is_refused"), [(0, False), (3, True)])
def test_a_checkpoint_that_should_have_one_and_has_none_is_refused(tmp_path, version, is_refused):
    rollout = RolloutConfig(interruptible=InterruptibleConfig())
    folder = tmp_path / "step"
    begin_checkpoint(folder)
    end_checkpoint(folder, {"version": version})
    assert backlog_of(folder, TrainingConfig(name="p")) == Backlog(), "without interruptible rollouts it needs none"
    if not is_refused:
        assert backlog_of(folder, TrainingConfig(name="p", rollout=rollout)) == Backlog()
        return
    with pytest.raises(CheckpointError, match=r"has no backlog\.bin: it was written without rollout\.interruptible"):
        backlog_of(folder, TrainingConfig(name="p", rollout=rollout))

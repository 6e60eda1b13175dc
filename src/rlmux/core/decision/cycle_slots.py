"""Slots of a co-execution group's cycle: what one holds, and which pipelines have one to come."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from rlmux.core.model import DeviceId, Phase
from rlmux.core.pipeline_run import PipelineRun
from rlmux.core.work import ReadyWork, WorkState


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleSlot:
    """A member's next phase on a device, by the estimates."""

    gap_s: float
    """Seconds until it can begin, at least; 0 where it is ready, or may run ahead of its published version."""
    seconds: float
    """Solo seconds of the phase."""
    switch_s: float
    """Seconds to bring its state to the device; 0 where it is there now."""
    forced_s: float
    """Seconds to bring its state back, should another phase go first that evicts it; 0 where it is not there now."""
    laxity_s: float
    """Seconds that its step may still wait in all without breaking the SLO; negative: it is late already."""


def has_phase_to_begin(run: PipelineRun, key: tuple[Phase, DeviceId], gone: Container[int] = ()) -> bool:
    """Whether this pipeline will begin another such phase on this device, and not once its user code is done.

    `gone`: sequence numbers of ready work that starts or migrates by the decision under way.
    """
    phase, device = key
    if run.pipeline.work_arrives:
        batch = run.step.batches.get((phase,))
        return batch is not None and batch.state is WorkState.READY and _begins_phase(batch.work, gone)
    last = run.pipeline.num_steps
    if phase is Phase.ROLLOUT:
        shard = run.step.shards.get(device)
        is_next_open = shard is not None and shard.is_ready and _begins_phase(shard.work, gone)
        has_another = last is None or run.step.rollout_step < last
    else:
        training = run.step.training
        is_next_open = training.state is WorkState.READY and _begins_phase(training.work, gone)
        has_another = last is None or run.step.train_step < last
    return is_next_open or (has_another and not run.waits_for_user_code)


def _begins_phase(work: ReadyWork | None, gone: Container[int]) -> bool:
    return work is not None and not work.is_continuation and work.sequence not in gone

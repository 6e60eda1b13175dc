"""Pipelines with adapters of one base whose rollouts are decoded in one batch by one process, for real."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.actions import Admit
from rlmux.core.decision.plan import GroupPlan
from rlmux.core.decision.policy import Policy
from rlmux.core.estimation.colocation import SharingEntry, SharingTable
from rlmux.core.events import StageFinished, StagePaused, WorkerLost
from rlmux.core.model import AdmissionKind, DeviceId, GroupId, NodeId, Placement, SubStage
from rlmux.policies.lookahead.side_by_side import start_side_by_side
from rlmux.policies.rollmux import RollMux
from rlmux.rl.config import AdapterConfig
from rlmux.runtime.backend import WorkerOptions
from rlmux.runtime.local import local_backend
from rlmux.runtime.memory.memory_budget import with_footprint
from rlmux.runtime.worker_backend import WorkerBackend

DECODES = (SubStage.PREFILL, SubStage.DENSE_DECODE, SubStage.TAIL_DECODE)
TRAININGS = (SubStage.REFERENCE, SubStage.OLD_LOGPROBS, SubStage.UPDATE)
TOGETHER = SharingTable.of(
    SharingEntry(sub_stage_a=one, sub_stage_b=other, device_fraction=0.5, slowdown_a=1.05, slowdown_b=1.05)
    for alike in (DECODES, TRAININGS)
    for one, other in product(alike, repeat=2)
)
"""Any two rollouts run beside each other nearly as fast as alone, and so do two trainings."""
ADAPTERS = {
    "small": AdapterConfig(rank=1, alpha=2.0, targets=("q_proj", "v_proj")),
    "usual": AdapterConfig(rank=8, alpha=16.0),
}
SHORT_CHUNKS = WorkerOptions(chunk_decode_steps=1, multi_turn_decode_steps=1)


class Together(Policy):
    """Places like `rollmux`; starts any two rollouts beside each other, as soon as they are ready, and trainings."""

    name = "together"
    sharing = TOGETHER
    place = RollMux().place
    rebalance = RollMux().rebalance

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        start_side_by_side(plan, [work for work in plan.ready if not work.is_waiting], self.sharing)
        return plan


@pytest.fixture(scope="module")
def tenants(real):
    """Both begin with a rollout. The first ends a step before the second, which has several turns."""
    made = []
    for seed, (name, adapter) in enumerate(ADAPTERS.items()):
        one = real.submission(name, seed=seed, num_steps=2 + seed, task="calculator" if seed else "sort")
        config = replace(one.config, model=replace(one.config.model, seed=5), adapter=adapter)
        config = replace(config, sft_warmup=replace(config.sft_warmup, num_updates=0))
        pipeline = replace(one.pipeline, has_sft_warmup=False)
        made.append(with_footprint(replace(one, config=config, pipeline=pipeline), real.cluster()))
    return made


@pytest.fixture(scope="module")
def alone(real, tenants, tmp_path_factory):
    found = {}
    for one in tenants:
        found |= real.run(tmp_path_factory.mktemp(one.config.name), [one]).sha256
    assert len(set(found.values())) == len(tenants), "adapters that are alike would prove nothing"
    return found


class Serves:
    """Makes backends, and counts the calls of a method in each call of a shared process."""

    def __init__(self, make_backend: Any, kills_at: int | None, method: str) -> None:
        """`kills_at`: number of the call with two of them whose process is killed; None: none."""
        self.num_chunks: list[int] = []
        self._make_backend = make_backend
        self._kills_at = kills_at
        self._method = method

    def make_backend(self, *args: Any, **options: Any) -> WorkerBackend:
        backend = self._make_backend(*args, **options)
        spawn = backend.workplace.spawn

        def spawn_watched(name: str, *args: Any, **where: Any) -> Any:
            worker = spawn(name, *args, **where)
            call = worker.call

            def count(now_s: float, method: str, args: tuple[Any, ...], then: Any) -> None:
                if method == "serve":
                    self.num_chunks.append(sum(one.method == self._method for one in args[1]))
                call(now_s, method, args, then)
                if method == "serve" and self.num_chunks[-1] == 2 and self.num_chunks.count(2) == self._kills_at:
                    os.kill(worker.pid, signal.SIGKILL)

            worker.call = count
            return worker

        backend.workplace.spawn = spawn_watched  # type: ignore[method-assign]
        return backend


def pids_of(recorder: Any, role: str = "rollout") -> dict[str, set[int]]:
    """Process ids of the rollout workers of each pipeline, or of its trainers, and of their successors."""
    found: dict[str, set[int]] = {}
    for note in recorder.notes:
        if note.type == "worker" and note.role.startswith(role):
            found.setdefault(note.pipeline, set()).add(note.pid)
    return {pipeline: pids - {None} for pipeline, pids in found.items()}


def run_together(
    real: Any,
    folder: Path,
    tenants: Any,
    *,
    make_backend: Any = local_backend,
    kills_at: int | None = None,
    method: str = "run_chunk",
    options: WorkerOptions = SHORT_CHUNKS,
) -> tuple[Any, Serves]:
    serves = Serves(make_backend, kills_at, method)
    run = real.run(folder, tenants, policy=Together(), options=options, make_backend=serves.make_backend)
    assert set(run.status.values()) == {"finished"}
    return run, serves


def test_tenants_of_one_base_are_decoded_in_one_batch_to_the_weights_that_each_trains_alone(
    real, make_backend, tenants, alone, tmp_path
):
    run, serves = run_together(real, tmp_path, tenants, make_backend=make_backend)
    assert run.sha256 == alone
    pids = pids_of(run.recorder)
    assert pids["small"] == pids["usual"]
    assert len(pids["small"]) == 1
    assert 2 in serves.num_chunks
    ended = [event for event in run.recorder.events if isinstance(event, StageFinished | StagePaused)]
    shares = [share for event in ended for share in event.batches]
    assert {share.num_together for share in shares} == {2}
    assert all(0.0 < share.charged_s < share.seconds for share in shares)


def test_a_killed_process_of_two_tenants_is_replaced_for_both_and_costs_time_only(real, tenants, alone, tmp_path):
    run, serves = run_together(real, tmp_path, tenants, kills_at=3)
    assert run.sha256 == alone
    assert serves.num_chunks.count(2) >= 3
    lost = [event.pipeline for event in run.recorder.events if isinstance(event, WorkerLost)]
    assert sorted(lost) == ["small", "usual"]
    pids = pids_of(run.recorder)
    assert pids["small"] == pids["usual"]
    assert len(pids["usual"]) == 2


def test_a_tenant_that_was_lost_twice_without_a_step_between_gets_a_process_of_its_own(real, tenants, tmp_path):
    workplace = real.Workplace()
    backend = WorkerBackend(real.cluster(), tmp_path, workplace, tmp_path)
    placement = Placement(group=GroupId(1), rollout_nodes=(NodeId("rollout", 0),), train_nodes=(NodeId("train", 0),))
    for one in tenants:
        backend.add_pipeline(one)
        backend.execute(Admit(pipeline=one.pipeline.id, placement=placement, kind=AdmissionKind.NEW))
    role = f"rollout-{DeviceId('rollout', 0, 0)}"
    names = []
    for _ in range(3):
        names.append(sorted(name for name in workplace.workers if name.endswith(role)))
        workplace.lost.append(workplace.workers.pop(f"shared/{role}", None))
        if workplace.lost != [None]:
            backend.poll(0.0)
    assert names == [[f"shared/{role}"], [f"shared/{role}"], [f"small/{role}", f"usual/{role}"]]

"""Sharing changes nothing but time: the same weights, bit for bit, however a pipeline was run."""

from __future__ import annotations

import pytest

from rlmux.core.actions import MigrateShard
from rlmux.core.decision.plan import GroupPlan, PauseOrder
from rlmux.core.decision.policy import Policy
from rlmux.core.events import StagePaused
from rlmux.core.model import Cluster, Phase, Pool, Stage
from rlmux.policies.lookahead.dispatching import start_oldest_first
from rlmux.policies.rollmux import RollMux
from rlmux.runtime.backend import WorkerOptions


@pytest.fixture(scope="module")
def pair(real):
    return [real.submission("sort", seed=1), real.submission("reverse", task="reverse", seed=2)]


@pytest.fixture(scope="module")
def solo(real, pair, tmp_path_factory):
    """Each pipeline alone on dedicated pools, one after the other."""
    return real.run(tmp_path_factory.mktemp("solo"), pair, policy="solo")


def test_solo_runs_one_pipeline_after_the_other(solo):
    assert solo.status == {"sort": "finished", "reverse": "finished"}
    assert None not in solo.sha256.values()
    assert solo.sha256["sort"] != solo.sha256["reverse"]


def test_every_step_trains_on_what_its_own_version_sampled(solo):
    """Promise 2. The trainer's log-probs of the sampled tokens are the engine's, the first step included."""
    gaps = [note.metrics["logprob_gap"] for note in solo.recorder.notes if note.type == "step"]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("rollmux", marks=pytest.mark.quick_on_ray),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("colocated", "fifo")),
    ],
)
def test_sharing_gives_the_weights_of_running_alone(real, make_backend, pair, solo, tmp_path, policy):
    shared = real.run(tmp_path / policy, pair, policy=policy, make_backend=make_backend)
    assert shared.sha256 == solo.sha256, shared.recorder.notes


@pytest.mark.parametrize("policy", ["rollmux", pytest.param("jigsaw", marks=pytest.mark.slow)])
def test_one_device_for_both_phases_gives_the_weights_of_running_alone(real, pair, solo, tmp_path, policy):
    pool = Pool(name="device", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=1)
    shared = real.run(tmp_path / policy, pair, policy=policy, on=Cluster(pools={"device": pool}))
    assert shared.sha256 == solo.sha256, shared.recorder.notes


@pytest.mark.parametrize("chunk_decode_steps", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_the_size_of_a_chunk_changes_nothing(real, make_backend, pair, solo, tmp_path, chunk_decode_steps):
    options = WorkerOptions(chunk_decode_steps=chunk_decode_steps, chunk_s=0.001)
    run = real.run(tmp_path / "run", pair, options=options, make_backend=make_backend)
    assert run.sha256 == solo.sha256


class Meddler(Policy):
    """Places like `rollmux` and dispatches as no sane policy would."""

    name = "meddler"
    reacts_to_progress = True
    place = RollMux().place
    rebalance = RollMux().rebalance


class PausesEverything(Meddler):
    """Pauses every order at its first progress report, once each."""

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        plan.choose(*start_oldest_first(plan))
        for order in plan.running:
            key = (order.pipeline, order.step, order.stage)
            if order.num_active is not None and key not in self.seen:
                self.seen.add(key)
                plan.choose(PauseOrder(order=order.id))
        return plan


def test_a_forced_pause_changes_nothing(real, make_backend, pair, solo, tmp_path):
    options = WorkerOptions(chunk_decode_steps=2, chunk_s=0.001)
    paused = real.run(tmp_path / "run", pair, policy=PausesEverything(), options=options, make_backend=make_backend)
    assert sum(isinstance(event, StagePaused) for event in paused.recorder.events) >= 4
    assert paused.sha256 == solo.sha256


def test_migrating_every_trajectory_to_another_worker_mid_way_changes_nothing(real, make_backend, tmp_path):
    pair = [
        real.submission("sort", max_new_tokens=48, num_rollout_nodes=2),
        real.submission("reverse", task="reverse", seed=2, max_new_tokens=48, num_rollout_nodes=2),
    ]
    alone = real.run(tmp_path / "alone", pair, policy="solo", on=real.cluster(rollout=2))
    moved = real.run(
        tmp_path / "moved",
        pair,
        policy=real.MovesEverything(),
        on=real.cluster(rollout=2),
        options=WorkerOptions(chunk_decode_steps=1),
        make_backend=make_backend,
    )
    assert moved.status == alone.status, moved.recorder.notes
    moves = [action for action in moved.recorder.actions if isinstance(action, MigrateShard)]
    assert {(move.pipeline, move.step) for move in moves} == {(name, step) for name in alone.status for step in (1, 2)}
    assert len(moves) > 4, "some rollouts are moved there and back; one may end before its second move"
    assert moved.sha256 == alone.sha256


@pytest.mark.slow
def test_a_tool_using_pipeline_is_the_same_shared_and_alone(real, make_backend, tmp_path):
    pair = [
        real.submission("tool", task="calculator", max_new_tokens=32),
        real.submission("sort", seed=1),
    ]
    alone = real.run(tmp_path / "alone", pair, policy="solo")
    shared = real.run(tmp_path / "shared", pair, make_backend=make_backend)
    assert alone.status == {"tool": "finished", "sort": "finished"}
    assert shared.sha256 == alone.sha256


@pytest.mark.slow
def test_one_step_off_policy_is_the_same_shared_and_alone(real, make_backend, tmp_path):
    pair = [real.submission("async", num_steps=3, staleness=1), real.submission("sync", seed=2)]
    alone = real.run(tmp_path / "alone", pair, policy="solo")
    shared = real.run(tmp_path / "shared", pair, make_backend=make_backend)
    assert alone.status == {"async": "finished", "sync": "finished"}
    assert shared.sha256 == alone.sha256


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_asynchronous_shards_on_both_devices_beside_another_pipeline_give_the_same(real, tmp_path, staleness):
    pair = [
        real.submission("async", num_steps=4, staleness=staleness),
        real.submission("tool", task="calculator", staleness=1, seed=2),
    ]
    alone = real.run(tmp_path / "alone", pair, policy="solo")
    shared = real.run(tmp_path / "shared", pair, policy="jigsaw")
    devices = {action.devices for action in shared.recorder.actions if getattr(action, "stage", None) is Stage.GENERATE}
    assert len(devices) == 2
    assert alone.status == {"async": "finished", "tool": "finished"}
    assert shared.sha256 == alone.sha256


@pytest.mark.slow
def test_the_longest_answers_first_on_two_devices_give_the_weights_of_any_order(real, tmp_path):
    """Prompts of one digit come again: from the second step on lengths are known, and prompts are dealt out by them."""
    sha256 = {}
    for order, num_nodes in (("given", 1), ("longest", 2)):
        fields = {"params": {"digits": 1}}
        one = real.submission("one", num_steps=3, num_rollout_nodes=num_nodes, task_fields=fields)
        rollout = real.replace(one.config.rollout, order=order, num_slots=4, num_workers=num_nodes)
        one = real.replace(one, config=real.replace(one.config, rollout=rollout))
        run = real.run(tmp_path / order, [one], policy="solo", on=real.cluster(rollout=num_nodes))
        sha256[order] = run.sha256["one"]
    assert sha256["longest"] == sha256["given"] is not None

"""The same file on a Ray cluster: the same weights, bit for bit, whatever is moved or killed.

One cluster of several nodes on this machine for the whole module; each run joins it and leaves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.xdist_group("ray")]

from rlmux.core.actions import Admit, Migrate  # noqa: E402
from rlmux.core.errors import UserError  # noqa: E402
from rlmux.core.events import NodeJoined, NodeLost, PipelineRestarted, WorkerLost  # noqa: E402
from rlmux.core.model import NodeId  # noqa: E402
from rlmux.runtime.ray_backend import ray_backend  # noqa: E402
from rlmux.runtime.worker_backend import WorkerOptions  # noqa: E402

_FAST_DEATH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 10,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }.items():
            patch.setenv(name, value)
        nodes = Nodes()
        yield nodes
        nodes.close()


class Nodes:
    """A head that offers nothing, a training node and two rollout nodes, as a cluster would have them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.ray = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": _FAST_DEATH},
        )
        self.train = self.add("train")
        self.rollout = [self.add("rollout"), self.add("rollout")]

    def add(self, pool: str):
        return self.ray.add_node(num_cpus=1, resources={f"rlmux_{pool}": 1}, object_store_memory=80_000_000)

    def make_backend(self, **options):
        return partial(ray_backend, address=self.ray.address, **options)

    def close(self) -> None:
        self.ray.shutdown()


@pytest.fixture(scope="module")
def pair(real):
    return [real.submission("sort", seed=1), real.submission("reverse", task="reverse", seed=2)]


@pytest.fixture(scope="module")
def local(real, pair, tmp_path_factory):
    """Each pipeline alone, in processes of this machine."""
    return real.run(tmp_path_factory.mktemp("local"), pair, policy="solo")


def test_the_weights_are_those_of_running_alone_on_this_machine(real, pair, local, nodes, tmp_path):
    shared = real.run(tmp_path / "run", pair, make_backend=nodes.make_backend())
    assert shared.status == {"sort": "finished", "reverse": "finished"}, shared.recorder.notes
    assert shared.sha256 == local.sha256


@pytest.mark.slow
def test_without_shared_memory_weights_travel_as_objects_and_are_the_same(real, pair, local, nodes, tmp_path):
    far = real.run(tmp_path / "run", pair, make_backend=nodes.make_backend(is_sharing_memory=False))
    assert far.sha256 == local.sha256, far.recorder.notes


@pytest.mark.slow
def test_moving_every_trajectory_to_another_actor_mid_way_changes_nothing(real, nodes, tmp_path):
    one = [real.submission("sort", max_new_tokens=48, num_rollout_nodes=2)]
    alone = real.run(tmp_path / "alone", one, policy="solo", on=real.cluster(rollout=2))
    moved = real.run(
        tmp_path / "moved",
        one,
        policy=real.MovesEverything(copies_kv=True),
        on=real.cluster(rollout=2),
        options=WorkerOptions(chunk_decode_steps=1),
        make_backend=nodes.make_backend(),
    )
    assert {action.step for action in moved.recorder.actions if isinstance(action, Migrate)} == {1, 2}
    assert moved.sha256 == alone.sha256, moved.recorder.notes


def test_a_killed_actor_is_replaced_and_changes_nothing(real, pair, local, nodes, tmp_path):
    killed: dict[str, int] = {}

    def kill_one_of_each(backend, recorder) -> bool:
        for role in ("rollout", "train"):
            workers = backend._workers.get("sort")
            worker = next((one for one in workers.processes if f"/{role}" in one.name), None) if workers else None
            is_time = any(note.type == "step" for note in recorder.notes) if role == "train" else True
            if worker is not None and worker.pid and role not in killed and is_time:
                killed[role] = worker.pid
                os.kill(worker.pid, signal.SIGKILL)
        return False

    options = WorkerOptions(chunk_decode_steps=2, chunk_s=0.01)
    run = real.run(
        tmp_path / "run", pair, make_backend=nodes.make_backend(), options=options, watch=kill_one_of_each
    )
    assert set(killed) == {"rollout", "train"}
    assert any(isinstance(event, WorkerLost | PipelineRestarted) for event in run.recorder.events)
    assert run.sha256 == local.sha256, run.recorder.notes


@pytest.mark.slow
def test_a_lost_nodes_pipelines_go_on_elsewhere_from_their_last_checkpoint(real, nodes, tmp_path):
    pair = [
        real.submission("sort", seed=1, num_steps=4),
        real.submission("reverse", task="reverse", seed=2, num_steps=4),
    ]
    alone = real.run(tmp_path / "alone", pair, policy="solo")
    lost: list[float] = []

    def lose_a_node(backend, recorder) -> bool:
        has_begun = any(note.type == "checkpoint" and note.fields["step"] >= 1 for note in recorder.notes)
        admitted = [action.placement for action in recorder.actions if isinstance(action, Admit)]
        placed = {node.index for placement in admitted for node in placement.rollout_nodes}
        if has_begun and not lost:
            ray_id = backend._workplace._nodes[NodeId("rollout", max(placed))].ray_id
            victim = next(node for node in nodes.rollout if node.node_id == ray_id)
            nodes.rollout.remove(victim)
            nodes.ray.remove_node(victim, allow_graceful=False)
            lost.append(time.monotonic())
        if lost and any(isinstance(event, NodeLost) for event in recorder.events) and len(nodes.rollout) < 2:
            nodes.rollout.append(nodes.add("rollout"))
        return False

    run = real.run(
        tmp_path / "run", pair, on=real.cluster(rollout=2), make_backend=nodes.make_backend(), watch=lose_a_node
    )
    assert any(isinstance(event, NodeLost) for event in run.recorder.events)
    assert run.status == {"sort": "finished", "reverse": "finished"}, run.recorder.notes
    assert run.sha256 == alone.sha256
    rejoined = [event.node for event in run.recorder.events if isinstance(event, NodeJoined)]
    assert set(rejoined) <= {event.node for event in run.recorder.events if isinstance(event, NodeLost)}


def test_fewer_nodes_than_the_file_asks_for_is_one_line_with_the_numbers(real, nodes, tmp_path):
    with pytest.raises(UserError) as caught:
        nodes.make_backend()(real.cluster(rollout=1, train=3), _folder(tmp_path))
    assert "cluster.pools.train has 3 nodes, the Ray cluster offers 1 of resource rlmux_train" in str(caught.value)
    assert "ray start --address" in str(caught.value)
    assert "\n" not in str(caught.value)


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder

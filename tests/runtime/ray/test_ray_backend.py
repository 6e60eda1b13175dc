"""What is Ray's alone: nodes that are lost, weights between nodes, GPUs, clusters that will not do.

What every backend must do is tested of all of them, where tests take `make_backend`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

from tests.waiting import LIMIT_S, until  # noqa: E402

from rlmux.core.actions import Admit, RunStage  # noqa: E402
from rlmux.core.errors import UserError, WorkerLostError  # noqa: E402
from rlmux.core.events import NodeJoined, NodeLost, PipelineRestarted, StageFinished  # noqa: E402
from rlmux.core.model import Cluster, DeviceId, NodeId, Phase, Pool, Stage  # noqa: E402
from rlmux.runtime.local import SharedMemoryFolder  # noqa: E402
from rlmux.runtime.ray import actor, gpus  # noqa: E402
from rlmux.runtime.ray.ray_backend import join_cluster  # noqa: E402
from rlmux.runtime.ray.weight_delivery import RaySync, Transport, WeightCarrier  # noqa: E402
from rlmux.runtime.weights.thin_link import open_store  # noqa: E402


@pytest.fixture(scope="module")
def pair(real):
    return [real.submission("sort", seed=1), real.submission("reverse", task="reverse", seed=2)]


@pytest.fixture(scope="module")
def local(real, pair, tmp_path_factory):
    """Each pipeline alone, in processes of this machine."""
    return real.run(tmp_path_factory.mktemp("local"), pair, policy="solo")


@pytest.mark.slow
@pytest.mark.parametrize("transport", [Transport.HIERARCHICAL, Transport.OBJECTS])
def test_without_shared_memory_weights_are_delivered_and_are_the_same(real, pair, local, nodes, tmp_path, transport):
    apart = nodes.make_backend(is_sharing_memory=False, sync=RaySync(transport=transport))
    far = real.run(tmp_path / "run", pair, make_backend=apart)
    assert far.sha256 == local.sha256, far.recorder.notes
    check_none_left_in_memory(tmp_path / "run")


def check_none_left_in_memory(run_folder: Path) -> None:
    """Folders of weights of a run that is over: its own, and its nodes'. An actor's own go as it does, soon after."""
    path = SharedMemoryFolder.path_of(run_folder)

    def left() -> list[Path]:
        return list(path.parent.glob(f"{path.name}*"))

    until(lambda: not left(), "the end of all folders of weights", seen=left, poll_s=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [Transport.OBJECTS, Transport.HIERARCHICAL])
def test_two_receiving_nodes_and_a_killed_trainer_change_nothing(real, nodes, tmp_path, transport):
    one, on = [real.submission("sort", num_rollout_nodes=2, num_steps=3)], real.cluster(rollout=2)
    alone = real.run(tmp_path / "alone", one, policy="solo", on=on)
    killed: list[int] = []

    def kill_trainer(backend, recorder) -> bool:
        workers = backend.workers_by_pipeline.get("sort")
        if workers and not killed and any(note.type == "checkpoint" for note in recorder.notes):
            killed.append(workers.trainer.pid)
            os.kill(workers.trainer.pid, signal.SIGKILL)
        return False

    apart = nodes.make_backend(is_sharing_memory=False, sync=RaySync(transport=transport))
    far = real.run(tmp_path / "far", one, on=on, make_backend=apart, watch=kill_trainer)
    assert any(isinstance(event, PipelineRestarted) for event in far.recorder.events)
    assert far.sha256 == alone.sha256, far.recorder.notes


@pytest.mark.slow
def test_a_sync_over_a_slow_link_holds_up_no_other_pipeline_and_the_weights_are_the_same(
    real, local, pair, nodes, tmp_path
):
    """Weights of one arrive only once the other has computed and synced its step, over the same link."""
    slow = RaySync(transport=Transport.HIERARCHICAL, link_bytes_per_s=60_000)
    arrived: list[Any] = []
    num_synced = 0

    def make_holding_backend(*given, **options):
        backend = nodes.make_backend(is_sharing_memory=False, sync=slow)(*given, **options)
        deliver = backend.workplace.deliver

        def deliver_late(path, senders, receivers, then) -> None:
            is_late = senders[0].name == "sort/train"
            deliver(path, senders, receivers, partial(arrived.append, then) if is_late else then)

        backend.workplace.deliver = deliver_late
        return backend

    def let_arrive(backend, recorder) -> bool:
        nonlocal num_synced
        if arrived and len(syncs(recorder, "reverse")) > num_synced:
            num_synced += 1
            arrived.pop()()
        return False

    run = real.run(tmp_path / "run", pair, make_backend=make_holding_backend, watch=let_arrive)
    assert run.sha256 == local.sha256, run.recorder.notes
    check_none_left_in_memory(tmp_path / "run")
    assert num_synced == 3, "version 0 and those of two steps"
    assert sum(syncs(run.recorder, "reverse")) > 3 * 0.5, "the link was not slow: the test shows nothing"


def syncs(recorder, pipeline: str) -> list[float]:
    """Seconds that each version of a pipeline took from the end of what made it to its arrival."""
    orders = {action.order: action for action in recorder.actions if isinstance(action, RunStage)}
    ended = [event for event in recorder.events if isinstance(event, StageFinished)]
    seconds, made_s = [], 0.0
    for event in ended:
        order = orders[event.order]
        if order.pipeline == pipeline and order.stage in (Stage.UPDATE, Stage.SFT_WARMUP):
            made_s = event.time_s
        if order.pipeline == pipeline and order.stage is Stage.PUBLISH:
            seconds.append(event.time_s - made_s)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_an_idle_worker_that_dies_is_missed_without_being_called(nodes, real, tmp_path, victim):
    """Whether its process dies, or the actor that looks after it; neither outlives the other."""
    import ray

    backend = nodes.make_backend()(real.cluster(), _folder(tmp_path))
    try:
        workplace, said = backend.workplace, []
        worker = workplace.spawn(
            "a/idle", __import__, ("os",), device=None, log_path=tmp_path / "log", call_limit_s=60.0
        )
        worker.call(0.0, "getpid", (), said.append)
        while not said:
            for one in workplace.wait(1.0):
                one.receive(0.0)
        pids = {"worker": said[0], "actor": ray.get(worker.actor.__ray_call__.remote(lambda actor: os.getpid()))}
        process = psutil.Process(pids["worker"])
        os.kill(pids[victim], signal.SIGKILL)
        while not (ready := workplace.wait(0.2)):
            pass
        assert ready == [worker]
        with pytest.raises(WorkerLostError, match="a/idle is gone"):
            worker.receive(0.0)
        worker.kill()
        assert psutil.wait_procs([process], timeout=120)[1] == []
    finally:
        backend.close()


def test_another_thread_ends_a_wait_for_a_busy_worker(one_node, real, tmp_path):
    backend = one_node.make_backend()(real.cluster(), _folder(tmp_path))
    workplace, log = backend.workplace, tmp_path / "log"
    try:
        worker = workplace.spawn("a/busy", __import__, ("signal",), device=None, log_path=log, call_limit_s=60.0)
        worker.call(0.0, "pause", (), lambda answer: None)
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(workplace.wait, 10 * LIMIT_S)
            try:
                workplace.wake()
                until(waiting.done, "the end of the wait")
            finally:
                worker.kill()
        assert waiting.result() == []
    finally:
        backend.close()


def test_a_node_with_another_torch_is_one_line_with_the_version_that_is_accepted(one_node, real, tmp_path, monkeypatch):
    monkeypatch.setattr(actor, "version", lambda package: "99.0+cpu" if package == "torch" else version(package))
    with pytest.raises(
        UserError, match=r"^Ray node \S+ has torch \S+, this machine 99\.0; accepted there: torch 99\.0$"
    ):
        one_node.make_backend()(real.cluster(), _folder(tmp_path))


@pytest.mark.slow
def test_a_killed_trainer_writes_no_more_once_that_is_said(nodes, real, tmp_path):
    """Its successor reads its checkpoints next."""
    backend = nodes.make_backend()(real.cluster(), _folder(tmp_path))
    try:
        workplace, said = backend.workplace, []
        device = DeviceId("train", 0, 0)
        trainer = workplace.spawn(
            "a/train", __import__, ("os",), device=device, log_path=tmp_path / "log", call_limit_s=60.0
        )
        trainer.call(0.0, "getpid", (), said.append)
        while not said:
            for one in workplace.wait(1.0):
                one.receive(0.0)
        assert psutil.pid_exists(said[0])
        workplace.forget(trainer)
        trainer.kill()
        assert not psutil.pid_exists(said[0])
    finally:
        backend.close()


@pytest.mark.slow
def test_a_killed_fork_server_is_replaced_and_changes_nothing(real, pair, local, nodes, tmp_path):
    """All workers that came from it die with it."""
    import ray

    killed: list[int] = []

    def kill_keepers(backend, recorder) -> bool:
        if not killed and any(note.type == "step" for note in recorder.notes):
            keepers = backend.workplace.fork_servers.keepers()
            killed.extend(ray.get([one.__ray_call__.remote(lambda keeper: os.getpid()) for one in keepers]))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return False

    apart = nodes.make_backend(is_sharing_memory=False)
    run = real.run(tmp_path / "run", pair, make_backend=apart, watch=kill_keepers)
    assert len(killed) == 2, "of the training node and of a rollout node"
    assert any(isinstance(event, PipelineRestarted) for event in run.recorder.events)
    assert run.sha256 == local.sha256, run.recorder.notes


@pytest.mark.slow
def test_a_lost_nodes_pipelines_go_on_elsewhere_from_their_last_checkpoint(real, nodes, tmp_path):
    num_steps = 6
    pair = [
        real.submission("sort", seed=1, num_steps=num_steps),
        real.submission("reverse", task="reverse", seed=2, num_steps=num_steps),
    ]
    alone = real.run(tmp_path / "alone", pair, policy="solo")
    lost: list[NodeId] = []

    def lose_a_node(backend, recorder) -> bool:
        node = node_of_a_pipeline_that_needs_it(recorder, num_steps)
        if node is not None and not lost:
            victim = next(one for one in nodes.rollout if one.node_id == backend.workplace.nodes[node].ray_id)
            nodes.lose(victim)
            lost.append(node)
        if any(isinstance(event, NodeLost) for event in recorder.events):
            nodes.replace_lost()
        return False

    try:
        run = real.run(
            tmp_path / "run", pair, on=real.cluster(rollout=2), make_backend=nodes.make_backend(), watch=lose_a_node
        )
    finally:
        nodes.replace_lost()
    assert [event.node for event in run.recorder.events if isinstance(event, NodeLost)] == lost != []
    assert run.status == {"sort": "finished", "reverse": "finished"}, run.recorder.notes
    assert run.sha256 == alone.sha256
    assert {event.node for event in run.recorder.events if isinstance(event, NodeJoined)} <= set(lost)


def node_of_a_pipeline_that_needs_it(recorder, num_steps: int) -> NodeId | None:
    """The rollout node of a pipeline that has a checkpoint to go back to, and rollouts still to ask for."""
    furthest = {note.pipeline: note.step for note in recorder.notes if note.type == "step"}
    saved = {note.pipeline: note.step for note in recorder.notes if note.type == "checkpoint"}
    for action in recorder.actions:
        has_saved = isinstance(action, Admit) and saved.get(action.pipeline, 0) >= 1
        if has_saved and furthest[action.pipeline] < num_steps - 2:
            return max(action.placement.rollout_nodes)
    return None


def test_fewer_nodes_than_the_file_asks_for_is_one_line_with_the_numbers(real, one_node, tmp_path):
    with pytest.raises(UserError) as caught:
        one_node.make_backend()(real.cluster(rollout=1, train=4), _folder(tmp_path))
    assert "cluster.pools.train has 4 nodes, the Ray cluster offers 1 of resource rlmux_train" in str(caught.value)
    assert "ray start --address" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad request\r\n\r\n", b""])
def test_an_address_where_something_else_answers_is_one_line_at_once(real, answer):
    """Ray itself would try for minutes, and say so all the while."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as other:

        def be_somebody_else() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        other.submit(be_somebody_else)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"^--address {address}: no Ray cluster answers there [^\n]*$"):
            join_cluster(real.cluster(), address)


@pytest.fixture(scope="module")
def gpu_nodes(nodes):
    """Two rollout nodes of two GPUs each, a training node of two with one device too many, one without any. Ray takes
    our word for the GPUs."""
    added = [nodes.add(fast=2, num_gpus=2), nodes.add(fast=2, num_gpus=2), nodes.add(slow=2)]
    nodes.add(greedy=3, num_gpus=2)
    return added


def pools(**num_nodes: int) -> Cluster:
    return Cluster(
        pools={
            name: Pool(name=name, phase=Phase.TRAIN if name == "slow" else Phase.ROLLOUT, num_nodes=num)
            for name, num in num_nodes.items()
        }
    )


class Asked:
    """Workers that are the module `os`, each asked what it sees; the class of a test cannot travel to an actor."""

    def __init__(self, backend, tmp_path) -> None:
        self._workplace, self._log = backend.workplace, tmp_path / "log"
        self._said: dict[str, list[str]] = {}
        self._raylets: dict[str, Any] = {}

    def add(self, name: str, device: DeviceId) -> None:
        worker = self._workplace.spawn(name, __import__, ("os",), device=device, log_path=self._log, call_limit_s=60.0)
        self._said[name] = []
        worker.call(0.0, "getenv", ("CUDA_VISIBLE_DEVICES",), self._said[name].append)
        self._raylets[name] = worker.actor.__ray_call__.remote(lambda actor: os.getppid())

    def answers(self) -> dict[str, tuple[str, int]]:
        """(the GPUs that it sees, the raylet that its actor is a child of) by name."""
        import ray

        while not all(self._said.values()):
            for worker in self._workplace.wait(1.0):
                worker.receive(0.0)
        return {name: (gpus, ray.get(self._raylets[name])) for name, (gpus,) in self._said.items()}


@pytest.mark.slow
def test_workers_see_the_gpu_of_their_device_on_the_node_that_was_chosen(nodes, gpu_nodes, tmp_path):
    backend = nodes.make_backend()(pools(fast=4, slow=1), _folder(tmp_path))
    try:
        asked = Asked(backend, tmp_path)
        for index in range(4):
            asked.add(f"a/{index}", DeviceId("fast", index, 0))
            asked.add(f"b/{index}", DeviceId("fast", index, 0))
        asked.add("a/train", DeviceId("slow", 0, 0))
        said = asked.answers()
        raylets = {node.node_id: node.all_processes["raylet"][0].process.pid for node in gpu_nodes}
        chosen = {node_id: raylets[node.ray_id] for node_id, node in backend.workplace.nodes.items()}
    finally:
        backend.close()
    assert [said[f"a/{index}"][1] for index in range(4)] == [chosen[NodeId("fast", index)] for index in range(4)]
    assert [said[f"a/{index}"] for index in range(4)] == [said[f"b/{index}"] for index in range(4)]
    assert len({said[f"a/{index}"] for index in range(4)}) == 4, "two devices are one GPU"
    assert {said[f"a/{index}"][0] for index in range(4)} == {"0", "1"}
    assert said["a/train"] == ("", chosen[NodeId("slow", 0)])


@pytest.mark.slow
def test_more_devices_than_gpus_on_a_node_are_one_line(nodes, gpu_nodes, tmp_path):
    with pytest.raises(UserError, match=r"^Ray node \S+ offers 3 devices and has 2 GPUs; accepted: [^\n]*$"):
        nodes.make_backend()(pools(greedy=3), _folder(tmp_path))


@pytest.mark.slow
def test_workers_of_a_device_of_several_gpus_see_all_of_them(nodes, tmp_path):
    """Two devices of two GPUs on one node of four, and a pool of as large devices on a node that has too few."""
    added = [nodes.add(wide=2, num_gpus=4), nodes.add(narrow=1, num_gpus=1)]
    wide, narrow = (
        Cluster(pools={name: Pool(name=name, phase=Phase.ROLLOUT, num_nodes=num, gpus_per_node=2)})
        for name, num in (("wide", 2), ("narrow", 1))
    )
    backend = nodes.make_backend()(wide, _folder(tmp_path))
    try:
        asked = Asked(backend, tmp_path)
        for index in range(2):
            asked.add(f"a/{index}", DeviceId("wide", index, 0))
            asked.add(f"b/{index}", DeviceId("wide", index, 0))
        said = asked.answers()
        raylet = added[0].all_processes["raylet"][0].process.pid
    finally:
        backend.close()
    assert {each for _, each in said.values()} == {raylet}
    seen = [{said[f"{name}/{index}"][0] for name in "ab"} for index in range(2)]
    assert [len(each) for each in seen] == [1, 1], "workers of one device see different GPUs"
    assert sorted(gpu for names in seen for name in names for gpu in name.split(",")) == ["0", "1", "2", "3"]
    refusal = r"^Ray node \S+ offers 1 devices of 2 GPUs and has 1 GPUs; accepted: all GPUs of each device on one node"
    with pytest.raises(UserError, match=refusal):
        nodes.make_backend()(narrow, tmp_path / "run")


@pytest.mark.slow
def test_gpus_that_others_hold_are_one_line(nodes, gpu_nodes, tmp_path, monkeypatch):
    import ray

    monkeypatch.setattr(gpus, "_RESERVE_LIMIT_S", 0.5)
    ray.init(address=nodes.ray.address, namespace="rlmux", log_to_driver=False)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(gpu_nodes[0].node_id, soft=False)
    holder = ray.remote(dict).options(num_gpus=1, num_cpus=0, scheduling_strategy=strategy).remote()
    ray.get(holder.__ray_ready__.remote())
    with pytest.raises(UserError, match=r"^Ray node \S+: its GPUs are held by others; needed for node fast-\d: 1; "):
        nodes.make_backend()(pools(fast=4), _folder(tmp_path))


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_versions_that_are_published_at_once_meet_at_one_store(tmp_path, monkeypatch):
    def slowly(address: str) -> Any:
        time.sleep(0.2)  # so that both are inside
        return open_store(address)

    monkeypatch.setattr("rlmux.runtime.weights.thin_link.open_store", slowly)
    carrier = WeightCarrier(tmp_path / "weights", "127.0.0.1", None)
    with ThreadPoolExecutor(2) as both:
        meetings = [each.result() for each in [both.submit(carrier.meet) for _ in range(2)]]
    assert meetings[0].port == meetings[1].port
    assert sorted(meeting.number for meeting in meetings) == [0, 1]
    carrier.close()

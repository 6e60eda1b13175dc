"""Real runs, small enough for a test: real processes, real training, a few steps.

A test that takes `make_backend` says what every backend must do: it runs under `local`, and on a Ray cluster of several
nodes. There it is slow unless marked `quick_on_ray`, and skipped where ray is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from rlmux.core.decision.plan import GroupPlan, MigrateWork, PauseOrder
from rlmux.core.decision.policy import Policy
from rlmux.core.errors import WorkerLostError
from rlmux.core.model import Cluster, MigrationEstimate, Phase, Pipeline, PipelineId, Pool, Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.policies.lookahead.dispatching import start_where_free
from rlmux.policies.rollmux import RollMux
from rlmux.rl.config import (
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TaskConfig,
    TrainingConfig,
)
from rlmux.rl.determinism_class import ProbeReport
from rlmux.runtime.backend import Submission, WorkerOptions
from rlmux.runtime.controller import Controller
from rlmux.runtime.local import local_backend
from rlmux.runtime.worker_backend import WorkerBackend

STAGES = (
    Stage.GENERATE,
    Stage.REWARD,
    Stage.REFERENCE_LOGPROBS,
    Stage.OLD_LOGPROBS,
    Stage.UPDATE,
    Stage.PUBLISH,
)


def submission(name: str, *, num_steps: int = 2, task: str = "sort", seed: int = 1, **changes: Any) -> Submission:
    """A tiny pipeline: every stage there is, a fraction of a second each."""
    algorithm = AlgorithmConfig(
        prompts_per_step=4,
        group_size=4,
        num_minibatches=2,
        micro_batch_size=4,
        kl_coef=0.01,
        staleness=changes.pop("staleness", 0),
    )
    config = TrainingConfig(
        name=name,
        seed=seed,
        num_steps=num_steps,
        model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64),
        task=TaskConfig(name=task, **changes.pop("task_fields", {})),
        sft_warmup=SftWarmupConfig(num_updates=4, batch_size=16),
        algorithm=algorithm,
        rollout=RolloutConfig(max_new_tokens=changes.pop("max_new_tokens", 16), num_slots=8),
    )
    pipeline = Pipeline(
        id=PipelineId(name),
        num_steps=num_steps,
        stages=STAGES,
        has_sft_warmup=True,
        staleness=algorithm.staleness,
        num_rollout_nodes=changes.pop("num_rollout_nodes", 1),
    )
    assert not changes, changes
    return Submission(pipeline=pipeline, config=config)


def migrating(one: Submission, *, copies_kv: bool) -> Submission:
    """The pipeline, whose KV caches are cheaper to copy or to recompute."""
    estimate = MigrationEstimate(copy_s=1.0, recompute_s=2.0 if copies_kv else 0.5)
    return replace(one, pipeline=replace(one.pipeline, migration=estimate))


def cluster(*, rollout: int = 1, train: int = 1) -> Cluster:
    return Cluster(
        pools={
            "rollout": Pool(name="rollout", phase=Phase.ROLLOUT, num_nodes=rollout),
            "train": Pool(name="train", phase=Phase.TRAIN, num_nodes=train),
        }
    )


class Recorder:
    """Keeps all events, actions and notes of a run."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.actions: list[Any] = []
        self.notes: list[Any] = []

    def update(self, now_s: float, events: Any, actions: Any, notes: Any) -> None:
        self.events += events
        self.actions += actions
        self.notes += notes


@dataclass
class Run:
    """What a real run came to."""

    sha256: dict[str, str | None]
    status: dict[str, str]
    recorder: Recorder
    scheduler: Scheduler


def run(
    folder: Path,
    submissions: list[Submission],
    *,
    policy: Any = "rollmux",
    on: Cluster | None = None,
    options: WorkerOptions | None = None,
    watch: Callable[[WorkerBackend, Recorder], bool] | None = None,
    make_backend: Callable[..., WorkerBackend] = local_backend,
) -> Run:
    """Train for real. `watch` is asked between ticks of the loop and ends the run by returning True."""
    on = on or cluster()
    folder.mkdir(parents=True, exist_ok=True)
    scheduler = Scheduler(on, make_policy(policy) if isinstance(policy, str) else policy)
    backend = make_backend(on, folder, options=options)
    recorder = Recorder()
    try:
        controller = Controller(scheduler, backend, None, [recorder])
        controller.run(submissions, until=lambda: bool(watch and watch(backend, recorder)))
    finally:
        backend.close()
    names = [one.pipeline.id for one in submissions]
    return Run(
        sha256={name: backend.weights_sha256(name) for name in names},
        status={name: scheduler.query.status(name).value for name in names},
        recorder=recorder,
        scheduler=scheduler,
    )


class Meddler(Policy):
    """Places like `rollmux` and dispatches as no sane policy would."""

    name = "meddler"
    reacts_to_progress = True
    place = RollMux().place
    rebalance = RollMux().rebalance


class MovesEverything(Meddler):
    """Begins the first device's shard of every rollout, pauses it, migrates it to the second device; lets that decode
    on, pauses it, and migrates all of it to the first. So every trajectory is migrated mid-way at least once."""

    def __init__(self) -> None:
        self.num_moves: dict[tuple[str, int], int] = {}
        self.paused: set[tuple[str, int]] = set()

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        devices = {member.id: member.rollout_devices for member in plan.members}
        going_on = []
        for work in plan.ready:
            key = (work.pipeline, work.step)
            moves = self.num_moves.get(key, 0)
            is_moving = work.phase is Phase.ROLLOUT and moves < 2
            if is_moving and work.devices[0] != devices[work.pipeline][moves]:
                continue  # its time comes after the next move
            if is_moving and work.is_continuation and key in self.paused:
                source, target = work.devices[0], devices[work.pipeline][1 - moves]
                if not plan.can_migrate(work.pipeline, source, target):
                    continue  # the first move is still under way
                self.paused.discard(key)
                self.num_moves[key] = moves + 1
                plan.choose(MigrateWork(pipeline=work.pipeline, source=source, target=target))
            else:
                going_on.append(work)
        plan.choose(*start_where_free(plan, going_on))
        for order in plan.running:
            moves = self.num_moves.get((order.pipeline, order.step), 0)
            if order.phase is Phase.ROLLOUT and moves < 2 and order.num_active:
                self.paused.add((order.pipeline, order.step))
                plan.choose(PauseOrder(order=order.id))
        return plan


# ------------------------------------------------------------------ every backend

ON_RAY = (pytest.mark.ray, pytest.mark.xdist_group("ray"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick_on_ray: cheap enough under every backend to run each time")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make_backend" in metafunc.fixturenames:
        backends = ["local", pytest.param("ray", marks=ON_RAY)]
        metafunc.parametrize("make_backend", backends, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_on_ray = callspec is not None and callspec.params.get("make_backend") == "ray"
        if is_on_ray and item.get_closest_marker("quick_on_ray") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def make_backend(request: pytest.FixtureRequest) -> Callable[..., WorkerBackend]:
    """Makes each backend in turn."""
    if request.param == "local":
        return local_backend
    is_quick = request.node.get_closest_marker("quick_on_ray") is not None
    return request.getfixturevalue("one_node" if is_quick else "nodes").make_backend()


@dataclass(frozen=True)
class BackendWords:
    """What the command line takes for a backend."""

    run: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()


@pytest.fixture
def backend_words(make_backend: Callable[..., WorkerBackend], request: pytest.FixtureRequest) -> BackendWords:
    """The words for each backend in turn."""
    if make_backend is local_backend:
        return BackendWords()
    address = ("--address", request.getfixturevalue("nodes").ray.address)
    return BackendWords(run=("--backend", "ray", *address), resume=address)


@contextlib.contextmanager
def ray_environment() -> Iterator[None]:
    """What clusters of these tests are started with."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the ray extra: pip install 'rlmux[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """A Ray cluster of several nodes on this machine; each run joins it and leaves."""
    with ray_environment():
        nodes = Nodes()
        yield nodes
        nodes.close()


@pytest.fixture(scope="session")
def one_node() -> Iterator[RayCluster]:
    """A Ray cluster of one node with a device of each pool: it starts in a third of the time."""
    with ray_environment():
        node = RayCluster()
        yield node
        node.close()


class RayCluster:
    """A Ray cluster that runs can join."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        devices = {"num_cpus": 1, "resources": {"rlmux_rollout": 1, "rlmux_train": 1}}
        head_args = {"include_dashboard": False, "object_store_memory": 80_000_000, **(head or devices)}
        self.ray = Cluster(initialize_head=True, head_node_args=head_args)

    def make_backend(self, **options: Any) -> Callable[..., WorkerBackend]:
        from rlmux.runtime.ray.ray_backend import ray_backend

        return partial(ray_backend, address=self.ray.address, **options)

    def close(self) -> None:
        self.ray.shutdown()


class Nodes(RayCluster):
    """A head that offers nothing, a node for training and two for rollouts, as a cluster would have them."""

    def __init__(self) -> None:
        fast_death = {
            "health_check_initial_delay_ms": 500,
            "health_check_period_ms": 300,
            "health_check_failure_threshold": 10,
        }
        super().__init__(num_cpus=0, _system_config=fast_death)
        self.train = self.add(train=2, core=1)
        self.rollout = [self.add(rollout=1), self.add(rollout=1)]

    def add(self, *, num_gpus: int = 0, **num_devices: int) -> Any:
        """A node that offers so many devices of each pool."""
        resources = {f"rlmux_{pool}": num for pool, num in num_devices.items()}
        return self.ray.add_node(num_cpus=1, num_gpus=num_gpus, resources=resources, object_store_memory=80_000_000)

    def lose(self, rollout_node: Any) -> None:
        """As if its machine had died; returns once Ray says so."""
        from rlmux.runtime.ray.cluster import alive_nodes

        self.rollout.remove(rollout_node)
        self.ray.remove_node(rollout_node, allow_graceful=False)
        until(
            lambda: all(node["NodeID"] != rollout_node.node_id for node in alive_nodes()),
            "Ray to say that the node is lost",
            seen=alive_nodes,
            poll_s=0.05,
        )

    def replace_lost(self) -> None:
        while len(self.rollout) < 2:
            self.rollout.append(self.add(rollout=1))


class Worker:
    """Stands in for a process, where a test is about what is asked of it and when: keeps calls until it is told to
    answer, first come first."""

    pid: int | None = 1
    address = "127.0.0.1"
    call_limit_s = 60.0
    num_beats = 0
    called_s: float | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.report: ProbeReport | None = None
        """What a probe of its engine finds; None: it has work already."""
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Any) -> None:
        if method == "build":
            then(None)
        elif method == "probe":
            then(self.report)  # at once: most tests are about other calls
        else:
            self.calls.append((method, args, then))

    def answer(self, method: str, value: Any) -> tuple[Any, ...]:
        """Answer its oldest call, which is this one; returns what it was asked."""
        asked, args, then = self.calls.pop(0)
        assert asked == method
        then(value)
        return args

    def asked(self) -> list[str]:
        return [method for method, _, _ in self.calls]

    def receive(self, now_s: float) -> None:
        raise WorkerLostError(f"{self.name} is gone")

    def is_overdue(self, now_s: float) -> bool:
        return False

    def activity(self) -> None:
        return None

    def end(self, *, finishes_checkpoint: bool = False) -> None:
        pass

    def kill(self) -> None:
        pass


class Workplace:
    """A place of such workers, by name."""

    bases = None

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.lost: list[Worker] = []
        """Workers that the next poll finds dead."""

    def spawn(self, name: str, make_worker: Any, args: tuple[Any, ...], **where: Any) -> Worker:
        self.workers[name] = Worker(name)
        return self.workers[name]

    def wait(self, timeout_s: float) -> list[Worker]:
        lost, self.lost = self.lost, []
        return lost

    def wake(self) -> None:
        pass

    def senders(self, trainers: Any) -> list[int]:
        return [0]

    def forget(self, worker: Worker) -> None:
        pass

    def node_changes(self) -> list[Any]:
        return []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For workers made in this process: they choose the number of threads for all of it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real():
    """The builders, for test modules: they cannot import this file."""

    class Real:
        MovesEverything = MovesEverything
        Workplace = Workplace
        submission = staticmethod(submission)
        migrating = staticmethod(migrating)
        cluster = staticmethod(cluster)
        run = staticmethod(run)
        replace = staticmethod(replace)

    return Real

"""Request batches of an on-demand pipeline, against workers that answer at once: what is emitted, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.actions import RunStage, Switch
from rlmux.core.events import Event, StageFinished, WorkArrived
from rlmux.core.model import DeviceId, OrderId, Phase, PipelineId, Stage
from rlmux.log.notes import SharedBatchNote
from rlmux.rl.client_requests import ForwardBackward, OptimizerStep, SampleRequest, TrainRequest, WriteWeights
from rlmux.rl.config import AdapterConfig, TrainingConfig
from rlmux.rl.types import TrajectoryId, TrajectoryRequest
from rlmux.runtime.orders.request_batches import BatchOptions, OnDemandPipeline, Surroundings
from rlmux.runtime.orders.running_orders import RunningOrder
from rlmux.runtime.orders.shared_sampling import SharedSamplers
from rlmux.runtime.orders.shared_training import SharedTrainers
from rlmux.runtime.workers.call_loop import CallLoop, Future, Work
from rlmux.runtime.workers.request_workers import BatchReport, RequestChunk, RequestResult

CHUNK_S = 1.0
DEVICE = DeviceId("rollout", 0, 0)


class Prompt:
    """A worker that answers one request of each tenant in each chunk, and says that it took a second."""

    name = "prompt"

    def __init__(self, heard: Heard) -> None:
        self.ids: list[tuple[str, str]] = []
        """Tenant and id of what it has."""
        self._heard = heard

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        then(getattr(self, method)(*args))

    def build(self) -> None:
        pass

    def load(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def offload(self) -> None:
        self._heard.said.append(("offloaded",))

    def join(self, tenant: str, adapter: AdapterConfig) -> None:
        self._heard.said.append(("joined", tenant))

    def leave(self, tenant: str) -> None:
        self.ids = [one for one in self.ids if one[0] != tenant]
        self._heard.said.append(("left the worker", tenant))

    def load_weights(self, weights: Path | None, tenant: str) -> None:
        self._heard.loaded.append(weights)
        self._heard.while_loading()

    def add(self, requests: Sequence[Any], tenant: str = "") -> list[RequestResult]:
        ids = [request[0] if isinstance(request, tuple) else request.id for request in requests]
        self.ids += [(tenant, one) for one in ids]
        self._heard.handed_over.append(ids)
        return []

    def keep_update(self, folder: Path, kept: Sequence[Path]) -> str:
        return "hash"

    def run_chunk(self, chunk: float | RequestChunk) -> BatchReport:
        if isinstance(chunk, RequestChunk) and chunk.requests:
            self.add(chunk.requests)
        answers, made = [], {}
        for tenant in dict.fromkeys(one for one, _ in self.ids):
            first = next(one for one in self.ids if one[0] == tenant)
            self.ids.remove(first)
            answers.append(RequestResult(id=first[1], tenant=tenant))
            made[tenant] = 4
        return BatchReport(
            answers=answers, num_active=len(self.ids), num_waiting=0, tokens=4 * len(made), seconds=CHUNK_S,
            load_s=0.0, tokens_by_tenant=made,
        )  # fmt: skip


class Slow(Prompt):
    """A worker that answers when it is let to, in the order of its calls."""

    def __init__(self, heard: Heard) -> None:
        super().__init__(heard)
        self.asked: list[str] = []
        """Methods of the calls that are not answered."""
        self.is_killed = False
        self._held: list[Callable[[], None]] = []

    def call(self, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        self.asked.append(method)
        self._held.append(lambda: then(getattr(self, method)(*args)))

    def answer_all(self) -> None:
        """RequestResult calls, those that the answers bring about too."""
        while self._held:
            self.asked.pop(0)
            self._held.pop(0)()

    def kill(self) -> None:
        self.is_killed = True


class Heard:
    """A workplace, an outbox and a client in one: a list of all that they get."""

    bases: Path | None = None

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.workers: list[Prompt] = []
        self.handed_over: list[list[str]] = []
        self.loaded: list[Path | None] = []
        self.while_loading: Callable[[], None] = lambda: None

    def spawn(self, *args: Any, **options: Any) -> Prompt:
        self.workers.append(Prompt(self))
        return self.workers[-1]

    def forget(self, worker: Prompt) -> None:
        pass

    def now_s(self) -> float:
        return 0.0

    def add(self, event: Event) -> None:
        if isinstance(event, WorkArrived):
            self.said.append(("arrived", event.units))
        elif isinstance(event, StageFinished):
            self.said.append(("finished", event.order, event.seconds))

    def on_result(self, pipeline: PipelineId, result: RequestResult) -> None:
        self.said.append((result.id, result.error))

    def on_checkpoint(self, pipeline: PipelineId, request_id: str, folder: Path, sha256: str) -> None:
        self.said.append(("checkpointed", request_id))

    def add_note(self, note: SharedBatchNote) -> None:
        self.said.append((note.type, note.tokens))


class Calls(CallLoop):
    """Its timers are over at once."""

    def after(self, seconds: float) -> Future:
        future = self.future()
        future.set_result()
        return future


class Batches(OnDemandPipeline):
    """A pipeline whose orders are carried out as the backend does."""

    def begin(self, action: RunStage) -> None:
        order = RunningOrder(action, action.device_fraction)
        order.task = self._calls.start(self._carry_out(order), pipeline=self.id)

    def _carry_out(self, order: RunningOrder) -> Work:
        self._outbox.add((yield from self.run(order)))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def batches(heard: Heard, tmp_path: Path) -> Batches:
    return made(heard, Calls(heard, lambda: 0.0), SharedSamplers(), tmp_path, TrainingConfig(name="a"))


@pytest.fixture
def tenants(heard: Heard, tmp_path: Path) -> list[Batches]:
    """Two pipelines, `a` and `b`, that train adapters of one base."""
    calls, samplers = Calls(heard, lambda: 0.0), SharedSamplers()
    trainers = SharedTrainers(calls)
    configs = [
        TrainingConfig(name=name, adapter=AdapterConfig(rank=rank, alpha=1.0)) for rank, name in ((1, "a"), (2, "b"))
    ]
    return [made(heard, calls, samplers, tmp_path, config, trainers) for config in configs]


def made(
    heard: Heard,
    calls: CallLoop,
    samplers: SharedSamplers,
    folder: Path,
    config: TrainingConfig,
    trainers: SharedTrainers | None = None,
) -> Batches:
    shared = Surroundings(
        workplace=heard,  # type: ignore[arg-type]
        calls=calls,
        outbox=heard,  # type: ignore[arg-type]
        trainers=trainers or SharedTrainers(calls),
        options=BatchOptions(batch_s=2 * CHUNK_S, step_s=5 * CHUNK_S),
        samplers=samplers,
    )
    return Batches(PipelineId(config.name), config, folder, heard, shared)


def sampling(name: str) -> SampleRequest:
    request = TrajectoryRequest(id=TrajectoryId(0, 0, 0), prompt_tokens=(1,), max_new_tokens=4, stop_tokens=(), seed=0)
    return SampleRequest(id=name, trajectories=[request], prompt_tokens=(1,), num_scored=0)


def loss(*, is_forward_only: bool) -> TrainRequest:
    return ForwardBackward(datums=(), loss="cross_entropy", config={}, is_forward_only=is_forward_only)


UPDATE = OptimizerStep(learning_rate=0.1, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, grad_clip=0.0)


def order(number: int, stage: Stage = Stage.GENERATE, switch: Switch = Switch.NONE) -> RunStage:
    return RunStage(
        order=OrderId(number), pipeline=PipelineId("a"), step=number, stage=stage, devices=(DEVICE,),
        weight_version=0, switch=switch,
    )  # fmt: skip


def test_a_batch_of_many_requests_ends_with_work_left_so_that_others_have_their_turn(batches, heard):
    for name in ("r1", "r2", "r3"):
        batches.sample(sampling(name), None)
    heard.said.clear()
    batches.begin(order(1))
    assert heard.said == [("r1", None), ("r2", None), ("arrived", 4), ("finished", 1, 2 * CHUNK_S)]
    heard.said.clear()
    batches.begin(order(2))
    assert heard.said == [("r3", None), ("finished", 2, CHUNK_S)], "what the worker had begun goes on"


@pytest.mark.parametrize("stage", [Stage.GENERATE, Stage.UPDATE])
def test_a_pipeline_that_is_placed_on_another_device_starts_its_worker_there(batches, heard, stage):
    def ask(name: str) -> None:
        if stage is Stage.GENERATE:
            batches.sample(sampling(name), None)
        else:
            batches.train(name, loss(is_forward_only=True))

    ask("r1")
    batches.begin(order(1, stage))
    ask("r2")
    heard.said.clear()
    batches.begin(replace(order(2, stage), devices=(DeviceId("rollout", 1, 0),)))
    assert heard.said == [("r2", None), ("finished", 2, CHUNK_S)]
    assert len(heard.workers) == 2


def test_a_request_that_is_withdrawn_before_it_began_is_answered(batches, heard):
    for name in ("r1", "r2"):
        batches.sample(sampling(name), None)
    heard.said.clear()
    batches.withdraw(["r1", "r7"])
    assert heard.said == [("r1", "it was cancelled before it began")]
    batches.begin(order(1))
    assert heard.said[1:] == [("r2", None), ("finished", 1, CHUNK_S)]


def test_a_batch_of_many_forwards_ends_with_work_left_and_goes_on_in_the_next(batches, heard):
    for name in ("f1", "f2", "f3"):
        batches.train(name, loss(is_forward_only=True))
    heard.said.clear()
    batches.begin(order(1, Stage.UPDATE))
    assert heard.said == [("f1", None), ("f2", None), ("arrived", 0), ("finished", 1, 2 * CHUNK_S)]
    heard.said.clear()
    batches.begin(order(2, Stage.UPDATE))
    assert heard.said == [("f3", None), ("finished", 2, CHUNK_S)]


def test_a_step_is_not_cut_where_forwards_are_until_its_losses_alone_have_lasted_long(batches, heard):
    for name in ("b1", "b2"):
        batches.train(name, loss(is_forward_only=False))
    batches.train("u1", UPDATE)
    heard.said.clear()
    batches.begin(order(1, Stage.UPDATE))
    assert [what for what, *_ in heard.said] == ["b1", "b2", "u1", "checkpointed", "finished"]
    names = [f"b{number}" for number in range(6)]
    for name in names:
        batches.train(name, loss(is_forward_only=False))
    heard.said.clear()
    batches.begin(order(2, Stage.UPDATE))
    assert [what for what, *_ in heard.said] == [*names[:5], "arrived", "finished"]


def test_forwards_that_were_answered_are_not_done_again_for_a_worker_that_is_lost(batches, heard):
    for name, is_forward_only in (("f1", True), ("b1", False)):
        batches.train(name, loss(is_forward_only=is_forward_only))
    batches.begin(order(1, Stage.UPDATE))
    batches.park()
    heard.said.clear()
    batches.begin(order(2, Stage.UPDATE))
    assert [what for what, *_ in heard.said] == ["b1", "finished"]


def test_answers_that_are_given_again_break_no_row_of_lost_workers(batches, heard):
    batches.train("l0", loss(is_forward_only=False))
    for number in (1, 2):
        batches.begin(order(number, Stage.UPDATE))
        assert heard.said[-1][0] == "finished"
        worker = heard.workers[-1]
        assert batches.count_loss(worker) == number
        batches.forget(worker)
    batches.train("l1", loss(is_forward_only=False))
    batches.begin(order(3, Stage.UPDATE))
    assert batches.count_loss(heard.workers[-1]) == 1


def test_requests_that_come_while_their_weights_are_loaded_are_one_batch_with_the_first(batches, heard):
    file = Path("sampler-1.safetensors")
    batches.sample(sampling("r1"), file)
    heard.while_loading = lambda: [batches.sample(sampling(name), file) for name in ("r2", "r3")]
    batches.begin(order(1))
    assert heard.handed_over == [["r1", "r2", "r3"]]
    heard.while_loading = lambda: None
    batches.sample(sampling("r4"), file)
    batches.begin(order(2))
    assert heard.loaded == [file], "weights that are there are not asked for again"
    batches.park()
    batches.sample(sampling("r5"), file)
    batches.begin(order(3))
    assert heard.loaded == [file, file], "another process has none"


def test_saves_behind_an_update_are_answered_before_the_update_is_kept(batches, heard):
    batches.train("b1", loss(is_forward_only=False))
    batches.train("u1", UPDATE)
    batches.train("s1", WriteWeights(path=Path("sampler-3.safetensors")))
    batches.train("b2", loss(is_forward_only=False))
    heard.said.clear()
    batches.begin(order(1, Stage.UPDATE))
    assert heard.handed_over == [["b1", "u1", "s1"]], "a step is one hand-over, where all of it is there"
    assert heard.said[2:4] == [("s1", None), ("checkpointed", "u1")], "by the number of the update, not of the save"


def test_a_save_that_comes_while_the_update_is_made_is_answered_before_the_update_is_kept(batches, heard, monkeypatch):
    batches.train("b1", loss(is_forward_only=False))
    batches.train("u1", UPDATE)
    chunk = Prompt.run_chunk

    def run_chunk(self: Prompt, limits: RequestChunk) -> BatchReport:
        if self.ids == [("", "u1")]:
            batches.train("s1", WriteWeights(path=Path("sampler-3.safetensors")))
        return chunk(self, limits)

    monkeypatch.setattr(Prompt, "run_chunk", run_chunk)
    heard.said.clear()
    batches.begin(order(1, Stage.UPDATE))
    assert heard.handed_over == [["b1", "u1"], ["s1"]]
    assert [what for what, *_ in heard.said] == ["b1", "u1", "s1", "checkpointed", "finished"]


def test_an_update_that_was_not_kept_is_done_again_with_the_saves_behind_it(batches, heard, monkeypatch):
    call = Prompt.call

    def answer_until_kept(self: Prompt, now_s: float, method: str, *rest: Any) -> None:
        if method != "keep_update":
            call(self, now_s, method, *rest)

    monkeypatch.setattr(Prompt, "call", answer_until_kept)
    batches.train("u1", UPDATE)
    batches.train("s1", WriteWeights(path=Path("sampler-3.safetensors")))
    batches.begin(order(1, Stage.UPDATE))
    batches.park()
    monkeypatch.undo()
    batches.begin(order(2, Stage.UPDATE))
    assert heard.handed_over == [["u1", "s1"], ["u1", "s1"]]
    assert [what for what, *_ in heard.said].count("checkpointed") == 1


def test_an_order_takes_along_what_waits_of_another_adapter(tenants, heard):
    first, second = tenants
    for number, each in enumerate(tenants):
        each.sample(sampling(f"begin-{each.id}"), None)
        each.begin(order(number))
    for each in tenants:
        each.sample(sampling(f"r-{each.id}"), None)
    heard.said.clear()
    first.begin(order(2))
    assert heard.said == [
        ("r-a", None), ("r-b", None), ("shared_batch", {"a": 4, "b": 4}), ("finished", 2, CHUNK_S),
    ]  # fmt: skip
    heard.said.clear()
    second.begin(order(3))
    assert heard.said == [("finished", 3, 0.0)], "no order tells more seconds than it had"


def test_a_worker_leaves_its_device_with_the_last_state_that_it_serves(tenants, heard):
    first, second = tenants
    for number, each in enumerate(tenants):
        each.sample(sampling(f"begin-{each.id}"), None)
        each.begin(order(number))
    heard.said.clear()
    for each in tenants:
        each.offload(Phase.ROLLOUT)
    assert heard.said == [("offloaded",)]
    first.park()
    heard.said.clear()
    second.sample(sampling("r1"), None)
    second.begin(order(4))
    assert ("r1", None) in heard.said, "the other tenant goes on"


def test_a_tenant_that_stops_sharing_has_a_worker_of_its_own(tenants, heard):
    first, second = tenants
    second.stop_sharing()
    for number, each in enumerate(tenants):
        each.sample(sampling(f"begin-{each.id}"), None)
        each.begin(order(number))
        each.sample(sampling(f"r-{each.id}"), None)
    heard.said.clear()
    first.begin(order(2))
    assert [what for what, *_ in heard.said] == ["r-a", "finished"]


@pytest.fixture
def slow(heard: Heard) -> Slow:
    """The worker that pipelines get."""
    worker = Slow(heard)
    heard.spawn = lambda *args, **options: worker  # type: ignore[method-assign]
    return worker


def test_a_round_whose_order_was_ended_asks_nothing_of_an_offloaded_worker(tenants, heard, slow, tmp_path):
    first, second = tenants
    for number, each in enumerate(tenants):
        each.sample(sampling(f"begin-{each.id}"), None)
        each.begin(order(number))
        slow.answer_all()
    second.sample(sampling("later"), None)
    heard.said.clear()
    first.sample(sampling("r1"), tmp_path / "new.safetensors")
    first.begin(order(2))
    assert slow.asked == ["load_weights"]
    first.park()
    second.offload(Phase.ROLLOUT)
    slow.answer_all()
    assert [what for what, *_ in heard.said if what != "arrived"] == ["left the worker", "offloaded"]
    second.begin(order(3, switch=Switch.WARM))
    slow.answer_all()
    assert ("later", None) in heard.said


def test_a_worker_that_is_being_built_stays_for_a_second_pipeline_when_its_first_one_ends(tenants, heard, slow):
    first, second = tenants
    for number, each in enumerate(tenants):
        each.sample(sampling(f"r-{each.id}"), None)
        each.begin(order(number))
    first.park()
    assert not slow.is_killed
    slow.answer_all()
    assert ("r-b", None) in heard.said
    second.park()
    assert slow.is_killed


@pytest.fixture
def trained(tenants, heard) -> list[Batches]:
    """The two pipelines, each with its training state on the device."""
    for number, each in enumerate(tenants):
        each.train(f"begin-{each.id}", UPDATE)
        each.begin(order(number, Stage.UPDATE))
    heard.said.clear()
    return tenants


def test_losses_that_wait_are_computed_in_the_chunks_of_another_clients_order(trained, heard, monkeypatch):
    chunk = Prompt.run_chunk

    def together(self: Prompt, limits: RequestChunk) -> BatchReport:
        report = chunk(self, limits)
        return replace(report, tokens_by_tenant={"a": 4, "b": 12}, num_together=2, token_share=0.25)

    monkeypatch.setattr(Prompt, "run_chunk", together)
    first, second = trained
    first.train("a1", loss(is_forward_only=False))
    second.train("b1", loss(is_forward_only=False))
    second.train("b2", UPDATE)
    ended: list[StageFinished] = []
    monkeypatch.setattr(heard, "add", lambda event: ended.append(event) if isinstance(event, StageFinished) else None)
    heard.said.clear()
    first.begin(order(2, Stage.UPDATE))
    assert heard.said == [("b1", None), ("shared_batch", {"a": 4, "b": 12}), ("a1", None)]
    (share,) = ended[0].batches
    assert (share.num_together, share.held_s, share.charged_s) == (2, CHUNK_S, 0.25 * CHUNK_S)
    monkeypatch.setattr(Prompt, "run_chunk", chunk)
    heard.said.clear()
    second.begin(order(3, Stage.UPDATE))
    assert heard.said == [("b2", None), ("checkpointed", "b2")], "an update is left to an order of its own"
    (share,) = ended[1].batches
    assert (share.tokens, share.held_s, share.charged_s) == (4, 0.0, 0.25 * CHUNK_S)
    assert (ended[1].seconds, ended[1].tokens) == (CHUNK_S, 8), "those of the loss and of the update"


def test_losses_are_not_computed_beside_an_update_nor_for_a_state_that_left_the_device(trained, heard):
    first, second = trained
    second.train("b1", loss(is_forward_only=False))
    first.train("a1", UPDATE)
    first.begin(order(2, Stage.UPDATE))
    second.offload(Phase.TRAIN)
    first.train("a2", loss(is_forward_only=False))
    first.begin(order(3, Stage.UPDATE))
    assert "b1" not in [what for what, *_ in heard.said]
    second.begin(order(4, Stage.UPDATE, Switch.WARM))
    assert ("b1", None) in heard.said


def test_losses_that_rode_along_are_repeated_for_a_worker_that_is_lost(trained, heard):
    first, second = trained
    second.train("b1", loss(is_forward_only=False))
    first.train("a1", loss(is_forward_only=False))
    first.begin(order(2, Stage.UPDATE))
    second.forget(second.workers[0])
    heard.said.clear()
    second.train("b2", UPDATE)
    second.begin(order(3, Stage.UPDATE))
    assert [what for what, *_ in heard.said] == ["arrived", "b1", "b2", "checkpointed", "finished"]


def test_an_order_whose_losses_others_have_computed_ends_at_once(trained, heard):
    first, second = trained
    second.train("b1", loss(is_forward_only=False))
    first.train("a1", loss(is_forward_only=False))
    first.begin(order(2, Stage.UPDATE))
    heard.said.clear()
    second.begin(order(3, Stage.UPDATE))
    assert heard.said == [("finished", 3, 0.0)]


def test_results_of_losses_that_ride_along_outlive_the_order(trained, heard, monkeypatch):
    first, second = trained
    held: list[Callable[[], None]] = []
    call = Prompt.call

    def hold(self: Prompt, now_s: float, method: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        held.append(lambda: call(self, now_s, method, args, then))

    second.train("b1", loss(is_forward_only=False))
    first.train("a1", loss(is_forward_only=False))
    monkeypatch.setattr(Prompt, "call", hold)
    first.begin(order(2, Stage.UPDATE))
    held.pop(0)()  # its requests are handed over
    assert len(held) == 2, "a chunk of each"
    first.park()
    heard.said.clear()
    held[1]()
    assert heard.said == [("b1", None)]
    assert second.ride(CHUNK_S) is None, "nothing is left"

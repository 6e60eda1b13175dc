"""The object in a process of several tenants: each gets what a worker of its own gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from rlmux.core.errors import IllegalTransitionError
from rlmux.engines.train.joint_forward import JointForward
from rlmux.rl.client_requests import Datum, ForwardBackward, OptimizerStep, SaveState, TrainRequest, WriteWeights
from rlmux.rl.config import AdapterConfig
from rlmux.runtime.workers.planned_workers import EnvWorker, RolloutWorker
from rlmux.runtime.workers.request_workers import DatumWorker, RequestChunk, RequestResult
from rlmux.runtime.workers.tenant_hosts import DatumHost, RolloutHost
from rlmux.runtime.workers.tenant_process import TenantCall
from rlmux.runtime.workers.worker_calls import RolloutChunk, RolloutChunkResult

pytestmark = pytest.mark.usefixtures("one_thread")
ADAPTERS = {"a": AdapterConfig(rank=2, alpha=4.0), "b": AdapterConfig(rank=4, alpha=4.0, targets=("q_proj",))}


def config_of(real: Any, name: str) -> Any:
    config = real.submission(name, seed=ord(name)).config
    return replace(config, model=replace(config.model, seed=5), adapter=ADAPTERS[name])


def chunk_of(config: Any, **changes: Any) -> RolloutChunk:
    requests, _ = EnvWorker(config).begin_step(1)
    chunk = RolloutChunk(
        weights=None,
        requests=requests,
        partials=(),
        replies=(),
        released=(),
        max_decode_steps=1000,
        max_seconds=600.0,
        is_load_needed=False,
    )
    return replace(chunk, **changes)


def call_of(config: Any, method: str, *args: Any, log_path: Path = Path("/dev/null")) -> TenantCall:
    return TenantCall(tenant=config.name, method=method, args=args, joins=(config, None, None), log_path=log_path)


def sampled(result: RolloutChunkResult) -> list[Any]:
    return sorted(result.turns.unpack(), key=lambda turn: turn.id)


@pytest.fixture(scope="module")
def configs(real):
    return [config_of(real, name) for name in ADAPTERS]


def test_tenants_chunks_are_one_chunk_with_the_results_that_each_has_alone(configs):
    host = RolloutHost()
    for one in configs:
        (built,) = host.serve([], [call_of(one, "build")])
        assert 0 < built.value.state_bytes < built.value.free_bytes
    results = [one.value for one in host.serve([], [call_of(one, "run_chunk", chunk_of(one)) for one in configs])]
    alone = [RolloutWorker(one).run_chunk(chunk_of(one)) for one in configs]
    assert [sampled(one) for one in results] == [sampled(one) for one in alone]
    assert results[0].report.decode_steps == results[1].report.decode_steps
    assert [one.num_together for one in results] == [2, 2]
    assert sum(one.token_share for one in results) == pytest.approx(1.0)
    assert [one.report.sampled_tokens for one in results] == [one.report.sampled_tokens for one in alone]


def test_the_smallest_limits_hold_for_all(configs):
    host = RolloutHost()
    chunks = [chunk_of(configs[0], max_decode_steps=2), chunk_of(configs[1], max_decode_steps=5)]
    calls = [call_of(one, "run_chunk", chunk) for one, chunk in zip(configs, chunks, strict=True)]
    assert [one.value.report.decode_steps for one in host.serve([], calls)] == [2, 2]


def test_a_call_that_raises_fails_its_tenant_alone_and_is_in_its_pipelines_log(configs, tmp_path):
    host = RolloutHost()
    twice = chunk_of(configs[1])
    twice = replace(twice, requests=[*twice.requests, twice.requests[0]])
    log_path = tmp_path / "workers.log"
    good, bad = host.serve(
        [],
        [
            call_of(configs[0], "run_chunk", chunk_of(configs[0])),
            call_of(configs[1], "run_chunk", twice, log_path=log_path),
        ],
    )
    assert sampled(good.value) == sampled(RolloutWorker(configs[0]).run_chunk(chunk_of(configs[0])))
    assert isinstance(bad.error, IllegalTransitionError)
    assert "is already here" in log_path.read_text(encoding="utf-8")


def test_a_tenant_that_left_can_join_again(configs):
    host = RolloutHost()
    first = [call_of(one, "run_chunk", chunk_of(one, max_decode_steps=2)) for one in configs]
    host.serve([], first)
    again = [
        call_of(configs[0], "run_chunk", chunk_of(configs[0])),
        call_of(configs[1], "run_chunk", chunk_of(configs[1], requests=())),
    ]
    result = host.serve([configs[0].name], again)[0].value
    rest = host.serve([], [call_of(configs[0], "run_chunk", chunk_of(configs[0], requests=()))])[0].value
    alone = RolloutWorker(configs[0]).run_chunk(chunk_of(configs[0]))
    found = sorted(sampled(result) + sampled(rest), key=lambda turn: turn.id)
    assert found == sampled(alone)


def test_a_tenant_without_a_call_is_not_decoded_and_keeps_the_device(configs):
    host = RolloutHost()
    host.serve([], [call_of(one, "run_chunk", chunk_of(one, max_decode_steps=2)) for one in configs])
    rest = replace(chunk_of(configs[0]), requests=())
    host.serve([], [call_of(configs[0], "run_chunk", rest)])
    assert host.serve([], [call_of(configs[0], "offload")])[0].value > 0, "its adapter stays"
    result = host.serve([], [call_of(configs[1], "run_chunk", replace(chunk_of(configs[1]), requests=()))])[0].value
    begun = RolloutWorker(configs[1])
    first = begun.run_chunk(chunk_of(configs[1], max_decode_steps=2))
    then = begun.run_chunk(replace(chunk_of(configs[1]), requests=()))
    assert sampled(result) == sampled(then)
    assert len(sampled(first)) + len(sampled(then)) == len(chunk_of(configs[1]).requests)
    assert host.serve([], [call_of(configs[1], "offload")])[0].value == 0


def test_a_chunk_of_an_offloaded_tenant_is_refused_while_another_is_loaded(configs):
    host = RolloutHost()
    host.serve([], [call_of(one, "build") for one in configs])
    host.serve([], [call_of(configs[0], "offload")])
    results = host.serve([], [call_of(one, "run_chunk", chunk_of(one)) for one in configs])
    assert isinstance(results[0].error, IllegalTransitionError)
    assert results[1].error is None


STEP = OptimizerStep(learning_rate=1e-2, betas=(0.9, 0.95), epsilon=1e-12, weight_decay=0.0, grad_clip=0.0)


def loss(seed: int, count: int, *, weight: float = 1.0) -> ForwardBackward:
    """`count` datums of 10 to 15 tokens."""
    random, datums = Random(seed), []
    for _ in range(count):
        tokens = np.array([random.randrange(2, 40) for _ in range(random.randint(11, 16))])
        inputs = {"target_tokens": tokens[1:], "weights": np.full(len(tokens) - 1, weight, np.float32)}
        datums.append(Datum(tokens=tokens[:-1], inputs=inputs))
    return ForwardBackward(datums=datums, loss="cross_entropy", config={}, is_forward_only=False)


def client(seed: int, counts: tuple[int, ...], folder: Path) -> list[tuple[str, TrainRequest]]:
    """Two steps of so many losses each, and the weights and moments after them."""
    requests: list[TrainRequest] = []
    for step in range(2):
        requests += [loss(100 * seed + 10 * step + number, count) for number, count in enumerate(counts)]
        requests += [STEP]
    requests += [WriteWeights(path=folder / f"{seed}.safetensors"), SaveState(folder=folder / f"state-{seed}")]
    return [(str(number), request) for number, request in enumerate(requests)]


def values(answers: list[RequestResult]) -> dict[str, Any]:
    """By id; log-probs as lists."""
    found = {}
    for answer in answers:
        value = answer.value
        if hasattr(value, "logprobs"):
            value = (value.loss, value.num_tokens, [part.tolist() for part in value.logprobs])
        found[answer.id] = (value, answer.error)
    assert len(found) == len(answers)
    return found


def trained_alone(config: Any, requests: list[tuple[str, TrainRequest]]) -> dict[str, Any]:
    worker = DatumWorker(config, None)
    return values(worker.run_chunk(RequestChunk(max_seconds=600.0, requests=requests)).answers)


def datum_call(config: Any, method: str, *args: Any) -> TenantCall:
    return TenantCall(
        tenant=config.name, method=method, args=args, joins=(config, None, None), log_path=Path("/dev/null")
    )


class Clients:
    """Models in one host, and all answers to each."""

    def __init__(self, configs: list[Any]) -> None:
        self.host = DatumHost()
        self.configs = configs
        self.answers: dict[str, list[RequestResult]] = {config.name: [] for config in configs}
        self.num_together: list[int] = []
        self.shares: list[list[float]] = []

    def chunk(self, chunks: list[RequestChunk | None], *, left: list[str] = []) -> int:  # noqa: B006
        """A chunk of each; returns how much is left."""
        called = [(one, chunk) for one, chunk in zip(self.configs, chunks, strict=True) if chunk is not None]
        results = self.host.serve(left, [datum_call(one, "run_chunk", chunk) for one, chunk in called])
        reports = [result.value for result in results]
        for (one, _), report in zip(called, reports, strict=True):
            self.answers[one.name] += report.answers
        self.num_together.append(reports[0].num_together)
        self.shares.append([report.token_share for report in reports])
        assert len({tuple(report.tokens_by_tenant.items()) for report in reports}) == 1
        return sum(report.num_active + report.num_waiting for report in reports)

    def finish(self, max_seconds: float = 600.0) -> dict[str, dict[str, Any]]:
        while self.chunk([RequestChunk(max_seconds=max_seconds)] * len(self.configs)):
            pass
        return {name: values(answers) for name, answers in self.answers.items()}


@pytest.fixture
def joint_forwards(monkeypatch) -> list[int]:
    """Models of each joint forward."""
    calls, score = [], JointForward.score

    def counted(self: JointForward, rows: Any) -> Any:
        calls.append(len(rows))
        return score(self, rows)

    monkeypatch.setattr(JointForward, "score", counted)
    return calls


@pytest.mark.parametrize("max_seconds", [0.0, 600.0])
def test_clients_requests_of_one_call_have_the_losses_logprobs_and_weights_of_alone(
    configs, tmp_path, joint_forwards, max_seconds
):
    clients = Clients(configs)
    asked = [client(1, (9, 4), tmp_path), client(2, (5,), tmp_path)]
    clients.chunk([RequestChunk(max_seconds=max_seconds, requests=one) for one in asked])
    found = clients.finish(max_seconds)
    assert 2 in joint_forwards
    assert (clients.num_together[0], sum(clients.shares[0])) == (2, pytest.approx(1.0))
    weights = [(tmp_path / f"{seed}.safetensors").read_bytes() for seed in (1, 2)]
    for one, requests in zip(configs, asked, strict=True):
        assert found[one.name] == trained_alone(one, requests)
    assert weights == [(tmp_path / f"{seed}.safetensors").read_bytes() for seed in (1, 2)]


@pytest.mark.parametrize(
    "wrong", [replace(loss(5, 3), loss="no such loss"), loss(5, 3, weight=float("nan"))], ids=["bad", "nan"]
)
def test_a_request_that_fails_is_an_error_of_its_client_alone(configs, tmp_path, wrong):
    asked = [[("0", loss(7, 3)), ("1", wrong), ("2", STEP)], client(2, (5,), tmp_path)]
    clients = Clients(configs)
    clients.chunk([RequestChunk(max_seconds=600.0, requests=one) for one in asked])
    found = clients.finish()
    assert found == {one.name: trained_alone(one, requests) for one, requests in zip(configs, asked, strict=True)}
    assert "a forward_backward failed" in found[configs[0].name]["2"][1]


def test_a_client_that_leaves_in_the_middle_of_a_loss_leaves_the_other_its_bits(configs, tmp_path):
    asked = [client(1, (9,), tmp_path), client(2, (9,), tmp_path)]
    clients = Clients(configs)
    clients.chunk([RequestChunk(max_seconds=0.0, requests=one) for one in asked])
    assert clients.answers == {one.name: [] for one in configs}, "a loss of several micro-batches"
    again = client(3, (2,), tmp_path)
    chunks = [RequestChunk(max_seconds=600.0, requests=again), RequestChunk(max_seconds=600.0)]
    clients.chunk(chunks, left=[configs[0].name])
    found = clients.finish()
    assert found == {
        configs[0].name: trained_alone(configs[0], again),
        configs[1].name: trained_alone(configs[1], asked[1]),
    }


def test_a_client_that_is_offloaded_keeps_its_gradients_while_the_other_trains(configs, tmp_path):
    asked = [client(1, (9,), tmp_path), client(2, (9,), tmp_path)]
    clients = Clients(configs)
    clients.chunk([RequestChunk(max_seconds=0.0, requests=one) for one in asked])
    clients.host.serve([], [datum_call(configs[0], "offload")])
    while clients.chunk([None, RequestChunk(max_seconds=600.0)]):
        pass
    clients.host.serve([], [datum_call(configs[0], "load")])
    found = clients.finish()
    assert found == {one.name: trained_alone(one, requests) for one, requests in zip(configs, asked, strict=True)}

"""The object in a rollout process of several tenants: each gets what a worker of its own gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import IllegalTransitionError
from rlmux.rl.config import AdapterConfig
from rlmux.runtime.workers.planned_workers import EnvWorker, RolloutWorker
from rlmux.runtime.workers.tenant_hosts import RolloutHost
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

"""Several pipelines' rollouts in one engine: each tenant samples what an engine of its own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmux.core.errors import PipelineError
from rlmux.engines.adapters.lora import inject_adapter, trained_parameters
from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weights import SHA256, weights_sha256, write_tensors
from rlmux.engines.rollout.batch_probe import BatchProbe
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.rollout.tenants import SharedEngine, TenantEngine
from rlmux.rl.config import AdapterConfig, ModelConfig, RolloutConfig
from rlmux.rl.types import FinishedTurn, TrajectoryRequest, TurnReply

VOCAB_SIZE = 41
ADAPTERS = {
    "a": AdapterConfig(rank=4, alpha=8.0),
    "b": AdapterConfig(rank=1, alpha=3.0, targets=("q_proj", "v_proj")),
    "c": AdapterConfig(rank=16, alpha=16.0, targets=("k_proj", "o_proj", "down_proj", "lm_head")),
}
MANY = {"max_decode_steps": 10_000, "max_seconds": 600.0}


def write_adapter(path: Path, checkpoint: Path, adapter: AdapterConfig, seed: int, scale: float) -> Path:
    """A file of an adapter with random numbers."""
    model = build_model(ModelConfig(path=str(checkpoint)), VOCAB_SIZE, 0)
    inject_adapter(model, adapter, seed)
    generator = torch.Generator().manual_seed(seed)
    parameters = trained_parameters(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    write_tensors(path, parameters, {SHA256: weights_sha256(parameters)})
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / f"{name}.safetensors", checkpoint, adapter, seed, 0.2)
        for seed, (name, adapter) in enumerate(ADAPTERS.items())
    }


def new_engine(checkpoint: Path, name: str, num_slots: int, **more: Any) -> SlotRolloutEngine:
    rollout = RolloutConfig(num_slots=num_slots, max_new_tokens=40, max_prompt_tokens=24)
    model = ModelConfig(path=str(checkpoint))
    return SlotRolloutEngine(model, rollout, vocab_size=VOCAB_SIZE, seed=0, adapter=ADAPTERS[name], **more)


def join(shared: SharedEngine, files: dict[str, Path], name: str, *, is_single_turn: bool = True) -> TenantEngine:
    tenant = shared.join(name, ADAPTERS[name], staleness=0, is_single_turn=is_single_turn)
    tenant.load_weights(files[name], 1)
    return tenant


@pytest.fixture(scope="module")
def alone(checkpoint: Path, files: dict[str, Path]) -> Callable[..., dict[Any, FinishedTurn]]:
    def run(name: str, requests: Sequence[TrajectoryRequest], num_slots: int = 8) -> dict[Any, FinishedTurn]:
        engine = new_engine(checkpoint, name, num_slots)
        engine.load_weights(files[name], 1)
        engine.submit(requests)
        return {turn.id: turn for turn in engine.run_chunk(**MANY).finished}

    return run


def drain(shared: SharedEngine, names: Sequence[str], steps: int = 10_000) -> dict[str, dict[Any, FinishedTurn]]:
    """Run chunks of these tenants until all their trajectories are over."""
    finished: dict[str, dict[Any, FinishedTurn]] = {name: {} for name in names}
    while any(shared.engine.unfinished_of(name) for name in names):
        for name, report in shared.run(names, max_decode_steps=steps, max_seconds=600.0).items():
            assert not isinstance(report, PipelineError), report
            finished[name] |= {turn.id: turn for turn in report.finished}
    return finished


@pytest.mark.parametrize("num_slots", [4, 8, 16])
def test_tenants_in_one_batch_sample_what_each_samples_alone(checkpoint, files, alone, new_requests, num_slots):
    shared = SharedEngine(new_engine(checkpoint, "a", num_slots))
    requests = {name: new_requests(9 + number) for number, name in enumerate(ADAPTERS)}
    for name in ADAPTERS:
        join(shared, files, name).submit(requests[name])
    together = drain(shared, list(ADAPTERS), steps=7)
    assert shared.engine.num_slots in (num_slots, 2 * num_slots, 3 * num_slots)
    assert together == {name: alone(name, requests[name], num_slots) for name in ADAPTERS}


def test_where_no_wider_shape_is_exact_tenants_share_the_slots_of_one(
    checkpoint, files, alone, new_requests, monkeypatch
):
    monkeypatch.setattr(BatchProbe, "is_decode_exact", lambda self, width, window, capacity: width <= 8)
    monkeypatch.setattr("rlmux.engines.rollout.batch_probe.is_exact_by_shape", {})
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    requests = {name: new_requests(9 + number) for number, name in enumerate(("a", "b"))}
    for name in requests:
        join(shared, files, name).submit(requests[name])
    assert shared.engine.num_slots == 8
    assert drain(shared, ["a", "b"]) == {name: alone(name, requests[name]) for name in requests}


def test_slots_of_tenants_add_up_and_leave_with_them(checkpoint, files):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    counts = []
    for name in ADAPTERS:
        join(shared, files, name)
        counts.append(shared.engine.num_slots)
    for name in ADAPTERS:
        shared.leave(name)
        counts.append(shared.engine.num_slots)
    assert counts[:5] == [8, 16, 24, 16, 8]
    assert shared.engine.resident_bytes() == 0, "no tenant is left on the device"


def test_tenants_join_and_leave_while_others_decode(checkpoint, files, alone, new_requests):
    """One leaves with unfinished trajectories, and joins again with the same name."""
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    own, other = new_requests(9), new_requests(7)
    join(shared, files, "a").submit(own)
    finished = {turn.id: turn for turn in shared.run(["a"], max_decode_steps=5, max_seconds=600.0)["a"].finished}
    join(shared, files, "b").submit(other)
    finished |= {turn.id: turn for turn in shared.run(["a", "b"], max_decode_steps=5, max_seconds=600.0)["a"].finished}
    shared.leave("b")
    finished |= {turn.id: turn for turn in shared.run(["a"], max_decode_steps=5, max_seconds=600.0)["a"].finished}
    join(shared, files, "b").submit(other)
    rest = drain(shared, ["a", "b"], steps=3)
    assert finished | rest["a"] == alone("a", own)
    assert rest["b"] == alone("b", other)


def test_trajectories_of_a_tenant_without_a_chunk_do_not_advance(checkpoint, files, alone, new_requests):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    requests = new_requests(9, stop_tokens=())
    tenants = {name: join(shared, files, name) for name in ("a", "b")}
    finished: dict[str, dict[Any, FinishedTurn]] = {"a": {}, "b": {}}
    for tenant in tenants.values():
        tenant.submit(requests)
    shared.run(["a", "b"], max_decode_steps=1, max_seconds=600.0)
    for step in range(12):
        name = "ab"[step % 2]
        resting = "ba"[step % 2]
        before = {id: live.num_made for id, live in shared.engine._live.items() if id.adapter == resting}
        report = tenants[name].run_chunk(max_decode_steps=3, max_seconds=600.0)
        finished[name] |= {turn.id: turn for turn in report.finished}
        assert {id: live.num_made for id, live in shared.engine._live.items() if id.adapter == resting} == before
        assert report.num_active + report.num_waiting == tenants[name].num_unfinished
    rest = drain(shared, ["a", "b"])
    expected = {name: alone(name, requests) for name in "ab"}
    for name in "ab":
        missing = expected[name].keys() - (finished[name] | rest[name]).keys()
        assert all(expected[name][id] == turn for id, turn in (finished[name] | rest[name]).items())
        assert all(len(expected[name][id].tokens) == 1 for id in missing), "over in the first chunk"


def test_a_report_counts_its_tenant_alone(checkpoint, files, new_requests):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    requests = {"a": new_requests(3), "b": new_requests(8)}
    for name in requests:
        join(shared, files, name).submit(requests[name])
    reports = shared.run(["a", "b"], **MANY)
    for name, report in reports.items():
        finished = sum(len(turn.tokens) for turn in report.finished)
        assert report.sampled_tokens == finished + sum(report.progress.values())
        assert {turn.id for turn in report.finished} | report.progress.keys() == {one.id for one in requests[name]}
        assert sum(one.tokens for one in report.iterations) == report.sampled_tokens + report.prefill_tokens
    assert reports["a"].seconds <= reports["b"].seconds
    assert reports["a"].decode_steps == reports["b"].decode_steps
    assert not all(report.progress for report in reports.values()), "it ends when one has nothing left to decode"


def test_one_tenant_on_the_device_keeps_the_engine_there_with_its_own_slots(checkpoint, files, alone, new_requests):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    a, b = join(shared, files, "a"), join(shared, files, "b")
    own, other = new_requests(9), new_requests(7)
    a.submit(own)
    b.submit(other)
    first = shared.run(["a", "b"], max_decode_steps=4, max_seconds=600.0)
    b.offload()
    assert shared.engine.num_slots == 8
    assert 0 < b.resident_bytes() < a.resident_bytes()
    finished = drain(shared, ["a"])
    a.offload()
    assert a.resident_bytes() == b.resident_bytes() == 0
    b.load()
    assert shared.engine.num_slots == 8
    rest = drain(shared, ["b"])
    assert {turn.id: turn for turn in first["a"].finished} | finished["a"] == alone("a", own)
    assert {turn.id: turn for turn in first["b"].finished} | rest["b"] == alone("b", other)


def test_a_tenant_that_leaves_an_offloaded_engine_is_gone_when_it_is_loaded(checkpoint, files, alone, new_requests):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    a, b = join(shared, files, "a"), join(shared, files, "b")
    a.submit(requests := new_requests(5))
    b.submit(new_requests(4))
    a.offload()
    b.offload()
    shared.leave("b")
    a.load()
    assert shared.engine.num_slots == 8
    assert drain(shared, ["a"])["a"] == alone("a", requests)


def test_a_log_prob_that_is_not_finite_fails_its_tenant_alone(checkpoint, files, alone, new_requests, tmp_path):
    """Also where others get the slots that it had."""
    shared = SharedEngine(new_engine(checkpoint, "a", 4))
    a, b = join(shared, files, "a"), join(shared, files, "b")
    b.load_weights(write_adapter(tmp_path / "huge", checkpoint, ADAPTERS["b"], 7, 1e30), 2)
    a.submit(requests := new_requests(9))
    b.submit(new_requests(9, stop_tokens=()))
    finished, errors = {}, []
    while a.num_unfinished:
        reports = shared.run(["a", "b"], max_decode_steps=4, max_seconds=600.0)
        finished |= {turn.id: turn for turn in reports["a"].finished}
        errors += [reports["b"]] if isinstance(reports["b"], PipelineError) else []
    assert finished == alone("a", requests, 4)
    assert "not finite" in str(errors[0])


def test_an_adapter_that_is_not_finite_is_refused_before_it_changes_anything(
    checkpoint, files, alone, new_requests, tmp_path
):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    a, b = join(shared, files, "a"), join(shared, files, "b")
    with pytest.raises(PipelineError, match="not finite"):
        b.load_weights(write_adapter(tmp_path / "nan", checkpoint, ADAPTERS["b"], 7, float("nan")), 2)
    a.submit(requests := new_requests(5))
    b.submit(requests)
    assert drain(shared, ["a", "b"]) == {"a": alone("a", requests), "b": alone("b", requests)}


def test_endless_answers_and_cancelled_ones_of_a_tenant_change_no_bits_of_others(
    checkpoint, files, alone, new_requests
):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    a, b = join(shared, files, "a"), join(shared, files, "b")
    a.submit(requests := new_requests(9))
    endless = [replace(one, max_new_tokens=40) for one in new_requests(9, stop_tokens=())]
    b.submit(endless)
    finished: dict[Any, FinishedTurn] = {}
    for _ in range(3):
        reports = shared.run(["a", "b"], max_decode_steps=4, max_seconds=600.0)
        finished |= {turn.id: turn for turn in reports["a"].finished}
    b.take_partials([one.id for one in endless[:6]], with_kv=False)
    rest = drain(shared, ["a", "b"])
    assert finished | rest["a"] == alone("a", requests)
    expected = alone("b", endless)
    assert rest["b"] == {one.id: expected[one.id] for one in endless[6:]}


def test_a_tenant_of_several_turns_waits_for_replies_beside_one_of_single_turns(checkpoint, files, alone, new_requests):
    def answered(tenant: Any, run: Callable[[], Any]) -> list[FinishedTurn]:
        turns: list[FinishedTurn] = []
        for _ in range(200):
            report = run()
            turns += report.finished
            stopped = [one.id for one in report.finished if one.stop_reason == "stop"]
            tenant.reply([TurnReply(id=id, tokens=(7, 9)) for id in stopped], [])
            if not tenant.num_unfinished:
                return sorted(turns, key=lambda turn: (turn.id, turn.num_turns))
        raise AssertionError("not over")

    requests, other = new_requests(6), new_requests(9)
    own = new_engine(checkpoint, "a", 8, is_single_turn=False)
    own.load_weights(files["a"], 1)
    own.submit(requests)
    expected = answered(own, lambda: own.run_chunk(max_decode_steps=3, max_seconds=600.0))
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    a, b = join(shared, files, "a", is_single_turn=False), join(shared, files, "b")
    a.submit(requests)
    b.submit(other)
    of_b: dict[Any, FinishedTurn] = {}

    def run() -> Any:
        reports = shared.run(["a", "b"], max_decode_steps=3, max_seconds=600.0)
        of_b.update({turn.id: turn for turn in reports["b"].finished})
        return reports["a"]

    assert answered(a, run) == expected
    assert of_b | drain(shared, ["b"])["b"] == alone("b", other)


def test_a_probe_of_a_tenant_finds_what_it_finds_alone_and_leaves_others_as_they_are(
    checkpoint, files, alone, new_requests
):
    shared = SharedEngine(new_engine(checkpoint, "a", 8))
    a, b = join(shared, files, "a"), join(shared, files, "b")
    a.submit(requests := new_requests(9))
    first = shared.run(["a"], max_decode_steps=4, max_seconds=600.0)["a"]
    own = new_engine(checkpoint, "b", 8)
    own.load_weights(files["b"], 1)
    assert probe_rollout(b).checks == probe_rollout(own).checks
    rest = drain(shared, ["a"])
    assert {turn.id: turn for turn in first.finished} | rest["a"] == alone("a", requests)

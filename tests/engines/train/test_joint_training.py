"""Tenants that train together: bits of alone for any companions, errors of one tenant only, one base in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from rlmux.core.errors import IllegalTransitionError, PipelineError, UserError
from rlmux.core.model import Stage
from rlmux.engines.train.datum_train import DatumTrainEngine
from rlmux.engines.train.joint_forward import JointForward
from rlmux.engines.train.joint_training import JointTraining
from rlmux.engines.train.row_probe import RowProbe
from rlmux.engines.train.stage_work import TrainWork
from rlmux.engines.train.train_engine import RL_STAGES, TorchTrainEngine
from rlmux.rl.client_requests import Datum, ForwardBackward, OptimizerStep
from rlmux.rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    ModelConfig,
    RolloutConfig,
    SftWarmupConfig,
    TrainConfig,
    TrainingConfig,
)
from rlmux.rl.types import TrainingBatch, TrainReport, Trajectory, TrajectoryId

ADAPTERS = {
    "a": AdapterConfig(rank=4, alpha=8.0),
    "b": AdapterConfig(rank=2, alpha=3.0, targets=("q_proj", "v_proj", "lm_head")),
    "c": AdapterConfig(rank=9, alpha=9.0, targets=("k_proj", "o_proj", "down_proj")),
}
SIZES = {"a": (2, 4), "b": (3, 2), "c": (4, 3)}
"""Prompts of a step, and sequences of a micro-batch."""


def config(name: str = "a", *, train: TrainConfig | None = None, warmup: int = 0, **algorithm: Any) -> TrainingConfig:
    prompts, micro_batch_size = SIZES[name]
    fields = {"prompts_per_step": prompts, "group_size": 2, "micro_batch_size": micro_batch_size, **algorithm}
    return TrainingConfig(
        name=name,
        seed=ord(name),
        model=ModelConfig(seed=3),
        adapter=ADAPTERS[name],
        sft_warmup=SftWarmupConfig(num_updates=warmup, batch_size=5),
        algorithm=AlgorithmConfig(**{"learning_rate": 0.01 * ord(name) / 97, "max_mismatch_kl": 100.0, **fields}),
        rollout=RolloutConfig(max_new_tokens=48, temperature=0.8 if name == "a" else 1.0),
        train=train or TrainConfig(),
    )


def batch(given: TrainingConfig, step: int, **changes: Any) -> TrainingBatch:
    algorithm = given.algorithm
    trajectories = []
    for prompt in range(algorithm.prompts_per_step):
        for sample in range(algorithm.group_size):
            random = Random(f"{given.name}/{step}/{prompt}/{sample}")
            length = random.randint(30, 45)
            fields: dict[str, Any] = {
                "id": TrajectoryId(step, prompt, sample),
                "prompt_tokens": (5, 6, 7),
                "tokens": tuple(random.randrange(2, 90) for _ in range(length)),
                "is_sampled": (True,) * length,
                "logprobs": tuple(-5 * random.random() for _ in range(length)),
                "versions": (step - 1,) * length,
                "reward": random.random(),
                "stop_reason": "stop",
                "num_turns": 1,
            }
            trajectories.append(Trajectory(**{**fields, **changes}))
    advantages = [1.0 if each.id.sample else -1.0 for each in trajectories]
    return TrainingBatch(step=step, trajectories=trajectories, advantages=advantages)


def plan_of(given: TrainingConfig, num_steps: int) -> Iterator[tuple[int, Stage]]:
    """(step, stage) in order; step 0 is the warm-up."""
    if given.sft_warmup.num_updates:
        yield 0, Stage.SFT_WARMUP
    for step in range(1, num_steps + 1):
        yield from ((step, stage) for stage in RL_STAGES)


class Run:
    """One pipeline on its way through its steps."""

    def __init__(self, engine: TorchTrainEngine, given: TrainingConfig, num_steps: int) -> None:
        self.engine = engine
        self._config = given
        self._plan = plan_of(given, num_steps)
        self.stage: Stage | None = None
        self.metrics: list[Mapping[str, float]] = []
        self.next()

    def next(self) -> None:
        step, self.stage = next(self._plan, (0, None))
        if step and self.stage == RL_STAGES[0]:
            self.engine.begin_step(batch(self._config, step))

    def take(self, report: TrainReport | Exception) -> None:
        if isinstance(report, Exception):
            raise report
        if report.is_done:
            assert report.micro_batches_done == report.micro_batches_total
            self.metrics.append(report.metrics)
            self.next()

    def result(self) -> tuple[dict[str, torch.Tensor], str, str]:
        """Weights, moments and reference by file and name, their hash, and the metrics."""
        tensors = self.engine.snapshot().tensors
        flat = {f"{file} {name}": each for file, by_name in tensors.items() for name, each in by_name.items()}
        return flat, self.engine.weights_sha256(), repr(self.metrics)


def alone(given: TrainingConfig, num_steps: int = 2) -> Run:
    run = Run(TorchTrainEngine(given), given, num_steps)
    while run.stage is not None:
        run.take(run.engine.run_stage(run.stage, max_seconds=math.inf))
    return run


def advance(joint: JointTraining, runs: Mapping[str, Run], max_seconds: float = 0.0) -> None:
    """One call for all that have work left."""
    stages = {name: run.stage for name, run in runs.items() if run.stage is not None}
    for name, report in joint.run_stages(stages, max_seconds=max_seconds).items():
        runs[name].take(report)


def together(
    configs: Sequence[TrainingConfig], num_steps: Sequence[int], max_seconds: float = 0.0, **options: Any
) -> dict[str, Run]:
    joint = JointTraining(**options)
    runs = {
        given.name: Run(joint.add(given.name, given), given, count)
        for given, count in zip(configs, num_steps, strict=True)
    }
    while any(run.stage is not None for run in runs.values()):
        advance(joint, runs, max_seconds)
    return runs


def assert_equal(found: Run, expected: Run) -> None:
    (tensors, *others), (expected_tensors, *expected_others) = found.result(), expected.result()
    assert tensors.keys() == expected_tensors.keys()
    assert all(torch.equal(each, expected_tensors[name]) for name, each in tensors.items())
    assert others == expected_others


@pytest.fixture
def joint_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tenants of each joint forward."""
    calls = []
    score = JointForward.score

    def counted(self: JointForward, rows: Any) -> Any:
        calls.append(len(rows))
        return score(self, rows)

    monkeypatch.setattr(JointForward, "score", counted)
    return calls


@pytest.mark.parametrize("max_seconds", [0.0, math.inf])
@pytest.mark.parametrize("names", ["ab", "cba"])
def test_tenants_have_the_bits_of_alone(names: str, max_seconds: float, joint_calls: list[int]) -> None:
    configs = [config(name) for name in names]
    runs = together(configs, [2, 3, 1][: len(names)], max_seconds)
    assert 2 in joint_calls
    for given, num_steps in zip(configs, (2, 3, 1), strict=False):
        assert_equal(runs[given.name], alone(given, num_steps))


OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {"warmup": 2, "kl_coef": 0.1},
    "updates": {"num_minibatches": 2, "num_epochs": 2, "prompts_per_step": 4},
    "running sum": {"train": TrainConfig(equal_across_ranks=False)},
    "bfloat16": {"train": TrainConfig(dtype="bfloat16"), "warmup": 1},
    "checkpointing": {"train": TrainConfig(activation_checkpointing=True)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_kind_of_step_has_the_bits_of_alone(option: str, joint_calls: list[int]) -> None:
    configs = [config("a", **OPTIONS[option]), config("b", **OPTIONS[option]), config("c", warmup=3)]
    runs = together(configs, [1, 2, 1])
    assert joint_calls or option == "bfloat16", "rows may round differently in bfloat16: then in turns"
    for given, num_steps in zip(configs, (1, 2, 1), strict=True):
        assert_equal(runs[given.name], alone(given, num_steps))


def test_a_warm_up_trains_beside_rl(joint_calls: list[int]) -> None:
    configs = [
        replace(config("a", warmup=6), algorithm=replace(config("a").algorithm, micro_batch_size=5)),
        config("b"),
    ]
    runs = together(configs, [0, 2])
    assert 2 in joint_calls
    assert_equal(runs["a"], alone(configs[0], 0))
    assert_equal(runs["b"], alone(configs[1], 2))


def test_tenants_join_and_leave_in_the_middle_of_a_step() -> None:
    joint = JointTraining()
    given = config("a", micro_batch_size=1)
    runs = {"a": Run(joint.add("a", given), given, 2)}
    advance(joint, runs)
    runs["b"] = Run(joint.add("b", config("b")), config("b"), 1)
    for _ in range(3):
        advance(joint, runs)
    joint.remove("b")
    del runs["b"]
    runs["c"] = Run(joint.add("c", config("c")), config("c"), 1)
    while any(run.stage is not None for run in runs.values()):
        advance(joint, runs)
    assert_equal(runs["a"], alone(given, 2))
    assert_equal(runs["c"], alone(config("c"), 1))


def test_a_failed_probe_trains_in_turns_with_equal_weights(
    monkeypatch: pytest.MonkeyPatch, joint_calls: list[int]
) -> None:
    monkeypatch.setattr(RowProbe, "is_exact", lambda self, rows: False)
    runs = together([config("a"), config("b")], [1, 1])
    assert not joint_calls
    assert_equal(runs["a"], alone(config("a"), 1))
    assert_equal(runs["b"], alone(config("b"), 1))


def test_the_probe_rejects_numbers_of_rows_whose_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = JointTraining()
    joint.add("a", config("a"))
    linear = torch.nn.functional.linear

    def varies(inputs: torch.Tensor, *others: Any) -> torch.Tensor:
        return linear(inputs, *others) * (1 + 1e-6 * (inputs.shape[-2] in (48, 49)))

    monkeypatch.setattr(torch.nn.functional, "linear", varies)
    monkeypatch.setattr("rlmux.engines.train.row_probe.is_exact_by_rows", {})
    probe = joint._tenants["a"].joint.probe  # type: ignore[union-attr]
    found = {rows: probe.is_exact(rows) for rows in (47, 48, 49, 64, 128)}
    assert found == {47: True, 48: False, 49: False, 64: True, 128: True}
    assert joint.is_exact_by_rows == {"a": found}


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "loss", "gradient"])
def test_what_is_not_finite_ends_one_tenant_and_leaves_the_others_bits(where: str, joint_calls: list[int]) -> None:
    joint = JointTraining()
    configs = [config(name) for name in "abc"]
    engines = {given.name: joint.add(given.name, given) for given in configs}
    for given in configs:
        engines[given.name].begin_step(batch(given, 1))
    if where == "forward":
        broken = next(each for name, each in engines["b"].model.named_parameters() if "lora_B" in name)
        broken.data.fill_(math.nan)
    elif where == "loss":
        nan = TrainingBatch(step=1, trajectories=batch(configs[1], 1).trajectories, advantages=[math.nan] * 6)
        engines["b"].begin_step(nan)
    else:
        _break_gradient(engines["b"])
    stages = {"a": Stage.UPDATE, "b": Stage.UPDATE, "c": Stage.UPDATE}
    results = joint.run_stages(stages, max_seconds=math.inf)
    assert 3 in joint_calls, "tenant b fails within a joint forward"
    assert isinstance(results["b"], PipelineError)
    assert str(results["b"]).startswith("pipeline b step 1 stage update: ")
    for given in (configs[0], configs[2]):
        assert engines[given.name].weights_sha256() == alone(given, 1).engine.weights_sha256()
    assert engines["b"].version == 0


def _break_gradient(engine: TorchTrainEngine) -> None:
    def not_finite(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf

    next(each for name, each in engine.model.named_parameters() if "lora_B" in name).register_hook(not_finite)


def test_a_stage_that_is_not_next_is_an_error_of_its_tenant() -> None:
    joint = JointTraining()
    for name in "ab":
        joint.add(name, config(name)).begin_step(batch(config(name), 1))
    joint.add("c", config("c"))
    stages = {"a": Stage.GENERATE, "b": Stage.UPDATE, "c": Stage.UPDATE}
    results = joint.run_stages(stages, max_seconds=math.inf)
    assert isinstance(results["a"], IllegalTransitionError)
    assert isinstance(results["b"], TrainReport)
    assert isinstance(results["c"], IllegalTransitionError)


@pytest.mark.parametrize("place", ["score", "backward"])
def test_tenants_whose_memory_is_too_small_together_compute_in_turns(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joint forward, or its backward, fails; so does tenant b alone."""
    joint = JointTraining()
    engines = {name: joint.add(name, config(name)) for name in "ab"}
    for name, engine in engines.items():
        engine.begin_step(batch(config(name), 1))
    backward = torch.autograd.backward

    def too_large(*args: Any, **kwargs: Any) -> Any:
        if place == "score" or (isinstance(args[0], tuple) and len(args[0]) > 1):
            raise torch.OutOfMemoryError("out of memory")
        return backward(*args, **kwargs)

    if place == "score":
        monkeypatch.setattr(JointForward, "score", too_large)
        monkeypatch.setattr(engines["b"].state, "score", too_large)
    else:
        monkeypatch.setattr(torch.autograd, "backward", too_large)
    results = joint.run_stages({"a": Stage.UPDATE, "b": Stage.UPDATE}, max_seconds=math.inf)
    monkeypatch.undo()
    assert engines["a"].weights_sha256() == alone(config("a"), 1).engine.weights_sha256()
    if place == "score":
        assert isinstance(results["b"], PipelineError)
        assert "out of device memory" in str(results["b"])
    else:
        assert engines["b"].weights_sha256() == alone(config("b"), 1).engine.weights_sha256()


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        (replace(config(), adapter=None), "adapter"),
        (config(train=TrainConfig(num_workers=2)), "train.workers: 1"),
        (config(), "another name"),
    ],
)
def test_what_cannot_be_a_tenant_is_refused(given: TrainingConfig, accepted: str) -> None:
    joint = JointTraining()
    joint.add("there", config())
    with pytest.raises(UserError, match=f"accepted: .*{accepted}"):
        joint.add("there" if accepted == "another name" else "new", given)


# --- the base ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mapped", [True, False])
def test_tenants_and_the_joint_model_have_one_base(tmp_path: Path, is_mapped: bool) -> None:
    joint = JointTraining(bases=tmp_path if is_mapped else None)
    engines = [joint.add(name, config(name)) for name in "ab"]
    engines.append(joint.add("c", config("c", train=TrainConfig(activation_checkpointing=True))))
    models = [*(engine.model for engine in engines), *(one.joint._model for one in joint._tenants.values())]  # type: ignore[union-attr]
    frozen = [{each.data_ptr() for each in model.parameters() if not each.requires_grad} for model in models]
    assert all(each == frozen[0] for each in frozen)
    other = joint.add("d", replace(config("a"), model=ModelConfig(seed=4)))
    assert frozen[0].isdisjoint(each.data_ptr() for each in other.model.parameters())


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_shared_base_has_the_bits_of_ones_own(tmp_path: Path, is_mapped: bool) -> None:
    runs = together([config("a"), config("b")], [1, 1], bases=tmp_path if is_mapped else None)
    assert_equal(runs["a"], alone(config("a"), 1))


@pytest.mark.parametrize("spills", [True, False])
def test_the_base_leaves_with_the_last_tenant_and_comes_back_with_the_first(tmp_path: Path, spills: bool) -> None:
    joint = JointTraining()
    given = config("a", micro_batch_size=1)
    runs = {"a": Run(joint.add("a", given), given, 1), "b": Run(joint.add("b", config("b")), config("b"), 1)}
    base = joint._tenants["a"].base
    num_bytes = base.resident_bytes()
    advance(joint, runs)
    for name, left in (("a", num_bytes), ("b", 0)):
        runs[name].engine.offload(spill_to=tmp_path / name if spills else None)
        assert base.resident_bytes() == left
        assert runs[name].engine.resident_bytes() == 0
    results = joint.run_stages({"a": Stage.UPDATE}, max_seconds=0.0)
    assert isinstance(results["a"], IllegalTransitionError)
    for name in "ba":
        runs[name].engine.load()
        assert base.resident_bytes() == num_bytes
    while any(run.stage is not None for run in runs.values()):
        advance(joint, runs)
    assert_equal(runs["a"], alone(given, 1))
    assert_equal(runs["b"], alone(config("b"), 1))


# --- reports and requests ---------------------------------------------------------------------------------------


def test_a_report_has_the_tenants_own_tokens_and_its_part_of_the_time() -> None:
    joint = JointTraining()
    for name in "ab":
        joint.add(name, config(name)).begin_step(batch(config(name), 1))
    reports = joint.run_stages({"a": Stage.UPDATE, "b": Stage.UPDATE}, max_seconds=0.0)
    first, second = (each for each in reports.values() if isinstance(each, TrainReport))
    assert first.micro_batches_done == second.micro_batches_done == 1
    assert first.tokens == sum(len(each.tokens) + 3 for each in batch(config("a"), 1).trajectories)
    assert first.seconds / second.seconds == pytest.approx(first.tokens / second.tokens)


def datums(seed: int, count: int) -> list[Datum]:
    random = Random(seed)
    made = []
    for _ in range(count):
        tokens = torch.tensor([random.randrange(2, 90) for _ in range(random.randint(20, 40))])
        weights = torch.ones(len(tokens) - 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:].numpy(), "weights": weights.numpy()}
        made.append(Datum(tokens=tokens[:-1].numpy(), inputs=inputs))
    return made


def request(seed: int, count: int, *, is_forward_only: bool = False) -> ForwardBackward:
    return ForwardBackward(datums=datums(seed, count), loss="cross_entropy", config={}, is_forward_only=is_forward_only)


def run_requests(joint: JointTraining, works: Mapping[str, TrainWork]) -> None:
    """All rounds of these works."""
    while left := {name: work for name, work in works.items() if work.has_score()}:
        joint.run_round(left)


def test_requests_of_several_clients_have_the_bits_of_alone(joint_calls: list[int]) -> None:
    step = OptimizerStep(learning_rate=1e-2, betas=(0.9, 0.95), epsilon=1e-12, weight_decay=0.0, grad_clip=0.0)
    joint = JointTraining()
    engines = {name: joint.add_model(name, config(name)) for name in "abc"}
    asked = {"a": request(1, 9), "b": request(2, 4), "c": request(3, 5, is_forward_only=True)}
    works = {name: engines[name].forward_backward(one) for name, one in asked.items()}
    run_requests(joint, works)
    assert 2 in joint_calls
    for name in "abc":
        own = DatumTrainEngine(config(name))
        work = own.forward_backward(asked[name])
        while work.has_score():
            work.run_alone(own.state.answer)
        found, done = works[name].result, work.result
        assert (found.loss, found.num_tokens) == (done.loss, done.num_tokens)
        assert all((one == other).all() for one, other in zip(found.logprobs, done.logprobs, strict=True))
        if name != "c":
            assert engines[name].optimizer_step(step) == own.optimizer_step(step)
            assert engines[name].state.weights_sha256() == own.state.weights_sha256()


def test_a_request_that_cannot_be_trained_on_is_an_error_of_its_client() -> None:
    joint = JointTraining()
    engines = {name: joint.add_model(name, config(name)) for name in "ab"}
    asked = {"a": replace(request(1, 2), loss="no such loss"), "b": request(2, 4)}
    works = {name: engines[name].forward_backward(one) for name, one in asked.items()}
    run_requests(joint, works)
    assert isinstance(works["a"].error, UserError)
    assert works["b"].error is None

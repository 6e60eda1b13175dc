import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmux.core.errors import CheckpointError, IllegalTransitionError, PipelineError
from rlmux.core.model import Stage
from rlmux.engines.model.model_io import build_model
from rlmux.engines.model.weights import read_tensors
from rlmux.engines.train.state import checkpoint
from rlmux.engines.train.train_engine import RL_STAGES, TorchTrainEngine
from rlmux.rl.config import AlgorithmConfig, RolloutConfig, SftWarmupConfig, TaskConfig, TrainConfig, TrainingConfig
from rlmux.rl.types import TrainingBatch, Trajectory, TrajectoryId
from rlmux.rl.vocabulary import CharVocabulary


def config(sft_warmup: int = 0, task: str = "sort", **algorithm: Any) -> TrainingConfig:
    fields = {"prompts_per_step": 3, "group_size": 2, "micro_batch_size": 2, **algorithm}
    return TrainingConfig(
        name="p",
        task=TaskConfig(name=task),
        algorithm=AlgorithmConfig(**fields),
        rollout=RolloutConfig(max_new_tokens=24, temperature=0.8),
        sft_warmup=SftWarmupConfig(num_updates=sft_warmup, batch_size=5),
    )


def trajectory(step: int, prompt: int, sample: int, **changes: Any) -> Trajectory:
    random = Random(f"{step}/{prompt}/{sample}")
    tokens = tuple(random.randrange(2, 90) for _ in range(random.randint(3, 20)))
    fields: dict[str, Any] = {
        "id": TrajectoryId(step, prompt, sample),
        "prompt_tokens": tuple(random.randrange(2, 90) for _ in range(random.randint(1, 9))),
        "tokens": tokens,
        "is_sampled": (True,) * len(tokens),
        "logprobs": tuple(-5 * random.random() for _ in tokens),
        "versions": (step - 1,) * len(tokens),
        "reward": random.random(),
        "stop_reason": "stop",
        "num_turns": 1,
    }
    return Trajectory(**{**fields, **changes})


def batch(step: int, **changes: Any) -> TrainingBatch:
    trajectories = [trajectory(step, prompt, sample, **changes) for prompt in range(3) for sample in range(2)]
    advantages = [1.0 if each.id.sample else -1.0 for each in trajectories]
    return TrainingBatch(step=step, trajectories=trajectories, advantages=advantages)


def run_stage(engine: TorchTrainEngine, stage: Stage, max_seconds: float = math.inf) -> dict[str, float]:
    while not (report := engine.run_stage(stage, max_seconds=max_seconds)).is_done:
        pass
    assert report.micro_batches_done == report.micro_batches_total
    return dict(report.metrics)


def run_step(
    engine: TorchTrainEngine, training_batch: TrainingBatch, max_seconds: float = math.inf
) -> dict[str, float]:
    engine.begin_step(training_batch)
    return [run_stage(engine, stage, max_seconds) for stage in RL_STAGES][-1]


def run(training_config: TrainingConfig, num_steps: int, max_seconds: float = math.inf) -> str:
    engine = TorchTrainEngine(training_config)
    run_stage(engine, Stage.SFT_WARMUP, max_seconds)
    for step in range(1, num_steps + 1):
        run_step(engine, batch(step), max_seconds)
    return engine.weights_sha256()


def model_of(engine: TorchTrainEngine, folder: Path) -> Any:
    """A Hugging Face model with the engine's present weights."""
    model = build_model(config().model, CharVocabulary.vocab_size, 0)
    engine.export_weights(folder / "present.safetensors")
    tensors, _ = read_tensors(folder / "present.safetensors")
    model.load_state_dict(tensors, strict=False)  # a tied head is written once
    return model


def token_logprobs(model: Any, each: Trajectory) -> torch.Tensor:
    """Log-probability [tokens] of each response token, by a plain forward at the config's temperature."""
    tokens = torch.tensor([*each.prompt_tokens, *each.tokens])
    logits = model(tokens[None]).logits[0, len(each.prompt_tokens) - 1 : -1] / config().rollout.temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(each.tokens)), torch.tensor(each.tokens)]


@pytest.mark.parametrize("is_tree", [True, False])
def test_weights_do_not_depend_on_how_stages_are_cut(is_tree: bool) -> None:
    training_config = replace(config(sft_warmup=3, kl_coef=0.1), train=TrainConfig(equal_across_ranks=is_tree))
    whole = run(training_config, 2)
    assert run(training_config, 2, max_seconds=0) == whole
    assert run(replace(training_config, seed=1), 2) != whole


def test_a_call_without_time_does_one_micro_batch() -> None:
    engine = TorchTrainEngine(config())
    engine.begin_step(batch(1))
    reports = [engine.run_stage(Stage.UPDATE, max_seconds=0) for _ in range(3)]
    assert [(each.micro_batches_done, each.micro_batches_total, each.is_done) for each in reports] == [
        (1, 3, False),
        (2, 3, False),
        (3, 3, True),
    ]
    assert sum(each.tokens for each in reports) == sum(
        len(each.prompt_tokens) + len(each.tokens) for each in batch(1).trajectories
    )


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo"])
def test_micro_batches_add_up_to_the_whole_batch(name: str) -> None:
    engines = [TorchTrainEngine(config(name=name, micro_batch_size=size)) for size in (1, 6)]
    small, whole = (run_step(engine, batch(1)) for engine in engines)
    assert small["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert small["loss"] == pytest.approx(whole["loss"], abs=1e-5)


def test_the_gradient_is_that_of_the_written_formula() -> None:
    """GRPO on-policy, against a plain masked forward of the padded batch."""
    training_config = config(grad_clip=1e9)
    model: Any = build_model(training_config.model, CharVocabulary.vocab_size, 0)
    total = torch.zeros(())
    for each, advantage in zip(batch(1).trajectories, batch(1).advantages, strict=True):
        total = total - advantage * token_logprobs(model, each).mean() / 6
    total.backward()
    expected = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    assert run_step(TorchTrainEngine(training_config), batch(1))["grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_the_optimizer_is_torchs_adamw() -> None:
    from rlmux.engines.train.update.adamw import AdamW, AdamWNumbers

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(50, generator=generator)
    theirs = torch.nn.Parameter(weights.clone())
    ours, numbers = AdamW(weights), AdamWNumbers(betas=(0.9, 0.95), epsilon=1e-12, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for _ in range(5):
        theirs.grad = torch.randn(50, generator=generator)
        ours.update(weights, theirs.grad, 0.01, numbers)
        reference.step()
    torch.testing.assert_close(weights, theirs.detach())


def test_the_environments_tokens_carry_no_loss() -> None:
    def losses(told: int) -> float:
        changed = batch(1)
        first = changed.trajectories[0]
        mask = (*(True,) * (len(first.tokens) - 1), False)
        heard = replace(first, tokens=(*first.tokens[:-1], told), is_sampled=mask)
        both = TrainingBatch(step=1, trajectories=[heard, *changed.trajectories[1:]], advantages=changed.advantages)
        return run_step(TorchTrainEngine(config()), both)["grad_norm"]

    assert losses(5) == losses(60)


def test_rl_raises_the_rewarded_and_lowers_the_others(tmp_path: Path) -> None:
    engine = TorchTrainEngine(config(learning_rate=1e-3))

    def mean_logprob(trajectories: Sequence[Trajectory]) -> float:
        model = model_of(engine, tmp_path)
        return torch.cat([token_logprobs(model, each) for each in trajectories]).mean().item()

    fixed = replace(batch(1), advantages=[1.0, 1.0, -1.0, -1.0, 0.0, 0.0])
    rewarded, punished = fixed.trajectories[:2], fixed.trajectories[2:4]
    before = mean_logprob(rewarded), mean_logprob(punished)
    run_step(engine, fixed)
    assert mean_logprob(rewarded) > before[0]
    assert mean_logprob(punished) < before[1]


def test_a_stale_token_is_corrected_towards_its_sampler() -> None:
    on_policy = TorchTrainEngine(config(staleness=1))
    run_step(on_policy, batch(1))
    metrics = run_step(on_policy, batch(2))
    assert (metrics["clip_fraction"], metrics["stale_token_share"]) == (0, 0)
    stale = TorchTrainEngine(config(staleness=1))
    run_step(stale, batch(1))
    made_before = [
        replace(each, versions=(0,) * len(each.tokens), logprobs=(-30.0,) * len(each.tokens))
        for each in batch(2).trajectories
    ]
    metrics = run_step(stale, replace(batch(2), trajectories=made_before))
    # Every ratio is far above 1 + clip: tokens with a positive advantage drop out.
    positive = sum(len(each.tokens) for each in made_before if each.id.sample) / sum(
        len(each.tokens) for each in made_before
    )
    assert metrics["clip_fraction"] == pytest.approx(positive)
    assert metrics["stale_token_share"] == pytest.approx(1)
    assert math.isnan(metrics["logprob_gap"]), "no token of the step was made by the version being trained"


def stale_batch(step: int, shift: float) -> TrainingBatch:
    """A batch whose tokens the version before sampled, each `shift` nats likelier than the batch's own says."""
    given = batch(step)
    made_before = [
        replace(
            trajectory,
            versions=(step - 2,) * len(trajectory.tokens),
            logprobs=tuple(logprob + shift for logprob in trajectory.logprobs),
        )
        for trajectory in given.trajectories
    ]
    return replace(given, trajectories=made_before)


def test_the_decoupled_objective_clips_around_the_weights_that_the_step_begins_with() -> None:
    """Where the sampler's policy is far away, the naive clip takes every rewarded token out; this one takes none."""
    engine = TorchTrainEngine(config(staleness=1, objective="decoupled"))
    run_step(engine, batch(1))
    metrics = run_step(engine, stale_batch(2, 0.0))
    assert (metrics["clip_fraction"], metrics["num_dropped_tokens"]) == (0, 0)
    assert metrics["behavior_ratio"] > 0


def test_a_stale_token_above_the_cap_teaches_nothing_and_is_counted() -> None:
    engine = TorchTrainEngine(config(staleness=1, objective="decoupled"))
    run_step(engine, batch(1))
    given = stale_batch(2, -30.0)
    metrics = run_step(engine, given)
    assert metrics["num_dropped_tokens"] == sum(len(each.tokens) for each in given.trajectories)
    assert (metrics["behavior_ratio"], metrics["grad_norm"]) == (0, 0)


def test_the_decoupled_objective_weighs_a_stale_token_by_how_much_likelier_it_has_become() -> None:
    """With one update its gradient is that of `ppo` without a clip: the ratio to the sampler, times the advantage."""
    grad_norms = []
    for objective in ({"objective": "decoupled", "max_behavior_ratio": 1e9}, {"clip_low": 1.0, "clip_high": 1e9}):
        engine = TorchTrainEngine(config(staleness=1, **objective))
        run_step(engine, batch(1))
        grad_norms.append(run_step(engine, stale_batch(2, 0.5))["grad_norm"])
    assert grad_norms[0] == pytest.approx(grad_norms[1], rel=1e-4)


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_without_stale_tokens_both_objectives_give_the_same_bits(num_epochs: int) -> None:
    hashes = set()
    for objective in ("ppo", "decoupled"):
        engine = TorchTrainEngine(config(staleness=1, objective=objective, num_epochs=num_epochs))
        metrics = [run_step(engine, batch(step)) for step in (1, 2)][-1]
        assert math.isnan(metrics["behavior_ratio"])
        hashes.add(engine.weights_sha256())
    assert len(hashes) == 1


def test_a_stale_outlier_is_clamped_and_counted_and_does_not_end_the_pipeline() -> None:
    engine = TorchTrainEngine(config(staleness=1))
    run_step(engine, batch(1))
    trajectories = [replace(each, versions=(0,) * len(each.tokens)) for each in batch(2).trajectories]
    outlier = trajectories[0]
    trajectories[0] = replace(outlier, logprobs=(-200.0, *outlier.logprobs[1:]))
    metrics = run_step(engine, replace(batch(2), trajectories=trajectories, advantages=[-1.0] * len(trajectories)))
    assert metrics["num_clamped_ratios"] == 1
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])
    assert engine.version == 2


@pytest.mark.parametrize("of_file", [None, 1e-3])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_gap_above_the_bound_fails_the_pipeline_before_any_update(of_file: float | None, num_epochs: int) -> None:
    engine = TorchTrainEngine(config(max_logprob_gap=of_file, num_epochs=num_epochs))
    before = engine.weights_sha256()
    engine.begin_step(batch(1), max_logprob_gap=1e-3 if of_file is None else math.inf)
    with pytest.raises(PipelineError, match=r"p step 1 stage .*: logprob_gap is \d.*, accepted: up to 0\.001 \(algor"):
        [run_stage(engine, stage) for stage in RL_STAGES]
    assert engine.weights_sha256() == before


def test_the_files_bound_goes_before_that_of_the_promise() -> None:
    engine = TorchTrainEngine(config(max_logprob_gap=1e3))
    engine.begin_step(batch(1), max_logprob_gap=1e-3)
    metrics = [run_stage(engine, stage) for stage in RL_STAGES][-1]
    assert 1e-3 < metrics["logprob_gap"] < 1e3


def test_a_log_probability_that_is_not_a_number_fails_the_pipeline() -> None:
    engine = TorchTrainEngine(config())
    trajectories = batch(1).trajectories
    broken = replace(trajectories[1], logprobs=(math.nan, *trajectories[1].logprobs[1:]))
    with pytest.raises(PipelineError, match=r"pipeline p step 1 stage .*not a number"):
        run_step(engine, replace(batch(1), trajectories=[trajectories[0], broken, *trajectories[2:]]))
    assert engine.version == 0


@pytest.mark.parametrize(("staleness", "version"), [(0, 0), (0, 2), (1, 2), (1, -1)])
def test_a_token_beyond_the_staleness_bound_is_named(staleness: int, version: int) -> None:
    engine = TorchTrainEngine(config(staleness=staleness))
    run_step(engine, batch(1))
    wrong = batch(2)
    fourth = wrong.trajectories[3]
    broken = replace(fourth, versions=(*fourth.versions[:-1], version))
    trajectories = [*wrong.trajectories[:3], broken, *wrong.trajectories[4:]]
    with pytest.raises(PipelineError, match=rf"prompt=1, sample=1.*\) has a token of weight version {version}"):
        engine.begin_step(replace(wrong, trajectories=trajectories))


def test_stages_out_of_order_are_refused() -> None:
    engine = TorchTrainEngine(config(kl_coef=0.1))
    with pytest.raises(IllegalTransitionError):
        engine.run_stage(Stage.OLD_LOGPROBS, max_seconds=1)
    with pytest.raises(IllegalTransitionError, match="step 2 was to begin at version 0"):
        engine.begin_step(batch(2))
    engine.begin_step(batch(1))
    with pytest.raises(IllegalTransitionError, match="reference_logprobs is not done"):
        engine.run_stage(Stage.UPDATE, max_seconds=1)
    with pytest.raises(IllegalTransitionError, match="0 of 2 SFT warm-up updates"):
        TorchTrainEngine(config(sft_warmup=2)).begin_step(batch(1))


def test_without_a_kl_penalty_the_reference_stage_is_skipped() -> None:
    engine = TorchTrainEngine(config())
    engine.begin_step(batch(1))
    report = engine.run_stage(Stage.REFERENCE_LOGPROBS, max_seconds=0)
    assert (report.is_done, report.micro_batches_total) == (True, 0)


def test_the_reference_is_what_the_sft_warmup_left() -> None:
    engine = TorchTrainEngine(config(sft_warmup=2, kl_coef=0.5))
    run_stage(engine, Stage.SFT_WARMUP)
    assert run_step(engine, batch(1))["kl"] == 0
    assert run_step(engine, batch(2))["kl"] > 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights(poison: float) -> None:
    engine = TorchTrainEngine(config())
    before = engine.weights_sha256()
    with pytest.raises(PipelineError, match=r"step 1 stage update: the loss is .*weights are left"):
        run_step(engine, replace(batch(1), advantages=[0.0, 0.0, 0.0, 0.0, 0.0, poison]))
    assert engine.weights_sha256() == before
    assert engine.version == 0


def test_a_gradient_that_is_not_finite_leaves_the_weights() -> None:
    engine = TorchTrainEngine(config())
    before = engine.weights_sha256()
    with pytest.raises(PipelineError, match=r"the gradient norm is (inf|nan)"):
        run_step(engine, replace(batch(1), advantages=[3e38, -3e38] * 3))
    assert engine.weights_sha256() == before


def test_learning_rates_warm_up() -> None:
    engine = TorchTrainEngine(config(lr_warmup_steps=3, learning_rate=4.0))
    rates = [run_step(engine, batch(1))["learning_rate"]]
    engine = TorchTrainEngine(config(lr_warmup_steps=3, learning_rate=4e-4))
    rates = [run_step(engine, batch(step))["learning_rate"] for step in range(1, 6)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4])


@pytest.mark.parametrize("versions", [(1, 1, 1, 1, 1), (0, 0, 0, 1, 1)])
def test_one_update_gives_the_same_weights_without_old_log_probs_of_its_own(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[int, ...]
) -> None:
    """A quarter of training time: one update reads the same log-probs from its own forward, stale tokens or not."""
    tokens: dict[str, Any] = {"tokens": (3, 4, 5, 6, 7), "is_sampled": (True,) * 5, "logprobs": (-4.2,) * 5}

    def train() -> tuple[str, int, dict[str, float]]:
        engine = TorchTrainEngine(config(staleness=1, kl_coef=0.1))
        run_step(engine, batch(1))
        engine.begin_step(batch(2, versions=versions, **tokens))
        run_stage(engine, Stage.REFERENCE_LOGPROBS)
        num_computed = engine.run_stage(Stage.OLD_LOGPROBS, max_seconds=math.inf).micro_batches_total
        metrics = run_stage(engine, Stage.UPDATE)
        return engine.weights_sha256(), num_computed, metrics

    without, num_computed, metrics = train()
    assert num_computed == 0
    monkeypatch.setattr(AlgorithmConfig, "needs_old_logprobs", True)
    assert train() == (without, 3, metrics)


def test_an_update_needs_no_stage_before_it_where_it_is_the_only_one() -> None:
    engine = TorchTrainEngine(config())
    engine.begin_step(batch(1))
    metrics = run_stage(engine, Stage.UPDATE)
    assert engine.version == 1
    assert metrics["clip_fraction"] == 0
    assert metrics["entropy"] > 0


@pytest.mark.parametrize("algorithm", [{"num_epochs": 2}, {"num_minibatches": 3}])
def test_several_updates_need_the_log_probs_that_the_step_begins_with(algorithm: dict[str, int]) -> None:
    engine = TorchTrainEngine(config(**algorithm))
    engine.begin_step(batch(1))
    with pytest.raises(IllegalTransitionError, match="old_logprobs is not done"):
        engine.run_stage(Stage.UPDATE, max_seconds=1)


def test_epochs_and_minibatches_are_the_updates_of_the_written_formula(tmp_path: Path) -> None:
    """PPO over two epochs of three mini-batches, against plain forwards and torch's AdamW."""
    training_config = config(num_epochs=2, num_minibatches=3, learning_rate=3e-3, grad_clip=1e9, clip_high=0.05)
    trajectories, advantages = batch(1).trajectories, batch(1).advantages
    model: Any = build_model(training_config.model, CharVocabulary.vocab_size, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    old = [token_logprobs(model, each).detach() for each in trajectories]
    num_clipped, norms = 0.0, []
    for first in [0, 2, 4] * 2:
        loss = torch.zeros(())
        for each, advantage, before in list(zip(trajectories, advantages, old, strict=True))[first : first + 2]:
            ratio = (token_logprobs(model, each) - before).exp()
            kept, clipped = ratio * advantage, ratio.clamp(0.8, 1.05) * advantage
            loss = loss - torch.minimum(kept, clipped).mean() / 2
            num_clipped += float((clipped < kept).sum())
        optimizer.zero_grad()
        loss.backward()
        norms.append(math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters())))
        optimizer.step()
    engine = TorchTrainEngine(training_config)
    metrics = run_step(engine, batch(1))
    expected, ours = model.state_dict(), model_of(engine, tmp_path).state_dict()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-3, atol=2e-4)
    assert num_clipped > 5
    assert metrics["clip_fraction"] > 0
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 6, rel=1e-3)
    assert metrics["learning_rate"] == 3e-3


def test_several_updates_do_not_depend_on_how_stages_are_cut() -> None:
    training_config = config(num_epochs=2, num_minibatches=3, micro_batch_size=1, kl_coef=0.1)
    assert run(training_config, 2, max_seconds=0) == run(training_config, 2)


def test_between_two_updates_of_a_step_there_is_no_version_to_keep_or_publish(tmp_path: Path) -> None:
    training_config = config(num_epochs=2)
    engine = TorchTrainEngine(training_config)
    run_step(engine, batch(1))
    engine.save(tmp_path / "step_1")
    engine.begin_step(batch(2))
    run_stage(engine, Stage.OLD_LOGPROBS)
    reports = [engine.run_stage(Stage.UPDATE, max_seconds=0) for _ in range(4)]
    assert (reports[-1].micro_batches_done, reports[-1].micro_batches_total) == (4, 6)
    for attempt in (lambda: engine.save(tmp_path / "half"), lambda: engine.export_weights(tmp_path / "half")):
        with pytest.raises(IllegalTransitionError, match="step 2 is between two of its updates"):
            attempt()
    run_stage(engine, Stage.UPDATE)
    assert engine.version == 2
    restored = TorchTrainEngine(training_config)
    restored.restore(tmp_path / "step_1")
    run_step(restored, batch(2))
    assert restored.weights_sha256() == engine.weights_sha256()


def test_learning_rates_rise_by_steps_however_many_updates_a_step_has() -> None:
    engine = TorchTrainEngine(config(lr_warmup_steps=3, learning_rate=4e-4, num_epochs=3))
    rates = [run_step(engine, batch(step))["learning_rate"] for step in range(1, 4)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4])


# Files and residency.


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_restored_engine_continues_bit_for_bit(tmp_path: Path, kl_coef: float) -> None:
    training_config = config(sft_warmup=2, kl_coef=kl_coef)
    engine = TorchTrainEngine(training_config)
    run_stage(engine, Stage.SFT_WARMUP)
    run_step(engine, batch(1))
    engine.save(tmp_path / "step_1")
    run_step(engine, batch(2))
    restored = TorchTrainEngine(replace(training_config, seed=99))
    restored.restore(tmp_path / "step_1")
    assert restored.version == 1
    run_step(restored, batch(2))
    assert restored.weights_sha256() == engine.weights_sha256()


def test_an_sft_warmup_cut_short_is_taken_up_again(tmp_path: Path) -> None:
    training_config = config(sft_warmup=4)
    engine = TorchTrainEngine(training_config)
    for _ in range(4):
        engine.run_stage(Stage.SFT_WARMUP, max_seconds=0)
    engine.save(tmp_path / "warm")
    run_stage(engine, Stage.SFT_WARMUP)
    restored = TorchTrainEngine(training_config)
    restored.restore(tmp_path / "warm")
    assert not restored.is_warm
    run_stage(restored, Stage.SFT_WARMUP)
    assert restored.weights_sha256() == engine.weights_sha256()


def test_an_engine_may_be_restored_in_the_middle_of_a_step(tmp_path: Path) -> None:
    engine = TorchTrainEngine(config())
    run_step(engine, batch(1))
    engine.save(tmp_path / "step_1")
    engine.begin_step(batch(2))
    run_stage(engine, Stage.OLD_LOGPROBS)
    engine.run_stage(Stage.UPDATE, max_seconds=0)
    engine.restore(tmp_path / "step_1")
    run_step(engine, batch(2))
    undisturbed = TorchTrainEngine(config())
    for step in (1, 2):
        run_step(undisturbed, batch(step))
    assert engine.weights_sha256() == undisturbed.weights_sha256()


def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path) -> None:
    engine = TorchTrainEngine(config())
    run_step(engine, batch(1))
    engine.save(tmp_path / "step_1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step_1")
    tokens = tokenizer("s:52=", return_tensors="pt").input_ids
    assert tuple(tokens[0].tolist()) == CharVocabulary().encode("s:52=")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, model_of(engine, tmp_path)(tokens).logits)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1


def test_a_pipeline_can_start_from_another_ones_checkpoint(tmp_path: Path) -> None:
    first = TorchTrainEngine(config())
    run_step(first, batch(1))
    first.save(tmp_path / "step_1")
    training_config = config()
    second = TorchTrainEngine(
        replace(training_config, model=replace(training_config.model, path=str(tmp_path / "step_1")))
    )
    assert second.weights_sha256() == first.weights_sha256()
    assert second.version == 0


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the SFT warm-up a warm start."""
    training_config = config(sft_warmup=2)
    engine = TorchTrainEngine(training_config)
    run_stage(engine, Stage.SFT_WARMUP)
    snapshot = engine.snapshot()
    state = dict(snapshot.state)
    state["warm_start_updates"] = state.pop("sft_warmup_updates")
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    replace(snapshot, state=state).write(tmp_path / "step_0")
    monkeypatch.undo()
    restored = TorchTrainEngine(training_config)
    restored.restore(tmp_path / "step_0")
    assert restored.is_warm
    assert restored.weights_sha256() == engine.weights_sha256()


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    engine = TorchTrainEngine(config())
    engine.save(tmp_path / "step_0")
    run_step(engine, batch(1))
    before = engine.weights_sha256()
    damaged = tmp_path / "step_0" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        engine.restore(tmp_path / "step_0")
    assert (engine.weights_sha256(), engine.version) == (before, 1)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    training_config = config()
    TorchTrainEngine(replace(training_config, model=replace(training_config.model, num_layers=1))).save(
        tmp_path / "step_0"
    )
    with pytest.raises(CheckpointError, match="another model"):
        TorchTrainEngine(training_config).restore(tmp_path / "step_0")


def test_exported_weights_carry_their_version_and_no_tied_copy(tmp_path: Path) -> None:
    engine = TorchTrainEngine(config())
    run_step(engine, batch(1))
    assert engine.export_weights(tmp_path / "w.safetensors") == 1
    tensors, metadata = read_tensors(tmp_path / "w.safetensors")
    assert metadata["version"] == "1"
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors


@pytest.mark.parametrize(("is_spilled", "is_tree"), [(False, True), (True, True), (True, False)])
def test_offloading_at_any_safe_point_changes_nothing(is_spilled: bool, is_tree: bool, tmp_path: Path) -> None:
    training_config = replace(config(sft_warmup=2, kl_coef=0.1), train=TrainConfig(equal_across_ranks=is_tree))
    engine = TorchTrainEngine(training_config)
    resident = engine.resident_bytes()

    def away_and_back() -> None:
        engine.offload(spill_to=tmp_path / "spilled" if is_spilled else None)
        engine.offload()
        assert engine.resident_bytes() == 0
        with pytest.raises(IllegalTransitionError, match="offloaded"):
            engine.weights_sha256()
        engine.load()
        engine.load()
        assert engine.resident_bytes() >= resident

    while not engine.run_stage(Stage.SFT_WARMUP, max_seconds=0).is_done:
        away_and_back()
    engine.begin_step(batch(1))
    for stage in RL_STAGES:
        while not engine.run_stage(stage, max_seconds=0).is_done:
            away_and_back()
    away_and_back()
    assert engine.weights_sha256() == run(training_config, 1)


def test_the_sft_warmup_learns_to_copy_its_demonstrations() -> None:
    training_config = replace(config(micro_batch_size=8), sft_warmup=SftWarmupConfig(num_updates=30, batch_size=16))
    engine = TorchTrainEngine(training_config)
    first = TorchTrainEngine(replace(training_config, sft_warmup=SftWarmupConfig(num_updates=1, batch_size=16)))
    assert run_stage(engine, Stage.SFT_WARMUP)["loss"] < 0.6 * run_stage(first, Stage.SFT_WARMUP)["loss"]

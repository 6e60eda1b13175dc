"""Training by requests: each loss is its written formula, and results do not depend on how the work is cut."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlmux.core.errors import UserError
from rlmux.engines.model.model_io import build_model
from rlmux.engines.train.datum_train import DatumTrainEngine
from rlmux.rl.client_requests import Datum, ForwardBackward, ForwardBackwardDone, LoadState, OptimizerStep
from rlmux.rl.config import AlgorithmConfig, ModelConfig, TrainingConfig
from rlmux.rl.vocabulary import CharVocabulary

MODEL = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16)
STEP = OptimizerStep(learning_rate=1e-2, betas=(0.9, 0.95), epsilon=1e-12, weight_decay=0.0, grad_clip=0.0)


def engine(*, micro_batch_size: int = 3) -> DatumTrainEngine:
    algorithm = AlgorithmConfig(micro_batch_size=micro_batch_size)
    return DatumTrainEngine(TrainingConfig(name="m", model=MODEL, algorithm=algorithm))


def datums(count: int = 7, **fields: Any) -> list[Datum]:
    generator = random.Random(1)
    made = []
    for _ in range(count):
        length = generator.randint(2, 6)
        tokens = [generator.randrange(CharVocabulary.vocab_size) for _ in range(length + 1)]
        floats = {name: [generator.uniform(*span) for _ in range(length)] for name, span in fields.items()}
        inputs: dict[str, Any] = {name: np.array(values, np.float32) for name, values in floats.items()}
        inputs["target_tokens"] = np.array(tokens[1:], np.int64)
        made.append(Datum(tokens=np.array(tokens[:-1], np.int64), inputs=inputs))
    return made


POLICY: dict[str, Any] = {"logprobs": (-5.0, -4.0), "advantages": (-1.0, 1.0)}


def request(loss: str, data: list[Datum], **config: float) -> ForwardBackward:
    return ForwardBackward(datums=data, loss=loss, config=config, is_forward_only=False)


def run(trainer: DatumTrainEngine, asked: ForwardBackward) -> ForwardBackwardDone:
    work = trainer.forward_backward(asked)
    while work.has_score():
        work.run_alone(trainer.state.answer)
    if work.error is not None:
        raise work.error
    return work.result


def written(loss: str, lp: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if loss == "cross_entropy":
        return -(inputs["weights"] * lp).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    if loss == "gspo":
        mask = inputs["sequence_ratio_mask"]
        log_ratio = ((lp.detach() - q) * mask).sum() / mask.sum()
        ratio = torch.exp(log_ratio + lp - lp.detach())
    else:
        ratio = torch.exp(lp - q)
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "cispo":
        return -(ratio.clamp(0.8, 1.2).detach() * lp * advantages).sum()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"])
def test_each_loss_and_its_gradient_are_the_written_formula(loss):
    spans = {"weights": (0.0, 1.0)} if loss == "cross_entropy" else POLICY
    spans = spans | ({"sequence_ratio_mask": (1.0, 1.0)} if loss == "gspo" else {})
    data = datums(**spans)
    trainer = engine()
    done = run(trainer, request(loss, data))
    model: Any = build_model(MODEL, CharVocabulary.vocab_size, 0)
    total = torch.zeros(())
    for datum, logprobs in zip(data, done.logprobs, strict=True):
        logits = model(torch.from_numpy(datum.tokens)[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        lp = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logprobs), lp.detach(), rtol=1e-5, atol=1e-5)
        total = total + written(loss, lp, {name: torch.from_numpy(each) for name, each in datum.inputs.items()})
    total.backward()
    norm = float(torch.sqrt(sum(each.grad.square().sum() for each in model.parameters())))
    assert done.loss == pytest.approx(float(total.detach()), rel=1e-4)
    assert trainer.optimizer_step(STEP).grad_norm == pytest.approx(norm, rel=1e-4)


def test_the_order_of_datums_in_a_request_changes_no_bit(tmp_path):
    data = datums(**POLICY)
    hashes = []
    for order in (data, data[::-1]):
        trainer = engine()
        run(trainer, request("ppo", order))
        trainer.optimizer_step(STEP)
        hashes.append(trainer.save_weights(tmp_path / "w.safetensors"))
    assert hashes[0] == hashes[1]


def test_an_offload_between_micro_batches_changes_no_bit(tmp_path):
    hashes = []
    for is_cut in (False, True):
        trainer = engine()
        work = trainer.forward_backward(request("ppo", datums(**POLICY)))
        while work.has_score():
            work.run_alone(trainer.state.answer)
            if is_cut:
                trainer.offload()
                trainer.load()
        if is_cut:
            trainer.offload()
            trainer.load()
        trainer.optimizer_step(STEP)
        hashes.append(trainer.save_weights(tmp_path / "w.safetensors"))
    assert hashes[0] == hashes[1]


def test_a_restored_model_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def step(trainer: DatumTrainEngine) -> None:
        run(trainer, request("importance_sampling", datums(**POLICY)))
        trainer.optimizer_step(STEP)

    first = engine()
    step(first)
    first.save_state(tmp_path / "half")
    step(first)
    second = engine()
    second.restore(tmp_path / "half")
    step(second)
    assert second.save_weights(tmp_path / "b.safetensors") == first.save_weights(tmp_path / "a.safetensors")
    second.load_state(LoadState(folder=tmp_path / "half", with_optimizer=False))
    step(second)
    assert second.save_weights(tmp_path / "b.safetensors") != first.save_weights(tmp_path / "a.safetensors")


def test_a_failed_loss_fails_the_next_update_and_drops_its_gradients(tmp_path: Path) -> None:
    trainer = engine()
    before = trainer.save_weights(tmp_path / "w.safetensors")
    run(trainer, request("ppo", datums(**POLICY)))
    with pytest.raises(UserError, match="'stable_reinforce' is not served; its formula is not published: run with"):
        run(trainer, request("stable_reinforce", datums(**POLICY)))
    with pytest.raises(UserError, match=r"a forward_backward failed: loss_fn 'stable_reinforce'.* left as they were"):
        trainer.optimizer_step(STEP)
    with pytest.raises(UserError, match="no forward_backward since the last one"):
        trainer.optimizer_step(STEP)
    assert trainer.save_weights(tmp_path / "w.safetensors") == before


def test_a_forward_alone_leaves_no_gradient():
    trainer = engine()
    asked = replace(request("ppo", datums(**POLICY)), is_forward_only=True)
    assert len(run(trainer, asked).logprobs) == 7
    with pytest.raises(UserError, match="no forward_backward since the last one"):
        trainer.optimizer_step(STEP)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (request("ppo", datums()), "no advantages, logprobs; accepted: advantages, logprobs, target_tokens"),
        (request("cross_entropy", datums(mask=(0, 1))), "unknown mask; accepted: target_tokens, weights"),
        (request("ppo", datums(**POLICY), beta=1.0), "beta=1.0; accepted: numbers for clip_low_threshold"),
        (request("cross_entropy", [Datum(tokens=np.array([10**6]), inputs={"target_tokens": np.array([1])})]),
         "datum 0: model_input has a token out of range; accepted: 0 to 97"),
        (request("cross_entropy", [Datum(tokens=np.array([1, 2]), inputs={"target_tokens": np.array([1])})]),
         r"datum 0: loss_fn_inputs\['target_tokens'\] has shape \[1\]; accepted: \[2\]"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_trained_on_is_refused(asked, text):
    with pytest.raises(UserError, match=text):
        run(engine(), asked)

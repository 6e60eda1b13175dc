"""One RL step in training: its batch as micro-batches, and the stages that lead to one optimizer step.

    reference_logprobs ─▶ old_logprobs ─▶ update
     (kl_coef > 0)           both are kept per micro-batch until `update` reads them

Shapes: R is the number of sampled tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError, PipelineError
from rlmux.core.model import Stage
from rlmux.engines.logprob_gap import LogprobGap
from rlmux.engines.micro_batches import MicroBatch, TrainingSequence, cut, token_logprobs
from rlmux.engines.sft_warmup import risen_learning_rate
from rlmux.engines.stage_work import StageWork
from rlmux.engines.train_state import TrainState
from rlmux.rl.algorithms import ALGORITHMS, clipped_surrogate, kl_k3
from rlmux.rl.batch_metrics import count_sampled
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import TrainingBatch, Trajectory


class RlStep:
    """The batch under way and what its stages found."""

    def __init__(self, batch: TrainingBatch, config: TrainingConfig, state: TrainState, pad_token: int) -> None:
        """Raises PipelineError for a token that breaks the staleness bound."""
        self.number = batch.step
        self.is_trained = False
        """The optimizer step is made: the weights are those of version `number`."""
        self._config = config
        self._state = state
        sequences = [
            _training_sequence(trajectory, advantage, batch.step - 1, config)
            for trajectory, advantage in zip(batch.trajectories, batch.advantages, strict=True)
        ]
        self._micro_batches = cut(sequences, config.algorithm.micro_batch_size, pad_token)
        self._num_sampled = sum(len(each.targets) for each in self._micro_batches)
        self._reference_logprobs: list[Tensor] = []
        """Log-probs [R] under the reference, one tensor for each micro-batch."""
        self._old_logprobs: list[Tensor] = []
        """Log-probs [R] under the weights that the step begins with, one tensor for each micro-batch."""
        self._work_by_stage: dict[Stage, StageWork] = {}

    def work(self, stage: Stage) -> StageWork:
        """A stage of this step, begun with the first call. Raises IllegalTransitionError for any other stage."""
        if stage not in self._work_by_stage:
            run_by_stage: dict[Stage, Callable[[dict[str, float]], Iterator[int]]] = {
                Stage.REFERENCE_LOGPROBS: self._compute_reference_logprobs,
                Stage.OLD_LOGPROBS: self._compute_old_logprobs,
                Stage.UPDATE: self._update,
            }
            if stage not in run_by_stage:
                raise IllegalTransitionError(f"{self.place(stage)}: no stage of a step that is trained")
            is_skipped = stage == Stage.REFERENCE_LOGPROBS and not self._state.has_reference
            metrics: dict[str, float] = {}
            self._work_by_stage[stage] = StageWork(
                micro_batches=run_by_stage[stage](metrics),
                total=0 if is_skipped else len(self._micro_batches),
                metrics=metrics,
            )
        return self._work_by_stage[stage]

    def place(self, stage: Stage) -> str:
        """How errors begin."""
        return f"pipeline {self._config.name} step {self.number} stage {stage}"

    def _compute_reference_logprobs(self, metrics: dict[str, float]) -> Iterator[int]:
        if not self._state.has_reference:
            return
        for batch in self._micro_batches:
            with torch.no_grad(), self._state.reference_weights():
                logprobs, _ = self._forward(batch.to(self._state.device))
            self._reference_logprobs.append(logprobs.cpu())
            yield batch.num_tokens

    def _compute_old_logprobs(self, metrics: dict[str, float]) -> Iterator[int]:
        """Log-probs by the training forward, so that an on-policy ratio is 1 to the last bit."""
        entropy_sum = 0.0
        gap = LogprobGap()
        for batch in self._micro_batches:
            on_device = batch.to(self._state.device)
            with torch.no_grad():
                logprobs, distribution = self._forward(on_device)
                entropy_sum -= float((distribution.exp() * distribution).sum())
                gap.compare(logprobs, on_device, self.place(Stage.OLD_LOGPROBS))
            self._old_logprobs.append(logprobs.cpu())
            yield batch.num_tokens
        metrics["entropy"] = entropy_sum / self._num_sampled
        metrics["logprob_gap"] = gap.largest

    def _update(self, metrics: dict[str, float]) -> Iterator[int]:
        """Gradients of all micro-batches, summed as a tree, then one optimizer step."""
        self._require_logprobs()
        algorithm, place = self._config.algorithm, self.place(Stage.UPDATE)
        totals = dict.fromkeys(("loss", "kl", "clip_fraction", "stale_token_share"), 0.0)
        for index, batch in enumerate(self._micro_batches):
            on_device = batch.to(self._state.device)
            losses, is_clipped, kl = self._losses(on_device, index)
            totals["kl"] += kl / self._num_sampled
            totals["loss"] += self._state.add_gradient((losses * on_device.weights).sum(), place)
            totals["clip_fraction"] += float(is_clipped.sum()) / self._num_sampled
            totals["stale_token_share"] += float(on_device.is_stale.sum()) / self._num_sampled
            if index == len(self._micro_batches) - 1:
                rate = risen_learning_rate(algorithm.learning_rate, self._state.num_updates, algorithm.lr_warmup_steps)
                metrics["grad_norm"] = self._state.update_weights(rate, place)
                self.is_trained = True
                metrics["learning_rate"] = rate
                metrics.update(totals)
                metrics.update(self._work_by_stage[Stage.OLD_LOGPROBS].metrics)
            yield batch.num_tokens

    def _losses(self, batch: MicroBatch, index: int) -> tuple[Tensor, Tensor, float]:
        """Loss [R] of each token, which the clip took out of the gradient [R], and the summed KL."""
        algorithm = self._config.algorithm
        logprobs, _ = self._forward(batch)
        # A stale token is corrected towards the policy that sampled it. For the others that is this
        # policy, and its log-prob comes from the same kernels as the new one.
        recomputed = self._old_logprobs[index].to(self._state.device)
        old_logprobs = torch.where(batch.is_stale, batch.sampled_logprobs, recomputed)
        losses, is_clipped = clipped_surrogate(
            logprobs,
            old_logprobs,
            batch.advantages,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        if not self._state.has_reference:
            return losses, is_clipped, 0.0
        kl = kl_k3(logprobs, self._reference_logprobs[index].to(self._state.device))
        return losses + algorithm.kl_coef * kl, is_clipped, float(kl.detach().sum())

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(self._state.model, batch, self._config.rollout.temperature)

    def _require_logprobs(self) -> None:
        needed = [Stage.OLD_LOGPROBS]
        if self._state.has_reference:
            needed.insert(0, Stage.REFERENCE_LOGPROBS)
        for stage in needed:
            if stage not in self._work_by_stage or not self._work_by_stage[stage].is_done:
                raise IllegalTransitionError(f"{self.place(Stage.UPDATE)}: {stage} is not done")


def _training_sequence(
    trajectory: Trajectory, advantage: float, newest: int, config: TrainingConfig
) -> TrainingSequence:
    """What the trainer needs of one trajectory; `newest` is the version being trained."""
    algorithm = config.algorithm
    oldest = newest - algorithm.staleness
    for version, is_sampled in zip(trajectory.versions, trajectory.is_sampled, strict=True):
        if is_sampled and not oldest <= version <= newest:
            raise PipelineError(
                f"pipeline {config.name}: {trajectory.id} has a token of weight version {version}; "
                f"step {newest + 1} accepts {oldest} to {newest} (algorithm.staleness "
                f"{algorithm.staleness})"
            )
    return TrainingSequence(
        prompt_tokens=trajectory.prompt_tokens,
        tokens=trajectory.tokens,
        is_sampled=trajectory.is_sampled,
        weight=ALGORITHMS[algorithm.name].trajectory_weight(
            algorithm.prompts_per_step * algorithm.group_size,
            count_sampled(trajectory.is_sampled),
            config.rollout.max_new_tokens,
        ),
        advantage=advantage,
        logprobs=trajectory.logprobs,
        is_stale=[version < newest for version in trajectory.versions],
    )

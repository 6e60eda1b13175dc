"""One RL step in training: its batch as micro-batches, and the stages that lead to the next weight version.

    reference_logprobs ─▶ old_logprobs ─▶ update: epochs x mini-batches, an optimizer step after each mini-batch
     (kl_coef > 0)     (several updates)     both are kept per micro-batch until `update` reads them

A mini-batch is an equal part of the step's prompt groups, in their order. A step of one update needs no old
log-probs of its own: the forward that its gradient comes from gives the same ones, to the last bit.

Each of several ranks computes the micro-batches that are its leaves of the gradient tree, in all stages (ranks.py);
figures are added up over the micro-batches of all ranks, in their order.

Shapes: R is the number of sampled tokens of a micro-batch.

A module of its own: a step lives shorter than the engine that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError, PipelineError
from rlmux.core.model import Stage
from rlmux.engines.logprob_gap import NO_GAP, logprob_gap, mismatch_kl, require_close, require_gap
from rlmux.engines.train.sft_warmup import risen_learning_rate
from rlmux.engines.train.stage_work import StageWork
from rlmux.engines.train.update.figures import Figures, copy_to_host, require_finite
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.train.update.ranks import in_leaf_order
from rlmux.engines.train.update.train_tensors import Backward, Requests, Score, TrainTensors
from rlmux.engines.train.update.training_forward import TokenScores
from rlmux.rl.algorithms import (
    ALGORITHMS,
    behavior_ratio,
    clipped_surrogate,
    is_clamped,
    kl_k3,
    mismatch_weight,
)
from rlmux.rl.batch_metrics import count_sampled
from rlmux.rl.config import TrainingConfig
from rlmux.rl.types import TrainingBatch, Trajectory

_FIGURES = (
    "loss",
    "kl",
    "clip_fraction",
    "stale_token_share",
    "num_clamped_ratios",
    "behavior_ratio",
    "num_dropped_tokens",
    "mismatch_ratio",
    "mismatch_cut_share",
)
"""Figures summed over a step's micro-batches, in the order of `RlStep._add_gradient`."""
_SHARES = ("kl", "clip_fraction", "stale_token_share", "behavior_ratio", "mismatch_ratio", "mismatch_cut_share")
"""Those that are divided by the step's sampled tokens."""


@dataclass(slots=True, kw_only=True)
class _Losses:
    """Loss of a micro-batch's tokens, and figures as tensors of one number."""

    of_tokens: Tensor
    """Loss [R], with its gradient."""
    num_clipped: Tensor
    """Tokens that the clip took out of the gradient."""
    num_clamped: Tensor
    """Clamped log-ratios, to the old policy, the sampling one and the reference."""
    kl: Tensor
    """Summed KL to the reference; 0 without one."""
    behavior_ratio: Tensor
    """Sum over stale tokens of their weight in the decoupled objective; 0 in the other one."""
    num_dropped: Tensor
    """Stale tokens above that objective's cap."""
    mismatch_ratio: Tensor
    """Sum of the weights that correct what tokens were sampled with."""
    num_cut: Tensor
    """Tokens whose weight is cut, or 0 for that."""


class RlStep:
    """The present batch and the results of its stages."""

    def __init__(
        self,
        batch: TrainingBatch,
        config: TrainingConfig,
        state: TrainTensors,
        *,
        max_logprob_gap: float = math.inf,
        max_kl: float = math.inf,
    ) -> None:
        """Raises PipelineError for a token that breaks the staleness bound."""
        self.number = batch.step
        self.is_trained = False
        """Whether all optimizer steps are done: the weights are version `number`."""
        self._config = config
        self._state = state
        sequences = [
            _training_sequences(trajectory, advantage, batch.step - 1, config)
            for trajectory, advantage in zip(batch.trajectories, batch.advantages, strict=True)
        ]
        algorithm = config.algorithm
        size = len(sequences) // algorithm.num_minibatches
        starts = range(0, len(sequences), size)
        parts = [list(chain.from_iterable(sequences[start : start + size])) for start in starts]
        max_tokens = config.train.tokens_per_micro_batch
        self._minibatches = [in_leaf_order(cut(part, algorithm.sequences_per_pass, max_tokens)) for part in parts]
        self._dealt = [state.ranks.positions(leaves, first) for first, leaves in _numbered(self._minibatches)]
        """This rank's micro-batches of each mini-batch, in order; None where only other ranks have one."""
        self._reference_logprobs: dict[int, Tensor] = {}
        """Log-probs [R] under the reference, by leaf."""
        self._old_logprobs: dict[int, Tensor] = {}
        """Log-probs [R] under the weights that the step begins with, by leaf; empty where one update needs none."""
        self._first_pass = _FirstPass(max_logprob_gap, max_kl, state)
        self._num_updates_done = 0
        self._work_by_stage: dict[Stage, StageWork] = {}

    def work(self, stage: Stage) -> StageWork:
        """A stage of this step, begun with the first call. Raises IllegalTransitionError for any other stage."""
        if stage not in self._work_by_stage:
            run_by_stage: dict[Stage, Callable[[dict[str, float]], Requests[None]]] = {
                Stage.REFERENCE_LOGPROBS: self._compute_reference_logprobs,
                Stage.OLD_LOGPROBS: self._compute_old_logprobs,
                Stage.UPDATE: self._update,
            }
            if stage not in run_by_stage:
                raise IllegalTransitionError(f"{self.place(stage)}: no stage of a step that is trained")
            metrics: dict[str, float] = {}
            self._work_by_stage[stage] = StageWork(
                requests=run_by_stage[stage](metrics),
                state=self._state,
                total=self._num_passes(stage) * sum(map(len, self._dealt)),
                metrics=metrics,
            )
        return self._work_by_stage[stage]

    @property
    def is_half_trained(self) -> bool:
        """Whether only some of the step's updates are done: the weights are then of no version."""
        return 0 < self._num_updates_done < self._config.algorithm.num_updates

    def _num_passes(self, stage: Stage) -> int:
        """How often a stage computes each micro-batch."""
        if stage == Stage.REFERENCE_LOGPROBS:
            return int(self._state.has_reference)
        algorithm = self._config.algorithm
        return int(algorithm.needs_old_logprobs) if stage == Stage.OLD_LOGPROBS else algorithm.num_epochs

    def place(self, stage: Stage) -> str:
        """How errors begin."""
        return f"pipeline {self._config.name} step {self.number} stage {stage}"

    def _compute_reference_logprobs(self, metrics: dict[str, float]) -> Requests[None]:
        if not self._state.has_reference:
            return
        for dealt in chain.from_iterable(self._dealt):
            if dealt is None:
                with torch.no_grad(), self._state.reference_weights():
                    self._state.accompany()
            else:
                leaf, batch = dealt
                scores = yield self._score(batch.to(self._state.device), with_gradient=False, uses_reference=True)
                self._reference_logprobs[leaf] = copy_to_host(scores.logprobs)
            yield _num_tokens(dealt)

    def _compute_old_logprobs(self, metrics: dict[str, float]) -> Requests[None]:
        """Log-probs by the training forward, so that the first update's ratios are 1 to the last bit."""
        if not self._config.algorithm.needs_old_logprobs:
            return
        for dealt in chain.from_iterable(self._dealt):
            if dealt is None:
                with torch.no_grad():
                    self._state.accompany()
            else:
                leaf, batch = dealt[0], dealt[1].to(self._state.device)
                scores = yield self._score(batch, with_gradient=False)
                self._first_pass.add(leaf, batch, scores)
                self._old_logprobs[leaf] = copy_to_host(scores.logprobs)
            yield _num_tokens(dealt)
        self._first_pass.finish(self.place(Stage.OLD_LOGPROBS))

    def _update(self, metrics: dict[str, float]) -> Requests[None]:
        """Gradients of each mini-batch of each epoch, summed as a tree over its micro-batches, and an optimizer step.

        A figure is the mean over the updates of the step; clamped log-ratios are counted over all of them.
        """
        self._require_logprobs()
        algorithm, place = self._config.algorithm, self.place(Stage.UPDATE)
        rate = risen_learning_rate(algorithm.learning_rate, self.number - 1, algorithm.lr_warmup_steps)
        totals = dict.fromkeys((*_FIGURES, "grad_norm"), 0.0)
        for leaves, positions in algorithm.num_epochs * list(zip(self._minibatches, self._dealt, strict=True)):
            num_sampled = max(1, algorithm.num_updates * sum(len(each.targets) for each in leaves))
            self._state.begin_update(len(leaves))
            figures = Figures(self._state.device)
            for index, dealt in enumerate(positions):
                if dealt is not None:
                    yield from self._add_gradient(*dealt, figures)
                else:
                    self._state.accompany()
                if index == len(positions) - 1:
                    if not algorithm.needs_old_logprobs:
                        self._first_pass.finish(place)
                    self._add_up(figures, num_sampled, totals)
                    totals["grad_norm"] += self._state.update_weights(rate, place) / algorithm.num_updates
                    self._num_updates_done += 1
                    self.is_trained = self._num_updates_done == algorithm.num_updates
                yield _num_tokens(dealt)
        totals["loss"] /= algorithm.num_updates
        stale_token_share = totals["stale_token_share"] if algorithm.objective == "decoupled" else 0.0
        totals["behavior_ratio"] = totals["behavior_ratio"] / stale_token_share if stale_token_share else math.nan
        if self._config.mismatch_correction == "none":
            del totals["mismatch_ratio"], totals["mismatch_cut_share"]
        num_targets = sum(len(each.targets) for each in chain.from_iterable(self._minibatches))
        metrics.update(totals, learning_rate=rate, **self._first_pass.metrics(num_targets))

    def _add_gradient(self, leaf: int, batch: MicroBatch, figures: Figures) -> Requests[None]:
        """One micro-batch: its gradient goes to the tree, and what `_FIGURES` are made of to `figures`."""
        on_device = batch.to(self._state.device)
        scores = yield self._score(on_device, with_gradient=True)
        found = self._losses(on_device, leaf, scores)
        loss = (found.of_tokens * on_device.weights).sum()
        yield Backward(loss=loss)
        shares = (found.kl, found.num_clipped, on_device.is_stale.sum())
        corrected = (found.mismatch_ratio, found.num_cut)
        figures.add(leaf, [loss, *shares, found.num_clamped, found.behavior_ratio, found.num_dropped, *corrected])

    def _add_up(self, figures: Figures, num_sampled: int, totals: dict[str, float]) -> None:
        """Add the figures of an update's micro-batches to the step's. Raises PipelineError for a loss that is not
        finite."""
        rows = self._state.ranks.gather(figures.read())
        require_finite((row[1] for row in rows), self.place(Stage.UPDATE))
        for _, *row in rows:
            for name, figure in zip(_FIGURES, row, strict=True):
                totals[name] += figure / num_sampled if name in _SHARES else figure

    def _losses(self, batch: MicroBatch, leaf: int, scores: TokenScores) -> _Losses:
        algorithm = self._config.algorithm
        logprobs = scores.logprobs
        if algorithm.needs_old_logprobs:
            begun_with = self._old_logprobs[leaf].to(self._state.device, non_blocking=True)
        else:
            begun_with = logprobs.detach()
            self._first_pass.add(leaf, batch, scores)
        # The policy that the step begins with sampled the fresh tokens; its log-prob comes from the same kernels as the
        # new one.
        sampled_by = torch.where(batch.is_stale, batch.sampled_logprobs, begun_with)
        is_decoupled = algorithm.objective == "decoupled"
        old_logprobs = begun_with if is_decoupled else sampled_by
        losses, is_clipped = clipped_surrogate(
            logprobs, old_logprobs, batch.advantages, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high
        )
        nothing = losses.new_zeros(())
        found = _Losses(
            of_tokens=losses,
            num_clipped=is_clipped.sum(),
            num_clamped=_num_clamped(logprobs, old_logprobs),
            kl=nothing,
            behavior_ratio=nothing,
            num_dropped=nothing,
            mismatch_ratio=nothing,
            num_cut=nothing,
        )
        if is_decoupled:
            ratio, is_dropped = behavior_ratio(begun_with, sampled_by, algorithm.max_behavior_ratio)
            found.of_tokens = losses * ratio
            found.behavior_ratio, found.num_dropped = (ratio * batch.is_stale).sum(), is_dropped.sum()
            found.num_clamped = found.num_clamped + _num_clamped(begun_with, sampled_by)
        if self._config.mismatch_correction != "none":
            weight, is_cut = self._mismatch_weight(batch, begun_with)
            found.of_tokens = found.of_tokens * weight
            found.mismatch_ratio, found.num_cut = weight.sum(), is_cut.sum()
        if self._state.has_reference:
            reference = self._reference_logprobs[leaf].to(self._state.device, non_blocking=True)
            kl = kl_k3(logprobs, reference)
            found.of_tokens = found.of_tokens + algorithm.kl_coef * kl
            found.kl = kl.detach().sum()
            found.num_clamped = found.num_clamped + _num_clamped(reference, logprobs)
        return found

    def _mismatch_weight(self, batch: MicroBatch, begun_with: Tensor) -> tuple[Tensor, Tensor]:
        """Weight [R] of each token for what it was sampled with, 1 for a stale one; and which are cut."""
        algorithm = self._config.algorithm
        log_ratio = (begun_with - batch.sampled_logprobs).masked_fill(batch.is_stale, 0.0)
        if algorithm.mismatch_level == "sequence":
            sequences = batch.sequence_of
            sums = log_ratio.new_zeros(sum(count for count, _ in batch.runs)).index_add_(0, sequences, log_ratio)
            log_ratio = sums[sequences]
        weight, is_cut = mismatch_weight(log_ratio, self._config.mismatch_correction, algorithm.max_mismatch_ratio)
        return weight.masked_fill(batch.is_stale, 1.0), is_cut & ~batch.is_stale

    def _score(self, batch: MicroBatch, *, with_gradient: bool, uses_reference: bool = False) -> Score:
        return Score(
            batch=batch,
            temperature=self._config.rollout.temperature,
            with_gradient=with_gradient,
            uses_reference=uses_reference,
        )

    def _require_logprobs(self) -> None:
        for stage in (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS):
            is_done = stage in self._work_by_stage and self._work_by_stage[stage].is_done
            if self._num_passes(stage) and not is_done:
                raise IllegalTransitionError(f"{self.place(Stage.UPDATE)}: {stage} is not done")


def _num_clamped(logprobs: Tensor, others: Tensor) -> Tensor:
    return is_clamped(logprobs, others).sum()


def _numbered(minibatches: Sequence[list[MicroBatch]]) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Each mini-batch with the number of its first leaf."""
    first = 0
    for leaves in minibatches:
        yield first, leaves
        first += len(leaves)


def _num_tokens(dealt: tuple[int, MicroBatch] | None) -> int:
    return 0 if dealt is None else dealt[1].num_tokens


def _training_sequences(
    trajectory: Trajectory, advantage: float, newest: int, config: TrainingConfig
) -> list[TrainingSequence]:
    """The trainer's input from one trajectory; `newest` is the version being trained.

    The sequences of a session share the weight that one of all their tokens would have.
    """
    algorithm = config.algorithm
    weight = ALGORITHMS[algorithm.name].trajectory_weight(
        algorithm.prompts_per_step * algorithm.group_size // algorithm.num_minibatches,
        max(1, sum(count_sampled(each.is_sampled) for each in trajectory.sequences)),
        config.rollout.max_new_tokens,
    )
    return [_training_sequence(each, weight, advantage, newest, config) for each in trajectory.sequences]


def _training_sequence(
    trajectory: Trajectory, weight: float, advantage: float, newest: int, config: TrainingConfig
) -> TrainingSequence:
    is_fresh = trajectory.versions.count(newest) == len(trajectory.versions)
    if not is_fresh:
        _check_versions(trajectory, newest, config)
    return TrainingSequence(
        prompt_tokens=trajectory.prompt_tokens,
        tokens=trajectory.tokens,
        is_sampled=trajectory.is_sampled,
        weight=weight,
        advantage=advantage,
        logprobs=trajectory.logprobs,
        is_stale=() if is_fresh else [version < newest for version in trajectory.versions],
    )


def _check_versions(trajectory: Trajectory, newest: int, config: TrainingConfig) -> None:
    """Raises PipelineError for a token that breaks the staleness bound."""
    algorithm = config.algorithm
    oldest = newest - algorithm.staleness
    for version, is_sampled in zip(trajectory.versions, trajectory.is_sampled, strict=True):
        if is_sampled and not oldest <= version <= newest:
            raise PipelineError(
                f"pipeline {config.name}: {trajectory.id} has a token of weight version {version}; "
                f"step {newest + 1} accepts {oldest} to {newest} (algorithm.staleness "
                f"{algorithm.staleness})"
            )


class _FirstPass:
    """Figures of a step's tokens under its initial weights, summed over the micro-batches."""

    def __init__(self, max_logprob_gap: float, max_kl: float, state: TrainTensors) -> None:
        self._max_logprob_gap = max_logprob_gap
        self._max_kl = max_kl
        self._ranks = state.ranks
        self._figures = Figures(state.device)
        self._rows: list[Sequence[float]] = []
        """(leaf, summed entropy, gap, summed KL, fresh tokens) of each micro-batch of all ranks, once they are read."""

    @torch.no_grad()
    def add(self, leaf: int, batch: MicroBatch, scores: TokenScores) -> None:
        """Add one micro-batch and the model's scores of it."""
        gap, kl = logprob_gap(scores.logprobs, batch), mismatch_kl(scores.logprobs, batch)
        self._figures.add(leaf, [scores.entropies.sum(), gap, kl, (~batch.is_stale).sum()])

    def finish(self, place: str) -> None:
        """Read what was added. Raises PipelineError, beginning with `place`, as `require_gap` and `require_close`."""
        self._rows = self._ranks.gather(self._figures.read())
        for _, _, gap, _, _ in self._rows:
            require_gap(gap, self._max_logprob_gap, place)
        require_close(self._mismatch_kl(), self._max_kl, place)

    def _mismatch_kl(self) -> float:
        """In nats a fresh token; NaN without one."""
        num_fresh = sum(num for *_, num in self._rows)
        return sum(kl for *_, kl, _ in self._rows) / num_fresh if num_fresh else math.nan

    def metrics(self, num_sampled: int) -> dict[str, float]:
        """Mean entropy of the sampled tokens; the largest gap to the log-prob that a fresh token was sampled with, and
        their KL in nats a token, NaN without a fresh one."""
        _, entropy_sums, gaps, _, _ = zip(*self._rows, strict=True)
        known = [gap for gap in gaps if gap > NO_GAP]
        return {
            "entropy": sum(entropy_sums) / max(1, num_sampled),
            "logprob_gap": max(known, default=math.nan),
            "mismatch_kl": self._mismatch_kl(),
        }

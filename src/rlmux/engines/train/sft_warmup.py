"""Supervised steps before RL: cross-entropy on demonstrations of the task, so that rewards are not all zero.

Demonstrations are a function of the config and the update's index, so a warm-up that was cut short continues after a
restore with nothing but the number of updates that were done. At its end the optimizer is reset, and the weights
become the reference where there is a KL penalty.
"""

from __future__ import annotations

import math

from rlmux.core.model import Stage
from rlmux.engines.train.stage_work import StageWork
from rlmux.engines.train.update.figures import Figures, require_finite
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.train.update.ranks import in_leaf_order
from rlmux.engines.train.update.train_tensors import Backward, Requests, Score, TrainTensors
from rlmux.rl.batch_metrics import count_sampled
from rlmux.rl.config import TrainingConfig
from rlmux.rl.demonstrations import demonstration_batch
from rlmux.rl.tasks import Task, make_task
from rlmux.rl.vocabulary import Vocabulary


class SftWarmup:
    """The warm-up of one pipeline, from update 0 to `sft_warmup.num_updates`."""

    def __init__(self, config: TrainingConfig, vocabulary: Vocabulary, state: TrainTensors) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._state = state
        self._work: StageWork | None = None
        self.num_updates_done = 0
        if self.is_done:
            self._end()

    @property
    def is_done(self) -> bool:
        """Whether all updates are done, so that RL may begin."""
        return self.num_updates_done == self._config.sft_warmup.num_updates

    def work(self) -> StageWork:
        """The present stage, begun by the first call."""
        if self._work is None:
            ranks = self._state.ranks
            num_leaves = -(-self._config.sft_warmup.batch_size // self._config.algorithm.sequences_per_pass)
            per_update = ranks.num_positions(num_leaves)
            metrics: dict[str, float] = {}
            self._work = StageWork(
                requests=self._run(metrics),
                state=self._state,
                total=per_update * self._config.sft_warmup.num_updates,
                done=per_update * self.num_updates_done,
                metrics=metrics,
            )
        return self._work

    def restore(self, num_updates_done: int) -> None:
        """Continue from a checkpoint after so many updates; an unfinished one is dropped."""
        self.num_updates_done = num_updates_done
        self._work = None

    def _run(self, metrics: dict[str, float]) -> Requests[None]:
        if self.is_done:
            return
        config = self._config
        place = f"pipeline {config.name} step 0 stage {Stage.SFT_WARMUP}"
        task = make_task(config.task, seed=config.seed, vocabulary=self._vocabulary)
        while not self.is_done:
            leaves = in_leaf_order(self._micro_batches(task))
            positions = self._state.ranks.positions(leaves)
            self._state.begin_update(len(leaves))
            figures = Figures(self._state.device)
            for index, dealt in enumerate(positions):
                if dealt is not None:
                    yield from self._add_gradient(*dealt, figures)
                else:
                    self._state.accompany()
                if index == len(positions) - 1:
                    losses = [loss for _, loss in self._state.ranks.gather(figures.read())]
                    require_finite(losses, place)
                    metrics["grad_norm"] = self._state.update_weights(self._learning_rate(), place)
                    metrics["loss"] = sum(losses)
                    self.num_updates_done += 1
                    if self.is_done:
                        self._end()
                yield 0 if dealt is None else dealt[1].num_tokens

    def _add_gradient(self, leaf: int, batch: MicroBatch, figures: Figures) -> Requests[None]:
        on_device = batch.to(self._state.device)
        scores = yield Score(batch=on_device, temperature=1.0, with_gradient=True)
        loss = -(scores.logprobs * on_device.weights).sum()
        yield Backward(loss=loss)
        figures.add(leaf, [loss])

    def _micro_batches(self, task: Task) -> list[MicroBatch]:
        """The next update's demonstrations; every sampled token of an update weighs the same."""
        config = self._config
        demonstrations = demonstration_batch(config, task, self._vocabulary, self.num_updates_done)
        num_sampled = sum(count_sampled(each.is_sampled) for each in demonstrations)
        sequences = [
            TrainingSequence(
                prompt_tokens=each.prompt_tokens,
                tokens=each.answer_tokens,
                is_sampled=each.is_sampled,
                weight=1 / num_sampled,
            )
            for each in demonstrations
        ]
        return cut(sequences, config.algorithm.sequences_per_pass)

    def _learning_rate(self) -> float:
        """Rises over the first tenth, then falls along half a cosine to a tenth: the next phase starts small."""
        num_updates = self._config.sft_warmup.num_updates
        risen = risen_learning_rate(self._config.sft_warmup.learning_rate, self.num_updates_done, num_updates // 10)
        return risen * (0.55 + 0.45 * math.cos(math.pi * self.num_updates_done / num_updates))

    def _end(self) -> None:
        self._state.reset_optimizer()
        if self._config.algorithm.kl_coef > 0:
            self._state.keep_reference()


def risen_learning_rate(learning_rate: float, num_updates: int, num_rising: int) -> float:
    """The rate after `num_updates` updates: it rises evenly over the first `num_rising`, then stays."""
    return learning_rate * min(1.0, (num_updates + 1) / (num_rising + 1))

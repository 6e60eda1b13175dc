"""Trains one model by requests: losses and updates come one by one, each with its own numbers.

    ForwardBackward* ─▶ partial gradient sums ─▶ OptimizerStep ─▶ weights of the next version
    (forward only: log-probs and loss, no gradient)               SaveWeights, SaveState, LoadState at any time

Invariants: the weights are a function of the config and of the requests so far, however they were cut into calls,
offloaded or restored in between. A request that fails changes nothing, but the next OptimizerStep fails with it and
drops the gradients: momentum would move the weights with a requested gradient missing.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from rlmux.core.errors import CheckpointError, PipelineError, UserError
from rlmux.engines.adapters.shared_base import TenantBase, build_trained_model
from rlmux.engines.model.weight_checksum import CHECKSUM
from rlmux.engines.train.datum_batches import DatumBatch, check_datums, datum_batches
from rlmux.engines.train.stage_work import TrainWork
from rlmux.engines.train.state.checkpoint import read_checkpoint
from rlmux.engines.train.state.snapshot import TrainSnapshot, model_files
from rlmux.engines.train.state.trainer_state import TrainState
from rlmux.engines.train.update.adamw import AdamWNumbers
from rlmux.engines.train.update.figures import Figures, copy_to_host, require_finite
from rlmux.engines.train.update.train_tensors import Backward, Requests, Score
from rlmux.engines.train.update.training_forward import prepare_forward
from rlmux.rl.client_requests import (
    ForwardBackward,
    ForwardBackwardDone,
    LoadState,
    OptimizerStep,
    OptimizerStepDone,
)
from rlmux.rl.config import TrainingConfig
from rlmux.rl.datum_losses import DatumLoss, datum_loss
from rlmux.rl.vocabulary import load_vocabulary


class DatumTrainEngine:
    """One model in training, float32. See the module docstring."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        device: str = "cpu",
        bases: Path | None = None,
        base: TenantBase | None = None,
    ) -> None:
        """`bases`: folder in shared memory where the base of an adapter lies once for all; not used on a GPU.

        `base`: the base that tenants in this process share, in place of one of the engine's own.
        """
        self._config = config
        self._vocabulary = load_vocabulary(config.model)
        vocab_size = self._vocabulary.vocab_size
        model, is_shared = build_trained_model(config, vocab_size, device=device, bases=bases, base=base)
        prepare_forward(model, config.train)
        self._model_config = model.config
        model = nn.Module.to(model, torch.device(device))
        self._state = TrainState(model, config, is_base_shared=is_shared, base=base)
        self._version = 0
        self._failure: str | None = None
        """First failed ForwardBackward since the last OptimizerStep; None if none failed."""
        self._files: dict[str, bytes] = {}

    @property
    def version(self) -> int:
        """Updates made since the model was made or loaded with its moments."""
        return self._version

    @property
    def state(self) -> TrainState:
        """The tensors in training."""
        return self._state

    # --- requests -------------------------------------------------------------------------------------------

    def forward_backward(self, request: ForwardBackward) -> TrainWork:
        """The work of a request, whose result is a ForwardBackwardDone.

        Its error is a UserError for a request that cannot be trained on.
        """
        return TrainWork(requests=self._requests(request))

    def _requests(self, request: ForwardBackward) -> Requests[ForwardBackwardDone]:
        self._state.require_loaded()
        try:
            if request.complaint is not None:
                raise UserError(request.complaint)
            loss = datum_loss(request.loss)
            names = {frozenset(datum.inputs) for datum in request.datums} or {frozenset()}
            configs = [loss.check(request.loss, each, request.config) for each in names]
            check_datums(
                request.datums,
                vocab_size=self._vocabulary.vocab_size,
                max_tokens=self._config.rollout.max_prompt_tokens + self._config.rollout.max_new_tokens,
            )
            return (yield from self._losses(request, loss, configs[0]))
        except (UserError, PipelineError) as error:
            if not request.is_forward_only and self._failure is None:
                self._failure = str(error)
            raise

    def _losses(
        self, request: ForwardBackward, loss: DatumLoss, config: dict[str, float]
    ) -> Requests[ForwardBackwardDone]:
        logprobs_by_place: dict[int, Tensor] = {}
        figures, tokens = Figures(self._state.device), 0
        batches = datum_batches(request.datums, self._config.algorithm.sequences_per_pass, self._state.device)
        self._state.begin_update(len(batches))
        for index, each in enumerate(batches):
            with_gradient = not request.is_forward_only
            scores = yield Score(batch=each.batch, temperature=1.0, with_gradient=with_gradient)
            logprobs = scores.logprobs
            with torch.set_grad_enabled(with_gradient):
                value = _sum_of_losses(each, logprobs, loss, config)
            if with_gradient:
                yield Backward(loss=value)
            figures.add(index, [value])
            for place, part in zip(each.places, torch.split(copy_to_host(logprobs), list(each.lengths)), strict=True):
                logprobs_by_place[place] = part
            tokens += each.batch.num_tokens
            yield each.batch.num_tokens
        losses = [value for _, value in figures.read()]
        if not request.is_forward_only:
            require_finite(losses, f"model {self._config.name}")
            self._state.keep_gradients()
        ordered = [logprobs_by_place[place].numpy() for place in range(len(request.datums))]
        return ForwardBackwardDone(logprobs=ordered, loss=sum(losses), num_tokens=tokens)

    def optimizer_step(self, request: OptimizerStep) -> OptimizerStepDone:
        """Raises UserError if a ForwardBackward since the last step failed, or there was none."""
        self._state.require_loaded()
        failure, self._failure = self._failure, None
        if failure is not None or not self._state.has_kept_gradients:
            self._state.drop_gradients()
            why = (
                "no forward_backward since the last one" if failure is None else f"a forward_backward failed: {failure}"
            )
            raise UserError(f"optim_step: {why}; the weights are left as they were")
        try:
            norm = self._state.update_weights(
                request.learning_rate,
                f"model {self._config.name}",
                numbers=AdamWNumbers(betas=request.betas, epsilon=request.epsilon, weight_decay=request.weight_decay),
                grad_clip=request.grad_clip or math.inf,
            )
        finally:
            self._state.drop_gradients()
        self._version += 1
        return OptimizerStepDone(grad_norm=norm)

    def load_state(self, request: LoadState) -> str:
        """Load a checkpoint; returns the checksum of its weights. Raises UserError for one of another model."""
        try:
            self.restore(request.folder)
        except CheckpointError as error:
            raise UserError(f"load_weights: {error}") from error
        if not request.with_optimizer:
            self._state.reset_optimizer()
            self._version = 0
        return self._state.weights_checksum(self._version)

    # --- files ----------------------------------------------------------------------------------------------

    def save_weights(self, path: Path) -> str:
        """Write the weights for rollout workers; returns their checksum."""
        self._state.write_weights(path, {"version": str(self._version)})
        return self._state.weights_checksum(self._version)

    def save_state(self, folder: Path) -> str:
        """Write a checkpoint; returns the hash of its weights."""
        if not self._files:
            self._files = model_files(self._model_config, self._state.model, self._vocabulary, self._config)
        state = {
            "pipeline": self._config.name,
            "version": self._version,
            "sft_warmup_updates": 0,
            "optimizer_updates": self._state.num_updates,
            CHECKSUM: self._state.weights_checksum(self._version),
        }
        snapshot = TrainSnapshot(
            state=state,
            files=self._files,
            marks={},
            tensors=self._state.copies(folder, {}),
            weights_file=self._state.weights_file,
        )
        sha256 = snapshot.write(folder)
        assert sha256 is not None, "no rank of several"
        return sha256

    def restore(self, folder: Path) -> None:
        """Load a checkpoint with its moments. Raises CheckpointError for a damaged one or another model."""
        self._state.require_loaded()
        state = read_checkpoint(folder)
        self._state.restore(folder, num_updates=int(state["optimizer_updates"]), needs_reference=False)
        self._version = int(state["version"])
        self._failure = None

    # --- residency ------------------------------------------------------------------------------------------

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host, or to disk under this name, with gradients. Does nothing when offloaded."""
        self._state.offload(spill_to=spill_to)

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        self._state.load()

    def resident_bytes(self) -> int:
        """Device bytes of weights, gradients and moments."""
        return self._state.resident_bytes()


def _sum_of_losses(each: DatumBatch, logprobs: Tensor, loss: DatumLoss, config: dict[str, float]) -> Tensor:
    parts = torch.split(logprobs, list(each.lengths))
    sums = [loss.loss(part, inputs, config).sum() for part, inputs in zip(parts, each.inputs, strict=True)]
    return torch.stack(sums).sum()

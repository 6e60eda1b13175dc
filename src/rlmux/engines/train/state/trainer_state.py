"""Training tensors of one pipeline, all of them on every rank.

    weights, gradients      FlatParameters        survive an offload: weights, moments, reference, partial sums
    moments                 AdamW                 scratch: the gradients of the micro-batch under way
    partial gradient sums   TreeSum, or one RunningSum
    reference               a copy of the weights, with a KL penalty only

Invariant: ranks have equal weights, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rlmux.core.errors import CheckpointError, PipelineError
from rlmux.engines.adapters.shared_base import TenantBase
from rlmux.engines.model.weight_checksum import CHECKSUM, weights_checksum
from rlmux.engines.model.weights import own_copies, publish_tensors, read_tensors, weights_sha256
from rlmux.engines.train.state.flat_parameters import FlatParameters
from rlmux.engines.train.update.adamw import AdamW, AdamWNumbers
from rlmux.engines.train.update.micro_batches import MicroBatch
from rlmux.engines.train.update.ranks import Ranks
from rlmux.engines.train.update.train_tensors import (
    OPTIMIZER_FILE,
    REFERENCE_FILE,
    TrainTensors,
    deterministic_backward,
    require_same_model,
)
from rlmux.engines.train.update.training_forward import TokenScores, score_tokens
from rlmux.engines.train.update.tree_sum import RunningSum, TreeSum
from rlmux.rl.config import TrainingConfig


class TrainState(TrainTensors):
    """Owns the parameters of a float32 model on its device, which computes in `train.dtype` from then on."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        *,
        is_base_shared: bool = False,
        base: TenantBase | None = None,
    ) -> None:
        """`is_base_shared`: frozen parameters are views of a file that others map too, and stay there.

        `base`: the frozen parameters' owner, where tenants in one process share them.
        """
        super().__init__(config, model, next(model.parameters()).device)
        algorithm = config.algorithm
        self._train = config.train
        dtype: torch.dtype = getattr(torch, config.train.dtype)
        self._flat = FlatParameters(model, dtype)
        self._frozen: list[Tensor] = [] if is_base_shared or base is not None else _own_frozen_parameters(model, dtype)
        """Parameters of a base that is this worker's alone; they move with the rest."""
        self._base = base
        if base is not None:
            base.hold(self)
        self._grad_clip = algorithm.grad_clip
        self._numbers = AdamWNumbers(betas=algorithm.adam_betas, weight_decay=algorithm.weight_decay)
        self._optimizer = AdamW(self._flat.weights, config.train.optimizer_state)
        self.ranks = Ranks()
        self._num_leaves = 0
        self._is_equal_across_ranks = config.train.is_equal_across_ranks(self._flat.num_parameters)
        self._gradient_sum = self._new_sum(0)
        self._kept_gradients: Tensor | None = None
        """Summed gradients of requested losses for the next update; None without any."""
        self._reference: Tensor | None = None
        """Flat weights [parameters] that the KL penalty compares with; None without one."""
        self._checksum: str | None = None
        """Checksum of the present weights, computed on demand."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps since the optimizer was reset."""
        return self._optimizer.num_updates

    @property
    def has_reference(self) -> bool:
        """Whether there are reference weights for the KL penalty."""
        return self._reference is not None

    # --- learning -------------------------------------------------------------------------------------------

    def score(self, batch: MicroBatch, temperature: float) -> TokenScores:
        return score_tokens(self.model, batch, temperature, train=self._train)

    def accompany(self) -> None:
        """Nothing: a rank computes its own micro-batches alone."""

    def gradient_of(self, batch: MicroBatch, temperature: float) -> list[Tensor]:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        logprobs = self.score(batch, temperature).logprobs
        with deterministic_backward():
            found = torch.autograd.grad((logprobs * batch.weights).sum(), parameters, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    def begin_update(self, num_leaves: int) -> None:
        """Begin an update of so many micro-batches, over all ranks."""
        self._num_leaves = num_leaves
        self._gradient_sum = self._new_sum(len(self.ranks.own(num_leaves)))

    def _new_sum(self, num_leaves: int) -> TreeSum | RunningSum:
        return TreeSum(num_leaves) if self._is_equal_across_ranks else RunningSum()

    def add_gradient(self, loss: Tensor) -> None:
        """Backward of one micro-batch; its gradient becomes the next of this rank's leaves."""
        self.begin_gradient()
        with deterministic_backward():
            loss.backward()  # type: ignore[no-untyped-call]
        self.end_gradient()

    def begin_gradient(self) -> None:
        """First part of `add_gradient`, before the backward."""
        self._flat.gradients.zero_()

    def end_gradient(self) -> None:
        """Last part of `add_gradient`, after the backward."""
        self._gradient_sum.add(self._flat.gradients)

    def update_weights(
        self,
        learning_rate: float,
        place: str,
        *,
        numbers: AdamWNumbers | None = None,
        grad_clip: float | None = None,
    ) -> float:
        gradients, self._kept_gradients = self._kept_gradients, None
        if gradients is None:
            gradients = self.ranks.join(self._gradient_sum.total(), self._num_leaves, self._flat.weights)
        norm = float(torch.linalg.vector_norm(gradients))
        if not math.isfinite(norm):
            raise PipelineError(f"{place}: the gradient norm is {norm}; the weights are left as they were")
        most = self._grad_clip if grad_clip is None else grad_clip
        if norm > most:
            gradients.mul_(most / norm)
        self._optimizer.update(self._flat.weights, gradients, learning_rate, numbers or self._numbers)
        self._flat.round()
        self._checksum = None
        return norm

    def keep_gradients(self) -> None:
        """Add the gradient of the leaves so far to those kept for the next update; further losses may follow."""
        total = self.ranks.join(self._gradient_sum.total(), self._num_leaves, self._flat.weights)
        self._kept_gradients = total if self._kept_gradients is None else self._kept_gradients.add_(total)
        self._gradient_sum = self._new_sum(0)

    @property
    def has_kept_gradients(self) -> bool:
        """Whether any gradient was kept since the last update."""
        return self._kept_gradients is not None

    def drop_gradients(self) -> None:
        """Drop the partial sums of an abandoned step."""
        self._gradient_sum = self._new_sum(0)
        self._kept_gradients = None

    def reset_optimizer(self) -> None:
        """Zero the moments and the count of updates."""
        self._optimizer.reset()

    def keep_reference(self) -> None:
        """Make the present weights the reference."""
        self._reference = self._flat.working.clone()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Let the model compute with the reference."""
        assert self._reference is not None
        with self._flat.using(self._reference):
            yield

    # --- files ----------------------------------------------------------------------------------------------

    def write_weights(self, path: Path | None, metadata: Mapping[str, str]) -> None:
        """Write the weights that the model computes with, and their checksum, as one safetensors file, atomically."""
        self.require_loaded()
        if path is None:
            return
        working = self._flat.named(self._flat.working)
        version = int(metadata["version"])
        if self._flat.is_rounded:
            checksum = weights_checksum(working, self.sample(version, working))
        else:
            checksum = self.weights_checksum(version)
        publish_tensors(path, working, {CHECKSUM: checksum, **metadata})

    def weights_checksum(self, version: int) -> str:
        """Checksum of the parameters, float32, over the version's sample; computed once."""
        self.require_loaded()
        if self._checksum is None:
            masters = self._flat.named()
            self._checksum = weights_checksum(masters, self.sample(version, masters))
        return self._checksum

    def weights_sha256(self) -> str:
        """Hash of all parameters in name order, float32, recomputed."""
        self.require_loaded()
        return weights_sha256(self._flat.named())

    def copies(self, folder: Path | None, metadata: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
        self.require_loaded()
        tensors: dict[str, Mapping[str, Tensor]] = {
            self.weights_file: self._flat.named(),
            OPTIMIZER_FILE: self._optimizer.moments.named(),
        }
        if self._reference is not None:
            tensors[REFERENCE_FILE] = self._flat.named(self._reference)
        return {name: own_copies(each) for name, each in tensors.items()}

    def restore(self, folder: Path, *, num_updates: int, needs_reference: bool) -> None:
        """Load the tensors of a checkpoint and drop partial sums.

        Raises CheckpointError, and changes nothing, for another model and for a reference that is needed and absent.
        """
        self.require_loaded()
        if not (folder / self.weights_file).is_file():
            raise CheckpointError(f"{folder} has no {self.weights_file}, which pipeline {self._pipeline} trains")
        weights, _ = read_tensors(folder / self.weights_file)
        moments, _ = read_tensors(folder / OPTIMIZER_FILE)
        require_same_model(
            {name: tensor.shape for name, tensor in weights.items()},
            {name: tensor.shape for name, tensor in self._flat.named().items()},
            f"{folder} holds another model than pipeline {self._pipeline} trains",
        )
        reference = self._read_reference(folder / REFERENCE_FILE) if needs_reference else None
        self._optimizer.moments.restore(moments)
        self._flat.copy_from(weights)
        self._flat.round()
        self._checksum = None
        self._optimizer.num_updates = num_updates
        self._reference = reference
        self.drop_gradients()

    def _read_reference(self, path: Path) -> Tensor:
        if not path.is_file():
            raise CheckpointError(f"{path} is absent, but algorithm.kl_coef needs the reference weights")
        tensors, _ = read_tensors(path)
        reference = torch.zeros_like(self._flat.working)
        self._flat.copy_from(tensors, reference)
        return reference

    # --- residency ------------------------------------------------------------------------------------------

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host, or to disk under this name. Does nothing when offloaded."""
        super().offload(spill_to=spill_to)
        if self._base is not None:
            self._base.release(self, spill_to=spill_to)

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        if self._offloaded is not None:
            if self._base is not None:
                self._base.hold(self)
            super().load()
            self._flat.round()

    def _kept_tensors(self) -> list[Tensor]:
        """Tensors whose content survives an offload."""
        moments = self._optimizer.moments
        tensors = [self._flat.weights, *(() if moments.is_on_host else moments.named().values())]
        if self._reference is not None:
            tensors.append(self._reference)
        if self._kept_gradients is not None:
            tensors.append(self._kept_gradients)
        return [*tensors, *self._frozen, *self._gradient_sum.tensors]

    def _host_tensors(self) -> list[Tensor]:
        moments = self._optimizer.moments
        return list(moments.named().values()) if moments.is_on_host else []

    def _device_tensors(self) -> list[Tensor]:
        working = [self._flat.working] if self._flat.is_rounded else []
        return [*self._kept_tensors(), *working, self._flat.gradients]


def _own_frozen_parameters(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Frozen parameters, each in memory of its own that can be freed."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.data = parameter.data.to(dtype, copy=True)
    return [parameter.data for parameter in frozen]

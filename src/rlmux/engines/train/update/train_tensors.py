"""Common interface of a pipeline's training tensors, replicated on every rank or sharded across ranks.

    TrainTensors ─┬─ TrainState      trainer_state.py       every rank has all of them
                  └─ ShardedState    sharded_state.py     every rank has its part, and the rest for a moment

    add_gradient (one micro-batch) ─▶ ... ─▶ update_weights ─▶ new weights, no partial sums

A stage computes nothing of the model itself. It is a generator of requests, `Score` and `Backward`, and of the tokens
of each micro-batch that is done. `answered` answers the requests of one pipeline, `joint_training` those of several.

Invariants: no optimizer step is made with a loss or gradient that is not finite. While offloaded, no tensor takes
memory on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlmux.core.errors import CheckpointError, IllegalTransitionError, PipelineError
from rlmux.engines.adapters.lora import ADAPTER_FILE
from rlmux.engines.model.weight_checksum import WHOLE, Sample
from rlmux.engines.model.weights import MODEL_FILE
from rlmux.engines.residency import Offloaded, release_storage
from rlmux.engines.train.update.adamw import AdamWNumbers
from rlmux.engines.train.update.micro_batches import MicroBatch
from rlmux.engines.train.update.ranks import Ranks
from rlmux.engines.train.update.training_forward import TokenScores
from rlmux.rl.config import TrainingConfig

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Request of a stage: the scores of a micro-batch. The answer is a `TokenScores`."""

    batch: MicroBatch
    """The micro-batch, on the device."""
    temperature: float
    """Divisor of the logits."""
    with_gradient: bool
    """Whether a `Backward` follows."""
    uses_reference: bool = False
    """Whether the reference weights compute, in place of the present ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Request of a stage: the gradient of a loss of the last scores. The answer is None."""

    loss: Tensor
    """Loss of one micro-batch."""


_Result = TypeVar("_Result")
Requests = Generator[Score | Backward | int, Any, _Result]
"""Requests of a stage. An int ends a micro-batch: its prompt and response tokens, 0 where only other ranks have one."""


def answered(
    requests: Requests[_Result], answer: Callable[[Score | Backward], object]
) -> Generator[int, None, _Result]:
    """Compute the requests of a stage, one micro-batch per item. An error of `answer` is raised in the stage."""
    reply: object = None
    while True:
        try:
            item = requests.send(reply)
        except StopIteration as end:
            result: _Result = end.value
            return result
        reply = None
        if isinstance(item, int):
            yield item
            continue
        try:
            reply = answer(item)
        except Exception as error:
            requests.throw(error)
            raise


@contextmanager
def deterministic_backward() -> Iterator[None]:
    """Use only deterministic kernels for gradients, in a process with torch's deterministic algorithms enabled.

    With `warn_only`, torch's memory-efficient attention still adds its gradients atomically: on an H200, the weights of
    two runs differed after 20 updates. Raises PipelineError for an operation without a deterministic kernel.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    is_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" in str(error):
            raise PipelineError(str(error).splitlines()[0][:160]) from error
        raise
    finally:
        torch.use_deterministic_algorithms(True, warn_only=is_warn_only)


class TrainTensors(ABC):
    """See the module docstring. `ranks`: those that train together, as this one sees them."""

    ranks: Ranks

    def __init__(self, config: TrainingConfig, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.weights_file = MODEL_FILE if config.adapter is None else ADAPTER_FILE
        """Name of the file with the weights, in a checkpoint."""
        self._pipeline = config.name
        self._sums_whole = config.train.whole_checksums
        self._offloaded: Offloaded | None = None
        self._storage_bytes: list[int] = []
        """Bytes of the storage of each of `_resized_tensors` before an offload; padding and neighbours included."""
        self._has_spilled_host = False
        """The present offload is one to disk, which also takes what lies in host memory."""

    # --- learning -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_updates(self) -> int:
        """Optimizer steps since the optimizer was reset."""

    @property
    @abstractmethod
    def has_reference(self) -> bool:
        """Whether there are reference weights for the KL penalty."""

    def answer(self, request: Score | Backward) -> TokenScores | None:
        """Compute one request of a stage."""
        if isinstance(request, Backward):
            self.add_gradient(request.loss)
            return None
        weights = self.reference_weights() if request.uses_reference else nullcontext()
        with torch.set_grad_enabled(request.with_gradient), weights:
            return self.score(request.batch, request.temperature)

    @abstractmethod
    def score(self, batch: MicroBatch, temperature: float) -> TokenScores:
        """The model's scores of a micro-batch on its device, with a gradient if torch records one."""

    @abstractmethod
    def accompany(self) -> None:
        """Do this rank's part of a micro-batch that only other ranks have; with a gradient where torch is to keep
        one."""

    @abstractmethod
    def gradient_of(self, batch: MicroBatch, temperature: float) -> Sequence[Tensor]:
        """This rank's part of the gradient of the weighted log-probs of one micro-batch; partial sums are left as they
        are."""

    @abstractmethod
    def begin_update(self, num_leaves: int) -> None:
        """Begin an update of so many micro-batches, over all ranks."""

    @abstractmethod
    def add_gradient(self, loss: Tensor) -> None:
        """Backward of one micro-batch; its gradient becomes part of the update's. Does not wait for the device: the
        stage checks its losses before the weights change (figures.py)."""

    @abstractmethod
    def update_weights(
        self,
        learning_rate: float,
        place: str,
        *,
        numbers: AdamWNumbers | None = None,
        grad_clip: float | None = None,
    ) -> float:
        """Clip the gradient summed over all ranks and make one optimizer step; returns the norm before clipping.

        `numbers`, `grad_clip`: of this update alone; None: those of the config.
        Raises PipelineError, beginning with `place`, for a norm that is not finite.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the partial sums of an abandoned step."""

    @abstractmethod
    def reset_optimizer(self) -> None:
        """Zero the moments and the count of updates."""

    @abstractmethod
    def keep_reference(self) -> None:
        """Make the present weights the reference."""

    @abstractmethod
    def reference_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with the reference."""

    # --- files ----------------------------------------------------------------------------------------------

    @abstractmethod
    def write_weights(self, path: Path | None, metadata: Mapping[str, str]) -> None:
        """Write the weights that the model computes with, and their checksum, as one safetensors file, atomically.

        `metadata`: has the `version`.

        None: this rank writes nothing, and gives its part.
        """

    @abstractmethod
    def weights_checksum(self, version: int) -> str:
        """Checksum of the parameters, float32, over the version's sample; computed once."""

    def sample(self, version: int, tensors: Mapping[str, Tensor]) -> Sample:
        """Tensors that the version's checksum covers."""
        return WHOLE if self._sums_whole else Sample.of_version(version, tensors)

    @abstractmethod
    def weights_sha256(self) -> str:
        """Hash of all parameters in name order, float32, recomputed."""

    @abstractmethod
    def copies(self, folder: Path | None, metadata: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
        """Tensors for a checkpoint, by file name and tensor name, as copies in host memory.

        Empty for a model in parts, whose first rank begins the checkpoint of this folder and writes its files of
        tensors at once, with this metadata, while the others give their parts.
        """

    @abstractmethod
    def restore(self, folder: Path, *, num_updates: int, needs_reference: bool) -> None:
        """Load the tensors of a checkpoint and drop partial sums.

        Raises CheckpointError, and changes nothing, for another model and for a reference that is needed and absent.
        """

    # --- residency ------------------------------------------------------------------------------------------

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host, or to disk under this name. Does nothing when offloaded."""
        if self._offloaded is not None:
            return
        self._has_spilled_host = spill_to is not None
        self._offloaded = Offloaded(self._offloaded_tensors(), spill_to=spill_to)
        storages = [tensor.untyped_storage() for tensor in self._resized_tensors()]
        self._storage_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        release_storage(self.device)

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        if self._offloaded is None:
            return
        for tensor, num_bytes in zip(self._resized_tensors(), self._storage_bytes, strict=True):
            tensor.untyped_storage().resize_(num_bytes)
        self._offloaded.copy_to(self._offloaded_tensors())
        self._offloaded = None

    def _offloaded_tensors(self) -> list[Tensor]:
        return [*self._kept_tensors(), *(self._host_tensors() if self._has_spilled_host else ())]

    def _resized_tensors(self) -> list[Tensor]:
        return [*self._device_tensors(), *(self._host_tensors() if self._has_spilled_host else ())]

    def leave_cache(self) -> None:
        """Drop the system's cache of a spilled file, so that a measured load reads the disk."""
        if self._offloaded is not None:
            self._offloaded.leave_cache()

    def resident_bytes(self) -> int:
        """Device bytes of weights, gradients, moments, reference and partial sums."""
        storages: dict[Any, int] = {}
        for tensor in self._device_tensors():
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    def require_loaded(self) -> None:
        """Raises IllegalTransitionError while offloaded."""
        if self._offloaded is not None:
            raise IllegalTransitionError(f"pipeline {self._pipeline}: the train engine is offloaded")

    @abstractmethod
    def _kept_tensors(self) -> list[Tensor]:
        """Tensors whose content survives an offload."""

    @abstractmethod
    def _device_tensors(self) -> list[Tensor]:
        """Those that are kept, and scratch."""

    @abstractmethod
    def _host_tensors(self) -> list[Tensor]:
        """Tensors that lie in host memory whatever the device is; only a spill takes them."""


def require_same_model(found: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]], place: str) -> None:
    """Raises CheckpointError where shapes by name are not those of the model in training. `place`: folder and
    pipeline."""
    if {name: tuple(shape) for name, shape in found.items()} != {name: tuple(shape) for name, shape in mine.items()}:
        raise CheckpointError(place)

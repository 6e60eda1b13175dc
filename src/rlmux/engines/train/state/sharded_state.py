"""Training tensors of a model that is too large for one device: each rank has a part of them (FSDP2).

    rank            0         1         2         3            `fully_shard` of torch cuts each parameter along its rows
    parameter    [ rows ]  [ rows ]  [ rows ]  [ rows ]        gathered layer by layer, for its forward and backward
    gradient     summed over the ranks, each has its rows      added up over the micro-batches, in their order
    moments, reference                                         rows as those of the parameter
    base of an adapter                                         cut and gathered likewise, without the rest

Weights that are updated are float32; with `train.dtype: bfloat16` they are rounded as they are gathered. Ranks gather
together: each makes as many forward and backward passes as the one with most micro-batches (`accompany`).

Files hold whole tensors, as those of `TrainState` do, so any number of ranks reads them, and so does an unsharded
trainer. Moments of 8 bits are an exception: their blocks are within a rank's rows, so the same number of ranks reads
them. Published weights are written one parameter at a time, while training waits: all ranks gather it, and the first
writes. Of a checkpoint each rank writes its own rows, beside training (row_files.py); where the ranks are on several
machines, it is written as published weights are. No rank ever holds the whole model (model_parts.py).

Invariant: weights are a function of the config, the batches and the number of ranks. Sums over ranks have an order of
their own for each number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlmux.core.errors import CheckpointError, PipelineError
from rlmux.engines.adapters.lora import trained_parameters
from rlmux.engines.model.weight_checksum import CHECKSUM, WeightsChecksum
from rlmux.engines.model.weights import SHA256, WeightsSha256, publish_pieces, stream_tensors
from rlmux.engines.residency import return_freed_memory
from rlmux.engines.train.state.checkpoint import begin_checkpoint, folder_aside
from rlmux.engines.train.state.flat_parameters import offsets_of
from rlmux.engines.train.state.model_parts import fill_rows, own_rows, rows_of, rows_per_rank
from rlmux.engines.train.state.row_files import NO_SHA256, FileForm, KeptCopies, RankRows, RowFiles, begin_files
from rlmux.engines.train.update.adamw import AdamW, AdamWNumbers, update_together
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.train.update.moments import BLOCK_SIZE
from rlmux.engines.train.update.ranks import Ranks, touching_others
from rlmux.engines.train.update.train_tensors import (
    OPTIMIZER_FILE,
    REFERENCE_FILE,
    TrainTensors,
    deterministic_backward,
    require_same_model,
)
from rlmux.engines.train.update.training_forward import TokenScores, score_tokens
from rlmux.rl.config import TrainConfig, TrainingConfig

_FLOAT_MOMENTS = ("first_moment", "second_moment")


class ShardedState(TrainTensors):
    """Owns this rank's part of the parameters of a model, on its device."""

    def __init__(
        self, model: PreTrainedModel, config: TrainingConfig, vocab_size: int, ranks: Ranks, device: torch.device
    ) -> None:
        """`model`: of `build_uncut_model`. `vocab_size`: of its vocabulary."""
        super().__init__(config, model, device)
        self.ranks = ranks
        if device.type == "cpu":
            return_freed_memory()
        self._scorer = _shard(model, config.train, ranks, device)
        fill_rows(self._scorer, config, vocab_size, ranks, device)
        self._parameters: dict[str, Any] = dict(trained_parameters(model))
        """Each trained parameter as torch's DTensor: its shape is the whole one, its content this rank's rows."""
        self._frozen: list[Any] = [each for each in model.parameters() if not each.requires_grad]
        """The base of an adapter, as DTensors too."""
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)
        self._grad_clip = config.algorithm.grad_clip
        self._numbers = AdamWNumbers(betas=config.algorithm.adam_betas, weight_decay=config.algorithm.weight_decay)
        self._has_blocks = config.train.optimizer_state == "8bit"
        """The moments have 8 bits, in blocks of this rank's rows."""
        self._optimizers = {
            name: AdamW(rows_of(each), config.train.optimizer_state) for name, each in self._parameters.items()
        }
        self._reference: dict[str, Tensor] | None = None
        """This rank's rows of the weights that the KL penalty compares with; None without one."""
        self._checksum: str | None = None
        """Checksum of the present weights, computed when they are gathered."""
        self._copies = KeptCopies()
        """Host memory for a checkpoint's copy of this rank's rows, which its thread reads until it is written."""
        (nothing,) = cut([TrainingSequence(prompt_tokens=[0], tokens=[0], is_sampled=[True], weight=0.0)], 1)
        self._nothing = replace(nothing, token_share=0.0).to(device)
        """A micro-batch that adds nothing to a gradient."""

    @property
    def num_updates(self) -> int:
        return next(iter(self._optimizers.values())).num_updates

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    # --- learning -------------------------------------------------------------------------------------------

    def score(self, batch: MicroBatch, temperature: float) -> TokenScores:
        with touching_others():
            logprobs, entropies = self._scorer(batch, temperature)
        if not torch.is_grad_enabled():
            self._scorer.reshard()  # after a forward alone torch keeps the embeddings whole
        return TokenScores(logprobs=logprobs, entropies=entropies)

    def accompany(self) -> None:
        scores = self.score(self._nothing, 1.0)
        if torch.is_grad_enabled():
            self._backward((scores.logprobs * 0.0).sum())

    def gradient_of(self, batch: MicroBatch, temperature: float) -> list[Tensor]:
        kept = [(each, each.grad) for each in self._parameters.values()]
        self.drop_gradients()
        self._backward((self.score(batch, temperature).logprobs * batch.weights).sum())
        found = [rows_of(each.grad) for each in self._parameters.values() if each.grad is not None]
        for parameter, gradient in kept:
            parameter.grad = gradient
        return found

    def begin_update(self, num_leaves: int) -> None:
        self.drop_gradients()

    def add_gradient(self, loss: Tensor) -> None:
        self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        with touching_others(), deterministic_backward():
            loss.backward()  # type: ignore[no-untyped-call]

    def update_weights(
        self,
        learning_rate: float,
        place: str,
        *,
        numbers: AdamWNumbers | None = None,
        grad_clip: float | None = None,
    ) -> float:
        gradients = [self._gradient(each) for each in self._parameters.values()]
        norms = torch.stack(torch._foreach_norm(gradients)).tolist()  # one read from the device
        squares = math.fsum(norm_of_one**2 for norm_of_one in norms)
        norm = math.sqrt(math.fsum(row[1] for row in self.ranks.gather([(self.ranks.rank, squares)])))
        if not math.isfinite(norm):
            raise PipelineError(f"{place}: the gradient norm is {norm}; the weights are left as they were")
        most = self._grad_clip if grad_clip is None else grad_clip
        if norm > most:
            torch._foreach_mul_(gradients, most / norm)
        weights = [rows_of(each) for each in self._parameters.values()]
        update_together([*self._optimizers.values()], weights, gradients, learning_rate, numbers or self._numbers)
        self.drop_gradients()
        self._checksum = None
        return norm

    @staticmethod
    def _gradient(parameter: Any) -> Tensor:
        """This rank's rows of a parameter's gradient; zeros where no token reached it."""
        return torch.zeros_like(rows_of(parameter)) if parameter.grad is None else rows_of(parameter.grad)

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def reset_optimizer(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.reset()

    def keep_reference(self) -> None:
        self._reference = {name: rows_of(each).clone() for name, each in self._parameters.items()}

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        self._swap_reference()
        try:
            yield
        finally:
            self._swap_reference()

    def _swap_reference(self) -> None:
        """What torch gathers from stays where it is: contents change places."""
        assert self._reference is not None
        for name, reference in self._reference.items():
            weights = rows_of(self._parameters[name])
            aside = weights.clone()
            weights.copy_(reference)
            reference.copy_(aside)

    # --- files ----------------------------------------------------------------------------------------------

    def write_weights(self, path: Path | None, metadata: Mapping[str, str]) -> None:
        self.require_loaded()
        version = int(metadata["version"])
        masters = WeightsChecksum(self.sample(version, self._forms()))
        rounded = WeightsChecksum(self.sample(version, self._forms(self._dtype)))

        def pieces() -> Iterator[Tensor]:
            for name, whole in self._whole(self._parameters.get):
                if self._checksum is None and self.ranks.rank == 0:
                    masters.add(name, whole)
                computed_with = whole.to(self._dtype)
                if path is not None:
                    rounded.add(name, computed_with)
                yield computed_with

        try:
            self._write(
                path,
                self._forms(self._dtype),
                pieces(),
                lambda: {CHECKSUM: rounded.hexdigest(), **metadata},
                write=publish_pieces,
            )
        finally:
            self._set_checksum(masters)

    def weights_checksum(self, version: int) -> str:
        self.require_loaded()
        if self._checksum is None:
            checksum = WeightsChecksum(self.sample(version, self._forms()))
            for name, whole in self._whole(self._parameters.get):
                if self.ranks.rank == 0:
                    checksum.add(name, whole)
            self._set_checksum(checksum)
        assert self._checksum is not None
        return self._checksum

    def _set_checksum(self, of_first: WeightsChecksum) -> None:
        """Take over the checksum of the first rank."""
        if self._checksum is None:
            self._checksum = self.ranks.of_first(of_first.hexdigest())

    def weights_sha256(self) -> str:
        self.require_loaded()
        digest = WeightsSha256()
        for name, whole in self._whole(self._parameters.get):
            if self.ranks.rank == 0:
                digest.add(name, whole)
        return self.ranks.of_first(digest.hexdigest())

    def row_files(self, folder: Path, metadata: Mapping[str, str]) -> RowFiles | None:
        """This rank's part in a checkpoint's files of tensors, with a copy of its rows; `copies` has the metadata.

        None where not all ranks see the folder through one cache: `copies` writes the files then. Raises OSError, on
        every rank, where they cannot be begun.
        """
        self.require_loaded()
        forms = self._file_forms(metadata, NO_SHA256)
        aside, error = folder, None
        if self.ranks.rank == 0:
            try:
                aside = begin_files(folder, forms)
            except OSError as found:
                error = found
        name, _, why = self.ranks.of_first(f"{aside}\n{error or ''}").partition("\n")
        if why:
            raise error or OSError(f"rank 0: {why}")
        files = None
        with suppress(OSError):
            files = RowFiles(Path(name), self.ranks.rank, self.ranks.count)
        if self.ranks.is_same(f"not seen by {self.ranks.rank}" if files is None else files.place):
            copies = self._copies.of(list(self._own_rows()))
            return files and files.take(copies, self.weights_file, forms[self.weights_file])
        if files is not None:
            files.leave()
        return None

    def _file_forms(self, metadata: Mapping[str, str], sha256: str) -> dict[str, FileForm]:
        """A checkpoint's files of tensors by name."""
        sums = {CHECKSUM: self.weights_checksum(int(metadata.get("version", 0))), SHA256: sha256}
        forms = {
            self.weights_file: FileForm(tensors=self._forms(), metadata={**metadata, **sums}),
            OPTIMIZER_FILE: FileForm(tensors=self._moment_forms(), metadata=metadata),
        }
        if self._reference is not None:
            forms[REFERENCE_FILE] = FileForm(tensors=self._forms(), metadata=metadata)
        return forms

    def _own_rows(self) -> Iterator[RankRows]:
        """This rank's rows of all that a checkpoint has, file by file."""
        offset_by_name, _ = offsets_of(self._parameters, self._dtype)
        first_by_name = {
            name: own_rows(each, self.ranks)[0] * math.prod(each.shape[1:]) for name, each in self._parameters.items()
        }
        for name, each in self._parameters.items():
            yield RankRows(file=self.weights_file, tensor=name, first=first_by_name[name], content=rows_of(each))
        if self._has_blocks:
            for name, key, each, length in self._blocks():
                yield RankRows(
                    file=OPTIMIZER_FILE, tensor=f"{name}.{key}", first=self.ranks.rank * length, content=each
                )
        else:
            for name in self._parameters:
                for key, moment in self._moments(name).items():
                    first = offset_by_name[name] + first_by_name[name]
                    yield RankRows(file=OPTIMIZER_FILE, tensor=key, first=first, content=moment)
        for name, rows in (self._reference or {}).items():
            yield RankRows(file=REFERENCE_FILE, tensor=name, first=first_by_name[name], content=rows)

    def copies(self, folder: Path | None, metadata: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
        """Nothing: the files of tensors are written aside of `folder` at once, parameter by parameter, by the first
        rank."""
        self.require_loaded()
        writes, digest = folder is not None and self.ranks.rank == 0, WeightsSha256()

        def weights() -> Iterator[Tensor]:
            for name, whole in self._whole(self._parameters.get):
                if writes:
                    digest.add(name, whole)
                yield whole

        content: dict[str, Iterator[Tensor]] = {self.weights_file: weights(), OPTIMIZER_FILE: self._moment_pieces()}
        if self._reference is not None:
            content[REFERENCE_FILE] = (whole for _, whole in self._whole(self._reference.__getitem__))
        errors: list[OSError] = []
        if folder is not None and writes:
            with _kept(errors):
                begin_checkpoint(folder)
        for name, pieces in content.items():
            path = folder_aside(folder) / name if folder is not None and writes else None

            def filled(name: str = name) -> Mapping[str, str]:
                return self._file_forms(metadata, digest.hexdigest())[name].metadata

            with _kept(errors):
                self._write(path, self._file_forms(metadata, NO_SHA256)[name].tensors, pieces, filled)
        if errors:
            raise errors[0]
        return {}

    @staticmethod
    def _write(
        path: Path | None,
        forms: Mapping[str, Tensor],
        pieces: Iterator[Tensor],
        metadata: Callable[[], Mapping[str, str]],
        *,
        write: Callable[..., None] = stream_tensors,
    ) -> None:
        """Write a file; None: another rank does. A rank that cannot write gives its part to the end all the same."""
        try:
            if path is not None:
                write(path, forms, pieces, metadata)
        finally:
            deque(pieces, maxlen=0)

    def _forms(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Whole tensors without memory, in name order."""
        shapes = ((name, self._parameters[name].shape) for name in sorted(self._parameters))
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes}

    def _whole(self, part_of: Callable[[str], Any]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors with their names, in name order, one at a time on every rank's device."""
        for name in sorted(self._parameters):
            yield name, self._gather(part_of(name), self._parameters[name])

    def _moment_forms(self) -> dict[str, Tensor]:
        """The tensors of the moments' file: as `FlatParameters` lays them out, or the blocks of 8 bits of each rank."""
        if not self._has_blocks:
            _, size = offsets_of(self._parameters, self._dtype)
            return {key: torch.empty(size, device="meta") for key in _FLOAT_MOMENTS}
        return {
            f"{name}.{key}": torch.empty((self.ranks.count, length), dtype=each.dtype, device="meta")
            for name, key, each, length in self._blocks()
        }

    def _blocks(self) -> Iterator[tuple[str, str, Tensor, int]]:
        """Names of each tensor of blocks, this rank's part of it, and the length of the longest part."""
        for name in sorted(self._parameters):
            shape = self._parameters[name].shape
            num_blocks = -(-rows_per_rank(shape[0], self.ranks.count) * math.prod(shape[1:]) // BLOCK_SIZE)
            for key, each in self._moments(name).items():
                yield name, key, each, num_blocks * (BLOCK_SIZE if each.dtype == torch.uint8 else 1)

    def _moment_pieces(self) -> Iterator[Tensor]:
        """The content of `_moment_forms`, parameter by parameter."""
        if self._has_blocks:
            for _, _, each, length in self._blocks():
                yield self._all(each, [length])
            return
        offset_by_name, size = offsets_of(self._parameters, self._dtype)
        for key in _FLOAT_MOMENTS:
            end = 0
            for name, parameter in self._parameters.items():
                yield torch.zeros(offset_by_name[name] - end)
                end = offset_by_name[name] + parameter.numel()
                yield self._gather(self._moments(name)[key], parameter)
            yield torch.zeros(size - end)

    def _gather(self, rows: Any, parameter: Any) -> Tensor:
        """A whole tensor of a parameter's shape, from each rank's rows."""
        per_rank = rows_per_rank(parameter.shape[0], self.ranks.count)
        return self._all(rows_of(rows), [per_rank, *parameter.shape[1:]])[: parameter.shape[0]]

    def _all(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """Every rank's part, filled up to one shape, one after another."""
        local = local.to(self.device)  # moments may lie in host memory
        padded = local.new_zeros(shape)
        padded[: len(local)] = local
        whole = local.new_empty((shape[0] * self.ranks.count, *shape[1:]))
        with touching_others():
            dist.all_gather_into_tensor(whole, padded)
        return whole

    def restore(self, folder: Path, *, num_updates: int, needs_reference: bool) -> None:
        self.require_loaded()
        if not (folder / self.weights_file).is_file():
            raise CheckpointError(f"{folder} has no {self.weights_file}, which pipeline {self._pipeline} trains")
        reference = folder / REFERENCE_FILE
        if needs_reference and not reference.is_file():
            raise CheckpointError(f"{reference} is absent, but algorithm.kl_coef needs the reference weights")
        self._require_moments(folder / OPTIMIZER_FILE)
        self._read(folder / self.weights_file, {name: rows_of(each) for name, each in self._parameters.items()})
        self._reference = None
        if needs_reference:
            self.keep_reference()
            self._read(reference, self._reference or {})
        self._read_moments(folder / OPTIMIZER_FILE)
        for optimizer in self._optimizers.values():
            optimizer.num_updates = num_updates
        self._checksum = None
        self.drop_gradients()

    def _read(self, path: Path, into: Mapping[str, Tensor]) -> None:
        """Read this rank's rows of every tensor of a file."""
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            mine = {name: each.shape for name, each in self._parameters.items()}
            require_same_model(found, mine, f"{path.parent} holds another model than pipeline {self._pipeline} trains")
            for name, rows in into.items():
                begin, end = own_rows(self._parameters[name], self.ranks)
                rows.copy_(file.get_slice(name)[begin:end])

    def _require_moments(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if found != {name: tuple(form.shape) for name, form in self._moment_forms().items()}:
            raise CheckpointError(
                f"{path} is of another train.optimizer_state or model, or, with 8bit, of another number of parts; "
                "accepted: with 8bit, the train.sharding and train.workers that wrote it"
            )

    def _read_moments(self, path: Path) -> None:
        if self._has_blocks:
            with safe_open(path, framework="pt") as file:
                for name, key, each, _ in self._blocks():
                    each.copy_(file.get_slice(f"{name}.{key}")[self.ranks.rank, : len(each)])
            return
        offset_by_name, _ = offsets_of(self._parameters, self._dtype)
        with safe_open(path, framework="pt") as file:
            for name, parameter in self._parameters.items():
                begin, end = own_rows(parameter, self.ranks)
                width = math.prod(parameter.shape[1:])
                start, stop = (offset_by_name[name] + row * width for row in (begin, end))
                for key, moment in self._moments(name).items():
                    moment.copy_(file.get_slice(key)[start:stop].view(moment.shape))

    # --- residency ------------------------------------------------------------------------------------------

    def _kept_tensors(self) -> list[Tensor]:
        tensors = [rows_of(each) for each in (*self._frozen, *self._parameters.values())]
        tensors += [] if self._is_on_host else self._all_moments()
        tensors += self._reference.values() if self._reference is not None else ()
        return tensors + [rows_of(each.grad) for each in self._parameters.values() if each.grad is not None]

    @property
    def _is_on_host(self) -> bool:
        return any(optimizer.moments.is_on_host for optimizer in self._optimizers.values())

    def _moments(self, name: str) -> dict[str, Tensor]:
        return self._optimizers[name].moments.named()

    def _all_moments(self) -> list[Tensor]:
        return [tensor for name in self._optimizers for tensor in self._moments(name).values()]

    def _host_tensors(self) -> list[Tensor]:
        return self._all_moments() if self._is_on_host else []

    def _device_tensors(self) -> list[Tensor]:
        return self._kept_tensors()


class _Scorer(nn.Module):
    """The model with its head, which torch's hooks are to see as one forward."""

    def __init__(self, model: PreTrainedModel, train: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self._train = train

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, as tensors: the hooks look at what is returned."""
        scores = score_tokens(self.model, batch, temperature, train=self._train)
        return scores.logprobs, scores.entropies


def _shard(model: PreTrainedModel, train: TrainConfig, ranks: Ranks, device: torch.device) -> Any:
    """Cut the model's layers, and what is outside of them, into one part a rank; returns what scores with it."""
    dtype: torch.dtype = getattr(torch, train.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    with touching_others():
        mesh = init_device_mesh(device.type, (ranks.count,))
    scorer = _Scorer(model, train)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, scorer):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_gradient_divide_factor(1.0)
    return scorer


@contextmanager
def _kept(errors: list[OSError]) -> Iterator[None]:
    """Keep an error until all ranks have done their part."""
    try:
        yield
    except OSError as error:
        errors.append(error)

"""The frozen base of adapters, once in a machine's memory: a file in shared memory that every tenant's worker maps.

    first worker     build_model ─▶ NAME.safetensors        as training reads it     ─┐
                     fuse        ─▶ NAME-DTYPE.safetensors  as rollouts read it      ─┤ written once, under a lock
    every worker     a model without memory (`meta`) ─▶ its parameters are views of the mapped file

NAME is a hash of what decides the base: the keys of `model` with its seed, or the folder's files with sizes and times.
A page of the file is in memory once, however many processes map it. The mapping is private: a write would stay in its
own process.

`TenantBase` is the base of tenants that train in one process: their models have its parameters, not copies.

Invariant: a base read from a file has the bits of `build_model`.
"""

from __future__ import annotations

import fcntl
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmux.engines.adapters.lora import inject_adapter
from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.model_io import build_model, build_skeleton, weight_paths
from rlmux.engines.model.transformer import DecoderWeights
from rlmux.engines.model.weight_layout import file_sizes
from rlmux.engines.model.weights import WeightFile, read_tensors, write_tensors
from rlmux.engines.residency import Offloaded, release_storage, storage_bytes
from rlmux.rl.config import ModelConfig, TrainingConfig
from rlmux.rl.memory.adapter_base import base_name


def build_trained_model(
    config: TrainingConfig, vocab_size: int, *, device: str, bases: Path | None, base: TenantBase | None = None
) -> tuple[PreTrainedModel, bool]:
    """The float32 model in host memory that a pipeline trains, its adapter in place; and whether its base is shared.

    A base is shared if training computes in float32 on a core and has a folder for it. `base`: where and in the dtype
    that it has, its parameters are those of the model.
    """
    if base is not None:
        return base.adapted(config), False
    model, is_shared = _build_base(config, vocab_size, device=device, bases=bases)
    if config.adapter is not None:
        inject_adapter(model, config.adapter, config.seed)
    return model, is_shared


def _build_base(
    config: TrainingConfig, vocab_size: int, *, device: str, bases: Path | None
) -> tuple[PreTrainedModel, bool]:
    is_float32 = config.train.dtype == "float32"
    if bases is None or config.adapter is None or device != "cpu" or not is_float32:
        return build_model(config.model, vocab_size, config.model_seed), False
    base = SharedBase(folder=bases, model=config.model, vocab_size=vocab_size, seed=config.model_seed)
    return base.build(), True


class TenantBase:
    """The frozen base of tenants that train in one process, on its device in `train.dtype`.

    It leaves the device with the last tenant that leaves, unless it is a mapped file.
    """

    def __init__(
        self, config: TrainingConfig, vocab_size: int, *, device: str = "cpu", bases: Path | None = None
    ) -> None:
        """`config`: of any tenant. `bases`: as in `TorchTrainEngine`."""
        model, is_mapped = _build_base(config, vocab_size, device=device, bases=bases)
        self._model_config, self._vocab_size = config.model, vocab_size
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, config.train.dtype)
        self._parameters = dict(model.requires_grad_(False).named_parameters(remove_duplicate=False))
        own = [] if is_mapped else list(model.parameters())
        for parameter in own:
            parameter.data = parameter.data.to(self.device, self.dtype, copy=True)
        self._own = [parameter.data for parameter in own]
        """Tensors that are this process's alone."""
        self._holders: WeakSet[object] = WeakSet()
        """Tenants on the device."""
        self._offloaded: Offloaded | None = None
        self._num_bytes: list[int] = []

    def skeleton(self) -> PreTrainedModel:
        """A model of its own with the base's parameters."""
        return self.adapted(None)

    def adapted(self, config: TrainingConfig | None) -> PreTrainedModel:
        """A model with the base's parameters, and the adapter of a tenant in host memory, float32."""
        model = build_skeleton(self._model_config, self._vocab_size)
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in self._parameters}
        if config is not None and config.adapter is not None:
            # peft takes device and dtype of an adapter from the weights beside it.
            for name, module in owners.items():
                leaf = name.rpartition(".")[2]
                setattr(module, leaf, nn.Parameter(torch.zeros(()).expand(getattr(module, leaf).shape)))
            inject_adapter(model, config.adapter, config.seed)
        for name, module in owners.items():
            setattr(module, name.rpartition(".")[2], self._parameters[name])
        nn.Module.to(model, self.device)
        return model

    def hold(self, tenant: object) -> None:
        """Have the base on the device for a tenant."""
        self._holders.add(tenant)
        if self._offloaded is None:
            return
        for tensor, num_bytes in zip(self._own, self._num_bytes, strict=True):
            tensor.untyped_storage().resize_(num_bytes)
        self._offloaded.copy_to(self._own)
        self._offloaded = None

    def release(self, tenant: object, *, spill_to: Path | None = None) -> None:
        """A tenant is off the device; the last one takes the base along. `spill_to`: file name of the tenant's own."""
        self._holders.discard(tenant)
        if self._holders or self._offloaded is not None or not self._own:
            return
        file = None if spill_to is None else spill_to.with_name(f"{spill_to.name}-base")
        self._offloaded = Offloaded(self._own, spill_to=file)
        storages = [tensor.untyped_storage() for tensor in self._own]
        self._num_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        release_storage(self.device)

    def resident_bytes(self) -> int:
        """Device bytes of the base; 0 for a mapped file."""
        return storage_bytes(self._own)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """One base, and the folder in shared memory where its two files are or will be."""

    folder: Path | None
    """Folder in shared memory for all workers of the run on one machine; None: nothing is shared."""
    model: ModelConfig
    """The base as the file gives it."""
    vocab_size: int
    """Tokens of the vocabulary."""
    seed: int
    """Seed of a new model's weights."""

    @property
    def name(self) -> str:
        """Hash of everything that determines the base."""
        return base_name(self.model, self.seed)

    def build(self) -> PreTrainedModel:
        """The model, whose parameters are views of the mapped file."""
        tensors = self._map(f"{self.name}.safetensors", self._parameters)
        model = build_skeleton(self.model, self.vocab_size)
        for name, parameter in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(tensors[name], requires_grad=parameter.requires_grad))
        model.tie_weights()
        return model

    def fused(self, dtype: torch.dtype) -> tuple[PreTrainedModel, DecoderWeights]:
        """A model without weights, and the fused weights as views of the mapped file."""
        model, cpu = build_skeleton(self.model, self.vocab_size), torch.device("cpu")

        def fuse() -> Mapping[str, Tensor]:
            return {"flat": self.fused_alone(cpu, dtype)[1].flat}

        flat = self._map(f"{self.name}-{str(dtype).removeprefix('torch.')}.safetensors", fuse)["flat"]
        return model, DecoderWeights(DecoderShape.of(model), cpu, flat=flat)

    def fused_alone(self, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, DecoderWeights]:
        """A model without weights, and fused weights of this worker's own on its device."""
        model = build_skeleton(self.model, self.vocab_size)
        weights = DecoderWeights(DecoderShape.of(model), device, dtype)
        weights.refresh(self._first_weights(weights.shape))
        return model, weights

    def _first_weights(self, shape: DecoderShape) -> Mapping[str, Tensor]:
        """The folder's tensors, mapped one at a time where they have the names of `shape`; else those of a built
        model."""
        if self.model.path is not None:
            files = [WeightFile(path) for path in weight_paths(Path(self.model.path))]
            tensors = ChainMap[str, Tensor](*files)  # type: ignore[arg-type]  # nothing is written
            if file_sizes(shape).keys() <= tensors.keys() and all(file.is_float for file in files):
                return tensors
        return build_model(self.model, self.vocab_size, self.seed).state_dict()

    def _parameters(self) -> Mapping[str, Tensor]:
        return dict(build_model(self.model, self.vocab_size, self.seed).named_parameters())

    def _map(self, file: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a file, created by the first caller."""
        assert self.folder is not None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / file
        with (self.folder / f"{file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                write_tensors(path, make(), {})
                release_storage(torch.device("cpu"))
        return read_tensors(path)[0]

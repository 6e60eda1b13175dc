"""The frozen base of adapters, once in a machine's memory: a file in shared memory that every tenant's worker maps.

    first worker     build_model ─▶ NAME.safetensors        as training reads it     ─┐
                     fuse        ─▶ NAME-DTYPE.safetensors  as rollouts read it      ─┤ written once, under a lock
    every worker     a model without memory (`meta`) ─▶ its parameters are views of the mapped file

NAME is a hash of what decides the base: the keys of `model` with its seed, or the folder's files with sizes and times.
A page of the file is in memory once, however many processes map it. The mapping is private: a write would stay in its
own process.

Invariant: a base read from a file has the bits of `build_model`.
"""

from __future__ import annotations

import fcntl
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmux.engines.adapters.lora import inject_adapter
from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.engines.model.model_io import build_model, build_skeleton, weight_paths
from rlmux.engines.model.transformer import DecoderWeights
from rlmux.engines.model.weight_layout import file_sizes
from rlmux.engines.model.weights import WeightFile, read_tensors, write_tensors
from rlmux.engines.residency import release_storage
from rlmux.rl.config import ModelConfig, TrainingConfig
from rlmux.rl.memory.adapter_base import base_name


def build_trained_model(
    config: TrainingConfig, vocab_size: int, *, device: str, bases: Path | None
) -> tuple[PreTrainedModel, bool]:
    """The float32 model in host memory that a pipeline trains, its adapter in place; and whether its base is shared.

    A base is shared if training computes in float32 on a core and has a folder for it.
    """
    is_float32 = config.train.dtype == "float32"
    is_shared = bases is not None and config.adapter is not None and device == "cpu" and is_float32
    if is_shared and bases is not None:
        base = SharedBase(folder=bases, model=config.model, vocab_size=vocab_size, seed=config.model_seed)
        model = base.build()
    else:
        model = build_model(config.model, vocab_size, config.model_seed)
    if config.adapter is not None:
        inject_adapter(model, config.adapter, config.seed)
    return model, is_shared


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

"""The folder that a server reads its model from: config.json, and names of files that lie elsewhere.

    checkpoint folder ── links ──▶ folder ──▶ server                      nothing is written
    new model ── written once, in the dtype of sampling ──▶ folder
    a version's file ── a second name for it ──▶ folder                   it is not written over while it is shown
    an adapter's file ── the same, with its config ──▶ a folder inside    the base stays

The folder lies in shared memory where there is one, so no version touches a disk. Only weights whose names are not the
hub's (experts that are stacked) are written again.

A module of its own: it knows files and nothing of servers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlmux.engines.adapters.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    adapter_config_file,
    inject_adapter,
    trained_parameters,
)
from rlmux.engines.model.mapped_file import SHARED_MEMORY
from rlmux.engines.model.model_io import build_model, build_skeleton, folder_config, weight_paths
from rlmux.engines.model.weight_layout import with_hub_names
from rlmux.engines.model.weights import MODEL_FILE, Rounded, WeightFile, read_weights, write_tensors
from rlmux.rl.config import AdapterConfig, ModelConfig

_WEIGHTS = (".safetensors", ".bin", ".index.json")
"""Endings of a checkpoint's files of weights. A server gets these and config.json: no tokenizer, and no
generation_config.json, whose top-p and penalties would be applied to what is sampled."""


def new_folder() -> Path:
    """A folder for one server, in shared memory where there is one, readable by its owner alone."""
    is_shared = os.access(SHARED_MEMORY, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="rlmux-server-", dir=SHARED_MEMORY if is_shared else None))


class ModelFolder:
    """Files of one server's model."""

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        vocab_size: int,
        seed: int,
        dtype: str,
        adapter: AdapterConfig | None = None,
    ) -> None:
        """Shows the pipeline's first weights. `dtype`: the server's, which a new model is written in. `adapter`: what
        later versions are, beside the first weights.

        Raises UserError for a checkpoint that cannot be used.
        """
        self.path = path
        self._model = model
        self._vocab_size = vocab_size
        self._seed = seed
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._adapter = adapter
        self.adapter_path: Path | None = None
        """Folder of the adapter that is shown; None: the base alone, as an adapter begins."""
        self._version: Mapping[str, Tensor] | None = None
        """Tensors of the version that is shown, under the names of its file; None: the first weights."""
        self.show_first()

    def show_first(self) -> None:
        """The weights that the pipeline begins with, of its checkpoint or of its seed."""
        self._clear()
        if self._model.path is None:
            model = build_model(self._model, self._vocab_size, self._seed)
            model.config.architectures = [type(model).__name__]  # without it vLLM serves embeddings
            model.config.save_pretrained(self.path)
            tensors = Rounded(dict(model.named_parameters()), self._dtype)
            write_tensors(self.path / MODEL_FILE, with_hub_names(tensors), {})
            return
        checkpoint = Path(self._model.path)
        folder_config(checkpoint, self._vocab_size)
        for file in sorted(checkpoint.iterdir()):
            if file.name == "config.json" or file.name.endswith(_WEIGHTS):
                (self.path / file.name).unlink(missing_ok=True)
                (self.path / file.name).symlink_to(file.resolve())

    def show(self, path: Path, version: int) -> Mapping[str, Tensor]:
        """A version's weights in place of those before; returns its tensors, under the names in its file.

        Raises PipelineError for a damaged file.
        """
        tensors = read_weights(path, version)
        if self._adapter is not None:
            self._show_adapter(f"version-{version}")
            _name_again(path, self._adapter_file)
            self._version = tensors
            return tensors
        named = with_hub_names(tensors)
        self._clear()
        if named.keys() == tensors.keys():
            _name_again(path, self.path / MODEL_FILE)
        else:
            write_tensors(self.path / MODEL_FILE, named, {})
        self._version = tensors
        return tensors

    def show_others(self) -> None:
        """Weights that are none of the pipeline's, to see whether a server that runs already takes them."""
        tensors = dict(build_model(self._model, self._vocab_size, self._seed).named_parameters())
        generator = torch.Generator().manual_seed(1)
        others = {
            name: tensor.detach() + 0.1 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in tensors.items()
        }
        self._clear()
        write_tensors(self.path / MODEL_FILE, with_hub_names(Rounded(others, self._dtype)), {})

    def show_other_adapter(self) -> None:
        """An adapter that is none of the pipeline's, to see whether a server takes one."""
        skeleton = build_skeleton(self._model, self._vocab_size)
        inject_adapter(skeleton, self._given_adapter, self._seed)
        generator = torch.Generator().manual_seed(1)
        others = {
            name: 0.1 * torch.randn(parameter.shape, generator=generator)
            for name, parameter in trained_parameters(skeleton).items()
        }
        self._show_adapter("probe")
        write_tensors(self._adapter_file, others, {})
        self._version = others

    def hide_adapter(self) -> None:
        """The base alone again."""
        self._clear_adapter()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights that are shown, under the hub's names, each mapped from its file; none of files that are not
        safetensors."""
        if self._version is not None and self._adapter is None:
            return with_hub_names(self._version)
        files = [WeightFile(path) for path in weight_paths(self.path)]
        return {name: file[name] for file in files for name in file}

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """[tokens] float32: log-probs of sampled tokens behind a prompt, by transformers, with the weights shown.

        Computed on the CPU in the server's dtype, over the mapped bytes of files: no copy of the model is made where a
        file has this dtype and the names of transformers.
        """
        model = build_skeleton(self._model, self._vocab_size)
        shown = self._version if self._adapter is None else None
        found = {name: tensor.to(self._dtype) for name, tensor in (shown or self.tensors).items()}
        own = dict(model.named_parameters())
        if own.keys() <= found.keys():
            model.load_state_dict({name: found[name] for name in own}, strict=False, assign=True)
            model.tie_weights()
        else:
            model = build_model(self._model, self._vocab_size, self._seed)
        if self._adapter is not None and self._version is not None:
            inject_adapter(model, self._adapter, self._seed)
            for name, parameter in trained_parameters(model).items():
                parameter.copy_(self._version[name])
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)

    def _show_adapter(self, name: str) -> None:
        self._clear_adapter()
        self.adapter_path = self.path / name
        self.adapter_path.mkdir()
        (self.adapter_path / ADAPTER_CONFIG_FILE).write_bytes(adapter_config_file(self._given_adapter, str(self.path)))

    @property
    def _given_adapter(self) -> AdapterConfig:
        assert self._adapter is not None
        return self._adapter

    @property
    def _adapter_file(self) -> Path:
        assert self.adapter_path is not None
        return self.adapter_path / ADAPTER_FILE

    def _clear_adapter(self) -> None:
        self._version = None
        if self.adapter_path is not None:
            shutil.rmtree(self.adapter_path)
            self.adapter_path = None

    def _clear(self) -> None:
        self._version = None
        for file in self.path.iterdir():
            if file.name.endswith(_WEIGHTS):
                file.unlink()


def _name_again(path: Path, name: Path) -> None:
    """A second name for a file of this file system, which it keeps when it is given up; else a link to the first."""
    try:
        os.link(path, name)
    except OSError:
        name.symlink_to(path.resolve())

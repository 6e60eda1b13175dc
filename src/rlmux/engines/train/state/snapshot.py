"""A snapshot of a train engine for a checkpoint, which is written while training continues.

    TorchTrainEngine.snapshot() ─▶ TrainSnapshot ─▶ write(folder), perhaps in another thread

Invariant: no tensor here shares memory with what the engine trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlmux.engines.adapters.lora import ADAPTER_CONFIG_FILE, adapter_config_file
from rlmux.engines.model.weight_checksum import CHECKSUM
from rlmux.engines.model.weights import SHA256, read_metadata, weights_sha256, write_copies
from rlmux.engines.train.state.checkpoint import begin_checkpoint, end_checkpoint, folder_aside
from rlmux.engines.train.state.row_files import RowFiles
from rlmux.rl.config import TrainingConfig
from rlmux.rl.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSnapshot:
    """A train engine's state between two optimizer steps."""

    state: Mapping[str, Any]
    """Numbers for state.json, the weights' checksum among them."""
    files: Mapping[str, bytes]
    """Small files by name: the model's config, the tokenizer's files."""
    marks: Mapping[str, str]
    """Fields of the origin, for state.json and for the metadata of every file of tensors."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors by file name and tensor name, in host memory. Empty for a model in parts."""
    weights_file: str
    """Name of the file with the weights."""
    rows: RowFiles | None = None
    """A rank's rows of a model in parts, in host memory; None where the folder aside has the files of tensors."""
    is_of_first: bool = True
    """Whether this is the rank that ends the checkpoint; others write their rows."""

    def write(self, folder: Path) -> str | None:
        """Write a durable checkpoint folder; returns the SHA-256 of its weights, on other ranks than the first None.

        Raises OSError where it cannot be written, on the first rank for any rank.
        """
        if self.rows is not None:
            self.rows.write()
        if not self.is_of_first:
            return None
        if self.rows is not None:
            self.rows.join()
        if self.tensors:
            self._write_tensors(begin_checkpoint(folder))
        aside = folder_aside(folder)
        for name, content in self.files.items():
            (aside / name).write_bytes(content)
        sha256 = read_metadata(aside / self.weights_file)[SHA256]
        end_checkpoint(folder, {**self.state, SHA256: sha256, **self.marks})
        return sha256

    def _write_tensors(self, aside: Path) -> None:
        weights = self.tensors[self.weights_file]
        sums: dict[str, str] = {CHECKSUM: self.state[CHECKSUM], SHA256: weights_sha256(weights)}
        for name, copies in self.tensors.items():
            metadata = {"version": str(self.state["version"]), **self.marks}
            write_copies(aside / name, copies, metadata | (sums if name == self.weights_file else {}))


def model_files(config: Any, model: Any, vocabulary: Vocabulary, training: TrainingConfig) -> dict[str, bytes]:
    """The small files of a checkpoint by name, as Hugging Face and peft read them: the config of the model or of its
    adapter, and the tokenizer."""
    config.architectures = [type(model).__name__]
    config.eos_token_id = vocabulary.eos_token
    config.pad_token_id = vocabulary.pad_token
    with tempfile.TemporaryDirectory(prefix="rlmux-") as folder:
        if training.adapter is None:
            config.save_pretrained(folder)
        else:
            content = adapter_config_file(training.adapter, training.model.path)
            (Path(folder) / ADAPTER_CONFIG_FILE).write_bytes(content)
        vocabulary.save_pretrained(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}

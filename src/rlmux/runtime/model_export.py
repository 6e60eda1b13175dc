"""A checkpoint of a run as a folder that transformers, peft and vLLM load.

    PIPELINE/step_12/ ── copy, verify ──▶ DIR.tmp-PID/ ── rename ──▶ DIR/

    full model          config.json  model.safetensors  tokenizer files
    adapter             adapter_config.json  adapter_model.safetensors  tokenizer files;  base/ if the run made its base
    adapter, merged     as a full model

Optimizer, reference and prompts stay behind. A run that is going on may prune a checkpoint during the copy: the newest
is then chosen anew.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rlmux.core.errors import CheckpointError, UserError
from rlmux.rl.config import TrainingConfig
from rlmux.runtime.checks.replay_verification import submissions_of
from rlmux.runtime.weights.checkpoints import CheckpointStore, model_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GENERATION_FILE = "generation_config.json"
_BASE = "base"
"""Folder of a base that the run made, beside its adapter."""


def export_model(run: Path, name: str, out: Path, *, step: int | None = None, is_merged: bool = False) -> int:
    """Write a pipeline's weights into a new or empty folder; returns their step.

    `step`: step of the checkpoint; None: the newest. `is_merged`: merge the adapter into its base. Raises UserError for
    a step that was not kept, a pipeline without an adapter to merge, and a folder that is not empty or cannot be
    written; CheckpointError and PipelineError for a damaged checkpoint.
    """
    _check_empty(out)
    store = CheckpointStore(run / name)
    aside = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        exported = _copy(store, name, step, aside)
        _complete(run, name, aside, out, is_merged=is_merged)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}; accepted: a folder that can be made") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return exported


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out}: it is not empty; accepted: a folder that does not exist or is empty")


def _copy(store: CheckpointStore, name: str, step: int | None, aside: Path) -> int:
    """Copy the model's files of a checkpoint, and verify them; returns its step."""
    while True:
        kept = store.steps()
        chosen = step if step is not None else max(kept, default=None)
        if chosen is None:
            raise UserError(f"{name} has no checkpoint; accepted: a pipeline that trains, after its first checkpoint")
        if chosen not in kept:
            there = ", ".join(map(str, kept)) or "none is kept"
            raise UserError(f"--step {chosen}: {name} kept no checkpoint of it; accepted: {there}")
        try:
            _copy_files(store.path(chosen), aside, chosen)
            return chosen
        except (FileNotFoundError, CheckpointError):
            if chosen in store.steps():  # else it was pruned meanwhile
                raise


def _copy_files(checkpoint: Path, aside: Path, version: int) -> None:
    from rlmux.engines.model.weight_layout import with_hub_names
    from rlmux.engines.model.weights import read_weights, write_copies

    for file in model_files(checkpoint):
        shutil.copyfile(checkpoint / file, aside / file)
    for weights in aside.glob("*.safetensors"):
        tensors = read_weights(weights, version)
        named = with_hub_names(tensors)
        if named.keys() != tensors.keys():
            write_copies(weights, named, {"version": str(version)})


def _complete(run: Path, name: str, aside: Path, out: Path, *, is_merged: bool) -> None:
    """Add what the checkpoint lacks: the base of an adapter, and generation_config.json."""
    from rlmux.engines.adapters.lora import ADAPTER_CONFIG_FILE

    config = next(submission.config for submission in submissions_of(run) if submission.config.name == name)
    if not (aside / ADAPTER_CONFIG_FILE).is_file():
        if is_merged:
            raise UserError(f"--merge: {name} trains a whole model; accepted: a pipeline with an adapter")
        _copy_generation_config(config, aside)
    elif is_merged:
        _merge(config, aside)
        _copy_generation_config(config, aside)
    else:
        _set_base(config, aside, out)


def _copy_generation_config(config: TrainingConfig, aside: Path) -> None:
    if config.model.path is not None and (given := Path(config.model.path) / _GENERATION_FILE).is_file():
        shutil.copyfile(given, aside / _GENERATION_FILE)


def _merge(config: TrainingConfig, aside: Path) -> None:
    """Replace the adapter by the merged model."""
    from rlmux.engines.adapters.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILE, merged_model

    merged_model(_base_of(config), aside).save_pretrained(aside)
    for file in (ADAPTER_CONFIG_FILE, ADAPTER_FILE):
        (aside / file).unlink()


def _set_base(config: TrainingConfig, aside: Path, out: Path) -> None:
    """Name the adapter's base by its absolute path; write a base that the run made into the folder `base`."""
    from rlmux.engines.adapters.lora import ADAPTER_CONFIG_FILE
    from rlmux.rl.vocabulary import load_vocabulary

    base = out.absolute() / _BASE if config.model.path is None else Path(config.model.path).absolute()
    if config.model.path is None:
        _base_of(config).save_pretrained(aside / _BASE)
        load_vocabulary(config.model).save_pretrained(aside / _BASE)
    fields = json.loads((aside / ADAPTER_CONFIG_FILE).read_bytes()) | {"base_model_name_or_path": str(base)}
    (aside / ADAPTER_CONFIG_FILE).write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


def _base_of(config: TrainingConfig) -> PreTrainedModel:
    """The adapter's base, float32."""
    from rlmux.engines.model.model_io import build_model
    from rlmux.rl.vocabulary import load_vocabulary

    vocabulary = load_vocabulary(config.model)
    model = build_model(config.model, vocabulary.vocab_size, config.model_seed)
    model.config.eos_token_id, model.config.pad_token_id = vocabulary.eos_token, vocabulary.pad_token
    return model

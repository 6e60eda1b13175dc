"""Checkpoints as folders: written aside, checked when read.

    step_7/
      config.json  model.safetensors  tokenizer files    a Hugging Face model
      optimizer.safetensors                              moments
      reference.safetensors                              with a KL penalty only
      backlog.bin                                        with interruptible rollouts only
      state.json                                         numbers, and length and sha256 of each file and of itself

Invariant: a folder without `.tmp-` or `.old-` in its name is whole: state.json is written last, everything is
fsynced, then the folder is renamed. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from rlmux.core.errors import CheckpointError
from rlmux.engines.durable_files import sync_path

STATE_FILE = "state.json"
PROMPTS = "prompts"
"""Key of state.json with the queue of prompts under tail batching."""
STEP_NOTE = "step_note"
"""Key of state.json with the fields of the step's note in the log."""
FORMAT = 2
"""Format of state.json. A reader refuses a newer one and reads older ones."""


def folder_aside(folder: Path) -> Path:
    """Where the files of a checkpoint are written before the folder has its name."""
    return folder.with_name(f"{folder.name}.tmp-{os.getpid()}")


def begin_checkpoint(folder: Path) -> Path:
    """Make the empty `folder_aside` of a checkpoint."""
    folder.parent.mkdir(exist_ok=True)  # never the run's own folder: one that was removed stays removed
    aside = folder_aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    return aside


def end_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Add `state` with the checksums of all files to the folder aside, and rename it to `folder`."""
    aside = folder_aside(folder)
    names = sorted(path.name for path in aside.iterdir())
    files = {name: _file_sha256(aside / name) for name in names}
    sizes = {name: (aside / name).stat().st_size for name in names}
    whole = {"format": FORMAT, **state, "files": files, "bytes": sizes}
    (aside / STATE_FILE).write_text(json.dumps({**whole, "sha256": _state_sha256(whole)}, indent=1) + "\n")
    for name in [*names, STATE_FILE]:
        sync_path(aside / name)
    sync_path(aside)
    _put_in_place(aside, folder)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The numbers in state.json, after a check of every file's bytes. Raises CheckpointError for damage."""
    state = read_state(folder)
    for name, expected in state["files"].items():
        if _file_sha256(folder / name) != expected:
            raise CheckpointError(f"{folder / name} is damaged: its sha256 is not the one in {STATE_FILE}")
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """The numbers in state.json, after a check of it and of every file's length. Raises CheckpointError for damage.

    Reads no other file, however large they are.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a whole checkpoint: no {STATE_FILE}")
    try:
        state = dict(json.loads(path.read_bytes()))
        is_whole = state.pop("sha256") == _state_sha256(state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its own sha256 does not fit")
    if state["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}; this rlmux reads up to {FORMAT}")
    sizes = state.get("bytes", {})  # a checkpoint of 0.1.0 has none
    for name in state["files"]:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not a whole checkpoint: no {name}")
        size = (folder / name).stat().st_size
        if size != sizes.get(name, size):
            raise CheckpointError(f"{folder / name} is damaged: {size} bytes instead of {sizes[name]}")
    return state


def _put_in_place(aside: Path, folder: Path) -> None:
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _state_sha256(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

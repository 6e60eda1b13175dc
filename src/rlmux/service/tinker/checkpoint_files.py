"""Files of saves: each save has its own, and it goes once nothing needs it.

    models/PIPELINE/state-7-NAME              save_weights, request 7 of its model
                    sampler-8.safetensors     save_weights_for_sampler, request 8
                    weights-NAME              save_weights of a version that named folders by checkpoints alone

A name points to a file, so the weights of a path never change. A file is needed by the name that points to
it, by samplers of its weights, by the save that is to write it, and by a load that may have to be done again. What is
needed is computed from the registry each time; nothing counts references.

A module of its own: it is the only code of the front that deletes files.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from rlmux.service.tinker.futures import Futures
from rlmux.service.tinker.registry import Registry

_OF_SAVE = re.compile(r"state-[0-9]+-.+|sampler-[0-9]+\.safetensors|weights-.+")
_ASIDE = re.compile(r"\.(tmp|old)-[0-9]+$")
"""End of a folder's name while it is written or replaced; see engines/train/state/checkpoint.py."""


class Files:
    """The files of a front's saves."""

    def __init__(self, registry: Registry, futures: Futures) -> None:
        self._registry = registry
        self._futures = futures
        self.are_kept = False
        """Nothing is removed: requests are applied again, and later ones may need what earlier ones give up."""
        self.have_ended_users = False
        """A session has ended since `collect_all`, for which a worker may have been loading a file."""

    def collect_all(self) -> None:
        """Remove everything that nothing needs any more, where sessions have ended."""
        if self.have_ended_users:
            self.have_ended_users = False
            self.collect(model.folder for model in self._registry.models.values())

    def collect(self, folders: Iterable[Path]) -> None:
        """Remove what saves left in these folders of models and nothing needs. What cannot be removed stays for the
        next time."""
        if self.are_kept or not (found := dict.fromkeys(folders)):
            return
        needed = self._needed()
        for folder in found:
            for file in sorted(folder.glob("*")):
                if _OF_SAVE.fullmatch(file.name) and needed.isdisjoint((file, folder / _ASIDE.sub("", file.name))):
                    _remove(file)

    def _needed(self) -> set[Path]:
        """Files and folders that a name, a sampler or a request needs."""
        registry = self._registry
        listed = [each.folder for each in registry.checkpoints.values()]
        living = [each for each in registry.samplers.values() if not each.is_gone]
        sampled = [each.weights for each in (*living, *self._futures.samplers()) if each.weights]
        training = [each for each in registry.models.values() if not each.session.is_over]
        loads = [folder for model in training for folder in model.loads.values()]
        return {*listed, *registry.being_saved, *loads, *sampled, *(file.parent for file in sampled)}


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()

"""verl's plug-in: importing this module registers the trainer "rlmux" (`trainer.v1.trainer_mode=rlmux`).

    import verl ── entry point `verl.plugins` ──▶ this module ──▶ register_trainer("rlmux")

verl only loads an entry point, and calls nothing of it, so the registration is what the import does. Without rlmux
installed: `share.py`, `share_adapters.py` and this file on the path, and VERL_USE_EXTERNAL_MODULES=share_verl.
"""

from __future__ import annotations

import importlib

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

_HERE = __name__.rpartition(".")[0]
_adapters = importlib.import_module(f"{_HERE}.share_adapters".lstrip("."))
_share = importlib.import_module(f"{_HERE}.share".lstrip("."))

RlmuxTrainer = register_trainer("rlmux")(_adapters.verl_trainer(PPOTrainerSync, _share.join))

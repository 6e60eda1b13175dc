"""`rlmux doctor --engine`: a rollout engine's features and determinism on this machine.

words ──▶ config ──▶ profiling.engine_probe ──▶ a table, or JSON
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.rl.config import EngineConfig, ModelConfig, RolloutConfig, TrainingConfig

_NAMES = ("rlmux", "vllm", "sglang")
_SLOTS = 64


def probed_config(name: str, python: str | None, url: str | None, model: str | None, num: int) -> TrainingConfig:
    """The pipeline that is probed. Raises UserError for words that do not go together."""
    if name not in _NAMES:
        raise UserError(f"--engine {name}: accepted: {', '.join(_NAMES)}")
    if num < 2:
        raise UserError(f"--trajectories {num}: accepted: 2 or more")
    path = None if python is None else str(Path(python).absolute())
    try:
        engine = EngineConfig(name=name, python=path, url=url)
    except UserError as error:
        raise UserError(f"--engine {name}: {error}") from None
    rollout = RolloutConfig(num_slots=max(_SLOTS, num), max_new_tokens=16, max_prompt_tokens=32, engine=engine)
    sizes = ModelConfig(hidden_size=128, intermediate_size=256) if model is None else ModelConfig(path=model)
    return TrainingConfig(name="doctor", model=sizes, rollout=rollout)  # vLLM's CPU kernels take no heads below 32


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """A table of what was tried, the determinism class below it."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['engine']} {found['version'] or ''} on {found['device']}".replace("  ", " "))
    capabilities = dict(found.get("capabilities", {}))
    remarks, freed = capabilities.pop("remarks", ()), capabilities.pop("freed_bytes", 0.0)
    for name, is_there in capabilities.items():
        if isinstance(is_there, bool):
            print(f"  {name.ljust(22)}  {_shown(name, is_there, capabilities, freed)}")
    for name, is_equal in found["checks"].items():
        print(f"  {name.ljust(22)}  {'same bits' if is_equal else 'other bits'}")
    for remark in remarks:
        print(f"  {remark}")
    print(f"promise: {found['promise']} ({found['trajectories']} trajectories, {found['seconds']:.1f} s)")


def _shown(name: str, is_there: bool, capabilities: Mapping[str, Any], freed_bytes: float) -> str:
    """Whether a capability is there, with what it frees and takes."""
    if name == "reloads":
        seconds = f"{capabilities['load_s']:.2f} s a version"
        return f"yes, {seconds}" if is_there else f"no, it is restarted: {seconds}"
    if name == "frees_memory" and is_there:
        sleep_s, wake_s = capabilities["sleep_s"], capabilities["wake_s"]
        return f"yes, {freed_bytes / 1e9:.3f} GB; asleep in {sleep_s:.2f} s, awake in {wake_s:.2f} s"
    return "yes" if is_there else "no"

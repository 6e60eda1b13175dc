"""A rollout engine that a user wrote, made from its name.

    rollout.engine: module:name ──▶ name(config, vocab_size=, is_single_turn=, device=) ──▶ RolloutEngine

`config` is the pipeline's TrainingConfig, its `rollout.engine.args` what the user wrote there. `is_single_turn`: no
trajectory goes on after its first answer. `device`: "cpu" or "cuda". What the engine keeps of the promises is probed,
as it is of every engine (determinism_probe.py).
"""

from __future__ import annotations

from rlmux.core.errors import PipelineError
from rlmux.engines.rollout.protocol import RolloutEngine
from rlmux.rl.config import TrainingConfig
from rlmux.rl.user_code.engine_check import call_user_engine

_NEEDED = tuple(name for name in vars(RolloutEngine) if not name.startswith("_"))
"""Methods and attributes of the protocol."""


def make_user_engine(config: TrainingConfig, *, vocab_size: int, is_single_turn: bool, device: str) -> RolloutEngine:
    """Raises PipelineError, in one line, for an engine that cannot be made or lacks a method of the protocol."""
    engine: RolloutEngine = call_user_engine(
        config, vocab_size=vocab_size, is_single_turn=is_single_turn, device=device
    )
    missing = [each for each in _NEEDED if not hasattr(engine, each)]
    if missing:
        raise PipelineError(
            f"rollout.engine: {config.rollout.engine.name} made a {type(engine).__name__} without "
            f"{', '.join(missing)}; accepted: all of rlmux.engines.rollout.protocol.RolloutEngine"
        )
    return engine

"""What a rollout engine can do and keep on this machine, found by trying it.

config ──▶ rl.engine_check ──▶ engine ──▶ capabilities (servers) ──▶ probe ──▶ determinism class
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from rlmux.engines.determinism_probe import probe_rollout
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.engines.servers.factory import make_server_engine
from rlmux.engines.user_engine import make_user_engine
from rlmux.rl.config import TrainingConfig
from rlmux.rl.determinism_class import determinism_class_of
from rlmux.rl.user_code.engine_check import check_engine
from rlmux.rl.vocabulary import load_vocabulary


def probe_on_this_machine(config: TrainingConfig, num_trajectories: int) -> dict[str, Any]:
    """Keys: engine, version, device, capabilities, checks, promise, seconds. Raises UserError, ServerGoneError."""
    given = config.rollout.engine
    version = check_engine(given, config.model)
    torch.set_num_threads(config.train.num_threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab_size = load_vocabulary(config.model).vocab_size
    found: dict[str, Any] = {"engine": given.name, "version": version, "device": device}
    if given.is_server:
        server = make_server_engine(
            config, vocab_size=vocab_size, is_single_turn=True, device=device, is_remeasured=True
        )
        try:
            report = probe_rollout(server, num_trajectories=num_trajectories)
        finally:
            server.close()
        found["capabilities"] = asdict(server.capabilities)
    elif given.is_of_user:
        user = make_user_engine(config, vocab_size=vocab_size, is_single_turn=True, device=device)
        report = probe_rollout(user, num_trajectories=num_trajectories)
    else:
        ours = SlotRolloutEngine(config.model, config.rollout, vocab_size=vocab_size, seed=config.seed, device=device)
        report = probe_rollout(ours, num_trajectories=num_trajectories)
    return found | {
        "checks": {check.name: check.is_equal for check in report.checks},
        "promise": determinism_class_of(report.checks).value,
        "trajectories": num_trajectories,
        "seconds": round(report.seconds, 2),
    }

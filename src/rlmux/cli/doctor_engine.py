"""`rlmux doctor --engine`: what a rollout engine can do and promise on this machine, found by trying it.

config ──▶ rl.engine_check ──▶ engine ──▶ capabilities (servers) ──▶ probe ──▶ class of promise
"""

from __future__ import annotations

import json
from dataclasses import asdict
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
        engine = EngineConfig(name=name, python=path, url=url)  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"--engine {name}: {error}") from None
    rollout = RolloutConfig(num_slots=max(_SLOTS, num), max_new_tokens=16, max_prompt_tokens=32, engine=engine)
    sizes = ModelConfig(hidden_size=128, intermediate_size=256) if model is None else ModelConfig(path=model)
    return TrainingConfig(name="doctor", model=sizes, rollout=rollout)  # vLLM's CPU kernels take no heads below 32


def probe(config: TrainingConfig, num_trajectories: int) -> dict[str, Any]:
    """Keys: engine, version, device, capabilities, checks, promise, seconds. Raises UserError, ServerGoneError."""
    import torch

    from rlmux.engines.rollout import SlotRolloutEngine
    from rlmux.engines.servers.factory import make_server_engine
    from rlmux.engines.servers.probe import probe_engine
    from rlmux.rl.engine_check import check_engine
    from rlmux.rl.promise import promise_of
    from rlmux.rl.vocabulary import load_vocabulary

    given = config.rollout.engine
    version = check_engine(given, config.model)
    torch.set_num_threads(config.train.num_threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab_size = load_vocabulary(config.model).vocab_size
    found: dict[str, Any] = {"engine": given.name, "version": version, "device": device}
    if given.is_server:
        server = make_server_engine(
            config, vocab_size=vocab_size, is_single_turn=True, device=device, is_measured_anew=True
        )
        try:
            report = probe_engine(server, num_trajectories=num_trajectories)
        finally:
            server.close()
        found["capabilities"] = asdict(server.capabilities)
    else:
        ours = SlotRolloutEngine(config.model, config.rollout, vocab_size=vocab_size, seed=config.seed, device=device)
        report = probe_engine(ours, num_trajectories=num_trajectories, is_recomputation_avoidable=True)
    return found | {
        "checks": {check.name: check.is_equal for check in report.checks},
        "promise": promise_of(report.checks).value,
        "trajectories": num_trajectories,
        "seconds": round(report.seconds, 2),
    }


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """A table of what was tried, the class of promise below it."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['engine']} {found['version'] or ''} on {found['device']}".replace("  ", " "))
    capabilities = dict(found.get("capabilities", {}))
    remarks, freed = capabilities.pop("remarks", ()), capabilities.pop("freed_bytes", 0.0)
    for name, is_there in capabilities.items():
        value = f"yes, {freed / 1e9:.3f} GB" if name == "frees_memory" and is_there else "yes" if is_there else "no"
        print(f"  {name.ljust(22)}  {value}")
    for name, is_equal in found["checks"].items():
        print(f"  {name.ljust(22)}  {'same bits' if is_equal else 'other bits'}")
    for remark in remarks:
        print(f"  {remark}")
    print(f"promise: {found['promise']} ({found['trajectories']} trajectories, {found['seconds']:.1f} s)")

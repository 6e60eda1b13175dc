"""Unfinished trajectories on their way between two rollout workers: through the controller their KV is bytes.

rollout worker ── packed ──▶ controller ──▶ unpacked ── rollout worker
"""

from __future__ import annotations

from dataclasses import replace

from rlmux.rl.types import PartialTrajectory


def packed(partial: PartialTrajectory) -> PartialTrajectory:
    """The same with its KV cache as bytes: the controller passes it on without importing torch (a second)."""
    if partial.kv is None:
        return partial
    from safetensors.torch import save

    return replace(partial, kv=save({"kv": partial.kv.contiguous()}))


def unpacked(partial: PartialTrajectory) -> PartialTrajectory:
    """The same with its KV cache as a tensor, where it has one."""
    if partial.kv is None:
        return partial
    from safetensors.torch import load

    return replace(partial, kv=load(partial.kv)["kv"])

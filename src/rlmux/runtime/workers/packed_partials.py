"""Unfinished trajectories in transit between two rollout workers, their KV as bytes.

rollout worker ── packed ──▶ controller ──▶ unpacked ── rollout worker

A module of its own: it keeps torch out of the controller.
"""

from __future__ import annotations

from dataclasses import replace

from rlmux.rl.types import PartialTrajectory


def packed(partial: PartialTrajectory) -> PartialTrajectory:
    """The trajectory with its KV cache as bytes: the controller forwards it without importing torch (a second)."""
    if partial.kv is None:
        return partial
    from safetensors.torch import save

    return replace(partial, kv=save({"kv": partial.kv.contiguous()}))


def unpacked(partial: PartialTrajectory) -> PartialTrajectory:
    """The trajectory with its KV cache, if any, as a tensor."""
    if partial.kv is None:
        return partial
    from safetensors.torch import load

    return replace(partial, kv=load(partial.kv)["kv"])

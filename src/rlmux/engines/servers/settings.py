"""Settings and requests of a server: frozen values, independent of the kind of server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NOISE_BITS = 62
"""Bits of a request's seed: every engine's sampler takes them as a signed 64-bit integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Sizes that a server is started with."""

    folder: Path
    """Hugging Face folder of the model: config.json and weights, no tokenizer."""
    num_slots: int
    """Sequences that it decodes at once."""
    max_len: int
    """Tokens of the longest sequence."""
    device: str
    """`cpu` or `cuda`."""
    num_threads: int
    dtype: str
    """Dtype of sampling: `float32` or `bfloat16`."""
    memory_bytes: float
    """Device memory that the server may take: weights, KV cache and its own."""
    device_bytes: float
    """Memory of its whole GPU; 0 on a CPU."""
    args: Sequence[str]
    """Further arguments of the command, from the user's file: one that is given there holds."""

    @property
    def memory_fraction(self) -> str:
        """Part of the GPU's memory, with three digits, as servers take it on their command line."""
        return f"{min(0.98, self.memory_bytes / self.device_bytes):.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """One request to a server: continue these tokens."""

    request_id: str
    """Name of the request, unlike all others that this server ever got."""
    tokens: Sequence[int]
    """Prompt and everything so far."""
    seed: int
    """Seed of the noise, below 2 ** NOISE_BITS."""
    temperature: float
    max_tokens: int
    stop_tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An event of an answer: new tokens, or the end."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each of `tokens` under the distribution that it was drawn from."""
    finish: str | None
    """`stop`, `length`, `abort`, or None while more is to come."""
    versions: Sequence[str] = ()
    """Reported weight versions of the tokens; empty without a report."""

"""Settings and requests of a server: frozen values, independent of the kind of server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    tensor_parallel: int = 1
    """GPUs that a copy of the model is split over."""
    data_parallel: int = 1
    """Copies of the model."""
    adapter_rank: int = 0
    """Rank of the adapters that it serves; 0 without adapters."""
    takes_tensors: bool = False
    """Whether it is started to take weights through buffers of its GPUs."""
    starts_empty: bool = False
    """Whether it starts with random weights, which the first ones replace: no file is read at the start."""
    without: Sequence[str] = ()
    """Flags of the dialect's own command that are left out."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables from the user's file, in place of the dialect's; None: unset."""
    args: Sequence[str]
    """Further arguments of the command, from the user's file: one that is given there holds."""

    def command(self, words: Sequence[str]) -> list[str]:
        """A dialect's own words without those that the user left out, then the user's."""
        kept, is_left_out = [], False
        for word in words:
            if word.startswith("--"):
                is_left_out = word in self.without
            if not is_left_out:
                kept.append(word)
        return [*kept, *self.args]

    def environment(self, ours: Mapping[str, str]) -> dict[str, str | None]:
        """A dialect's variables, and those of the user in place of them."""
        return {**ours, **self.variables}

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
    weights: str = ""
    """Name of the weights: what the server has cached under others does not count."""
    adapter: str = ""
    """Adapter to sample with; empty: the base alone."""
    rank: int | None = None
    """Copy of the model that is to sample it; None: the server chooses."""


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
    prompt_tokens: int = 0
    """Tokens of the request's context, in the one event of an answer that counts them; 0 in others."""
    cached_tokens: int = 0
    """Those of them that the prefix cache served."""

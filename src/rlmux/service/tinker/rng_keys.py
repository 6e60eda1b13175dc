"""Random-number keys of sampled sequences: a function of the request, not of its arrival.

    a seed is given    (seed, sample index)
    none is given      hash(model seed, origin of the sampler, prompt, occurrence), sample index

`occurrence` counts equal prompts of a sampler in the order of their numbers there, which the client gave them, not in
the order in which its connections happened to bring them. A sampler's origin is which weights it has: of which of
its session's models, after how many updates, and how many samplers of them came before. The number that a client gives
a sampler does not go in, as a client counts it up with every attempt to reach the server; nor does a session's random
id. The same program gets the same samples in every run: alone, beside others, across a restart of the server, and from
a checkpoint.

A module of its own: reproducible sampling depends on this function alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Draws:
    """Counts the prompts of one sampler, in the order of its requests' numbers."""

    model_seed: int
    origin: str
    """Which weights the sampler has."""
    _occurrences: Counter[bytes] = field(default_factory=Counter)

    def key(self, prompt_tokens: Sequence[int], seed: int | None) -> int:
        """The key of a request's random numbers."""
        prompt = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt_tokens)).digest()
        occurrence = self._occurrences[prompt]
        self._occurrences[prompt] += 1
        if seed is not None:
            return seed
        parts = f"{self.model_seed} {self.origin} {occurrence} ".encode() + prompt
        return int.from_bytes(hashlib.sha256(parts).digest()[:8], "little")

"""The adapters that one rollout engine serves, by name, and the weight version of each.

    ""      the engine's own pipeline: an adapter, or the whole model
    NAME    a further pipeline of the same base

A trajectory names its adapter in its id; `rows` maps the rows of a batch to adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlmux.core.errors import IllegalTransitionError, UserError
from rlmux.engines.adapters.adapter_weights import AdapterWeights
from rlmux.engines.model.adapter_rows import LowRank, RowAdapters
from rlmux.engines.model.transformer import DecoderWeights
from rlmux.engines.rollout.live_trajectory import LiveTrajectory
from rlmux.rl.config import AdapterConfig


class AdapterTable:
    """Adapters over one base. All begin at version 0, where B is zero and only the base counts."""

    def __init__(
        self, base: DecoderWeights, device: torch.device, changed: Callable[[Sequence[AdapterConfig]], None]
    ) -> None:
        """`changed`: called with the `configs` after an adapter was added or removed."""
        self._shape = base.shape
        self._gains = base.gains.detach().cpu().clone()
        self._device = device
        self._weights: dict[str, AdapterWeights | None] = {}
        """None for the base without an adapter."""
        self._versions: dict[str, int] = {}
        self._changed = changed

    def add(self, name: str, adapter: AdapterConfig | None) -> None:
        """Add an adapter; None serves the base itself. Raises UserError for an existing name."""
        if name in self._weights:
            raise UserError(f"adapter {name!r} is there already; accepted: another name")
        weights = None
        if adapter is not None:
            weights = AdapterWeights(self._shape, adapter, self._device, self._gains)
        self._weights[name] = weights
        self._versions[name] = 0
        self._changed(self.configs)

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        del self._weights[name], self._versions[name]
        self._changed(self.configs)

    @property
    def names(self) -> list[str]:
        """All adapters, in the order in which they were added."""
        return list(self._weights)

    @property
    def configs(self) -> list[AdapterConfig]:
        """Distinct ranks and targets of the adapters, in a fixed order."""
        return sorted({weights.adapter for weights in self._weights.values() if weights is not None}, key=repr)

    @property
    def flats(self) -> list[Tensor]:
        """The buffer of each adapter."""
        return [weights.flat for weights in self._weights.values() if weights is not None]

    def weights(self, name: str) -> AdapterWeights | None:
        """The adapter's weights; None for the base itself. Raises UserError for an unknown name."""
        if name not in self._weights:
            served = ", ".join(repr(adapter) for adapter in self._weights)
            raise UserError(f"adapter {name!r} is not served here; accepted: {served}")
        return self._weights[name]

    def weights_to_load(self, name: str) -> AdapterWeights | None:
        """Target of a file of weights; None: the base. Raises IllegalTransitionError for a shared base."""
        weights = self.weights(name)
        if weights is None and self.configs:
            raise IllegalTransitionError("weights of a whole model came for a base that adapters stand on")
        return weights

    def version_of(self, live: LiveTrajectory) -> int:
        """Weight version of a trajectory's next tokens."""
        return self._versions[live.request.id.adapter]

    def version(self, name: str) -> int:
        """Weight version of an adapter."""
        return self._versions[name]

    def set_version(self, name: str, version: int) -> None:
        self._versions[name] = version

    def rows(
        self, names: Sequence[str | None], repeats: int = 1, *, masks: dict[str, Tensor] | None = None
    ) -> RowAdapters | None:
        """The adapter of each row, by name; None for a row whose numbers are never read.

        Each name stands for `repeats` rows. None where no adapter takes part. `masks`: those of earlier calls by
        adapter, for as many rows, which are written over: a recorded step reads them where they are.
        """
        parts: list[tuple[Sequence[Mapping[str, LowRank]], Tensor | None]] = []
        taking_part: list[str] = []
        present = {name for name in names if name is not None}
        for name, weights in self._weights.items():
            if weights is None or name not in present:
                continue
            is_others = None
            if len(present) > 1:
                others = torch.tensor([own != name for own in names], device=self._device)
                is_others = others.repeat_interleave(repeats).unsqueeze(1)
                if masks is not None:
                    is_others = masks.setdefault(name, is_others).copy_(is_others)
            parts.append((weights.layers, is_others))
            taking_part.append(name)
        return RowAdapters(parts, tuple(taking_part)) if parts else None

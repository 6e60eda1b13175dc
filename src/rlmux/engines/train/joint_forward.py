"""One forward of several tenants' micro-batches: the base computes all rows at once, each adapter its tenant's rows.

    tokens of a | tokens of b | c ... | filler          one packed row: every sequence attends within itself
        │              │          │
        └───── W x of all rows ───┴──────────┐
      B_a(A_a x_a)   B_b(A_b x_b)   0        +          in every target of every block
        │              │
    hidden of a    hidden of b   ─▶ each tenant's own head, at its own temperature

Adapters, heads and attention compute the same rows at the same sizes as alone. Only products of the base have more
rows, at numbers that a `RowProbe` found exact.

A module of its own: one model's products, where `joint_training` has stages, errors and time.

Invariant: a tenant's scores and gradient have the bits that it has alone. No row reaches a row of another tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlmux.engines.adapters.shared_base import TenantBase
from rlmux.engines.train.row_probe import RowProbe
from rlmux.engines.train.update.micro_batches import MicroBatch
from rlmux.engines.train.update.training_forward import TokenScores, hidden_states, prepare_forward, score_hidden
from rlmux.rl.config import BLOCK_TARGETS, TrainConfig

_ROWS = 32
"""Rows together are filled up to a multiple, so that few numbers of rows are probed."""
_MAX_ROWS = {"cpu": 512, "cuda": 16_384}
"""Rows of one forward, by device: on a core, more fall out of its cache and take longer than in turns."""
_MAX_OWN_ROWS = {"cpu": 160, "cuda": 4_096}
"""Rows of a micro-batch above which it gains nothing together, by device: four of 64 rows took 0.85 of their time in
turns on a core, four of 256 rows 1.07."""
_ALIGNMENT_BYTES = 64
"""Rows of other widths would begin at other alignments than alone, where kernels may sum in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One tenant's part of a joint forward."""

    model: Any
    """The tenant's model: its adapters and head."""
    train: TrainConfig
    """The size of a chunk of the head."""
    batch: MicroBatch
    """The micro-batch, on the device."""
    temperature: float
    """Divisor of the logits."""

    @property
    def num_rows(self) -> int:
        """Input tokens."""
        return len(self.batch.input_tokens)


class JointForward:
    """The model of all tenants of one base."""

    def __init__(self, base: TenantBase, train: TrainConfig) -> None:
        """`train`: decides about activation checkpointing."""
        model = base.skeleton()
        prepare_forward(model, train)
        self.probe = RowProbe(base)
        self._model: Any = model
        self._parts: list[tuple[nn.Module | None, int]] = []
        """Model, None for filler, and rows of each part of the present forward."""
        self._max_rows, self._max_own_rows = _MAX_ROWS[base.device.type], _MAX_OWN_ROWS[base.device.type]
        self._is_aligned = True
        for name, module in list(model.base_model.named_modules()):
            parent, _, leaf = name.rpartition(".")
            if leaf in BLOCK_TARGETS and isinstance(module, nn.Linear):
                setattr(model.base_model.get_submodule(parent), leaf, _JointLinear(module, name, self._parts))
                self._is_aligned &= module.in_features * module.weight.itemsize % _ALIGNMENT_BYTES == 0

    def groups(self, num_rows: Sequence[int]) -> list[list[int]]:
        """Places in `num_rows` by those that compute together; a place alone where its bits would be others."""
        groups: list[list[int]] = []
        size = self._max_rows
        for place, count in enumerate(num_rows):
            if size + count > self._max_rows:
                groups.append([])
                size = 0
            groups[-1].append(place)
            size += count
        return [part for group in groups for part in self._exact_parts(group, num_rows)]

    def _exact_parts(self, group: list[int], num_rows: Sequence[int]) -> list[list[int]]:
        is_joined = [len(group) > 1 and self._gains(num_rows[place]) for place in group]
        joined = [place for place, is_exact in zip(group, is_joined, strict=True) if is_exact]
        if len(joined) < 2 or not self.probe.is_exact(_filled(sum(num_rows[place] for place in joined))):
            return [[place] for place in group]
        return [joined, *([place] for place in group if place not in joined)]

    def _gains(self, num_rows: int) -> bool:
        """Whether a micro-batch of so many rows takes less time together, with the bits that it has alone."""
        return self._is_aligned and num_rows <= self._max_own_rows and self.probe.is_exact(num_rows)

    def score(self, rows: Sequence[Rows]) -> list[TokenScores]:
        """Scores of each, with a gradient if torch records one. Backward passes come before the next call."""
        sizes = [each.num_rows for each in rows]
        filler = _filled(sum(sizes)) - sum(sizes)
        models = [*(each.model for each in rows), None]
        self._parts[:] = [part for part in zip(models, [*sizes, filler], strict=True) if part[1]]
        batches = [each.batch for each in rows]
        nothing = batches[0].positions.new_zeros(filler)
        together = replace(
            batches[0],
            input_tokens=torch.cat([*(each.input_tokens for each in batches), nothing]),
            positions=torch.cat([*(each.positions for each in batches), nothing]),
            runs=[*(run for each in batches for run in each.runs), *([(filler, 1)] if filler else [])],
        )
        hidden = torch.split(hidden_states(self._model, together), [size for _, size in self._parts])
        return [
            score_hidden(each.model, part, each.batch, each.temperature, each.train)
            for part, each in zip(hidden, rows, strict=False)
        ]


def _filled(num_rows: int) -> int:
    return -(-num_rows // _ROWS) * _ROWS


class _JointLinear(nn.Module):
    """A projection of the base and its adapters in all tenants' models."""

    def __init__(self, base: nn.Linear, name: str, parts: Sequence[tuple[nn.Module | None, int]]) -> None:
        super().__init__()
        self.base = base
        self._name = name
        self._parts = parts

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [1, rows, width] by the operations of peft's layer, in its order."""
        result: Tensor = self.base(inputs)
        layers = [None if model is None else self._adapter(model) for model, _ in self._parts]
        if not any(layers):
            return result
        sizes = [size for _, size in self._parts]
        return result + torch.cat(
            [
                result.new_zeros(1, size, result.shape[-1]) if layer is None else _adapter_output(layer, rows)
                for layer, rows, size in zip(layers, torch.split(inputs, sizes, dim=1), sizes, strict=True)
            ],
            dim=1,
        )

    def _adapter(self, model: Any) -> Any:
        module = model.base_model.get_submodule(self._name)
        return module if hasattr(module, "lora_A") else None


def _adapter_output(layer: Any, rows: Tensor) -> Tensor:
    (name,) = layer.lora_A
    output: Tensor = layer.lora_B[name](layer.lora_A[name](rows)) * layer.scaling[name]
    return output

"""Finds the numbers of rows at which a base gives each row the same bits, forward and backward, on this machine.

    rows   0 1 2 3 ... 61 | 0 1 2 3 ... 61 | 0 1 ...       the same 62 random rows again and again, in pairs that attend
    bits   equal wherever a row stands, and equal to the reference: exact

A matrix product may sum in another order at another number of rows. Whether it does depends on the library, the
processor and the shape, not on the data. A probe runs the first two layers and the last norm at a number of rows and
compares outputs and input gradients with those of a reference of many rows. Two numbers of rows that are both exact
therefore give equal bits. Results are remembered for the process.

A module of its own: a measurement of the machine, without tenants.

Invariant: tenants compute together only at numbers of rows whose probes passed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmux.core.errors import PipelineError
from rlmux.engines.adapters.shared_base import TenantBase
from rlmux.engines.model.packed_attention import pack_attention
from rlmux.engines.residency import release_storage
from rlmux.engines.train.update.train_tensors import deterministic_backward

_PROBED_LAYERS = 2
"""Layers of a probe: the second reads what the first has rounded."""
_PERIOD = 62
"""Rows of data: no multiple of a kernel's tile, so that equal rows stand at different places of tiles."""
_REPEATS = 17
"""Repeats in the reference."""

is_exact_by_rows: dict[tuple[object, ...], bool] = {}
"""Measurements of this process, by model, machine and rows."""


class RowProbe:
    """Probes one base."""

    def __init__(self, base: TenantBase) -> None:
        model: Any = base.skeleton()
        pack_attention(model)
        self._layers = model.base_model
        self._layers.layers = self._layers.layers[:_PROBED_LAYERS]
        self._layers.config.num_hidden_layers = len(self._layers.layers)
        self._device = base.device
        embedding = model.get_input_embeddings().weight
        shapes = [tuple(each.shape) for each in self._layers.parameters()]
        self._key = (model.config.model_type, model.config.num_attention_heads, repr(shapes), base.dtype, base.device)
        generator = torch.Generator().manual_seed(0)
        size = (2, _PERIOD, embedding.shape[1])
        self._inputs, self._gradients = torch.randn(size, generator=generator).to(base.device, base.dtype)
        self._reference: Tensor | None = None
        """Outputs and gradients of rows in pairs and of rows alone, [2, 2, period, width]; empty where the reference is
        not exact itself."""

    @property
    def measured(self) -> dict[int, bool]:
        """Whether the base is exact at each number of rows probed so far in this process."""
        key = self._machine_key()
        return {rows: found for (*of, rows), found in is_exact_by_rows.items() if tuple(of) == key}  # type: ignore[misc]

    def is_exact(self, rows: int) -> bool:
        """Whether each of so many rows has the bits that it has in the reference; False if that cannot be measured."""
        key = (*self._machine_key(), rows)
        if key not in is_exact_by_rows:
            try:
                is_exact_by_rows[key] = self._measure(rows)
            except (torch.OutOfMemoryError, PipelineError):
                return False
            release_storage(self._device)
        return is_exact_by_rows[key]

    def _machine_key(self) -> tuple[object, ...]:
        return (*self._key, torch.get_num_threads())

    def _measure(self, rows: int) -> bool:
        if self._reference is None:
            self._reference = self._make_reference()
        if not len(self._reference):
            return False
        in_pairs, alone = (_repeat(each, rows) for each in self._reference)
        expected = torch.cat([in_pairs[:, : rows - rows % 2], alone[:, rows - rows % 2 :]], dim=1)
        runs = [(rows // 2, 2), (rows % 2, 1)]
        return torch.equal(self._compute(rows, [run for run in runs if run[0]]), expected)

    def _make_reference(self) -> Tensor:
        rows = _REPEATS * _PERIOD
        found = [self._compute(rows, [run]) for run in ((rows // 2, 2), (rows, 1))]
        reference = torch.stack([each[:, :_PERIOD] for each in found])
        is_exact = all(
            torch.equal(_repeat(expected, rows), each) for expected, each in zip(reference, found, strict=True)
        )
        return reference if is_exact else reference[:0]

    def _compute(self, rows: int, runs: list[tuple[int, int]]) -> Tensor:
        """Outputs and gradients of the inputs, [2, rows, width]."""
        inputs = _repeat(self._inputs, rows)[None].requires_grad_()
        positions = torch.arange(rows, device=self._device) % runs[0][1]
        with torch.enable_grad():
            outputs = self._layers(
                inputs_embeds=inputs, position_ids=positions[None], runs=runs, use_cache=False
            ).last_hidden_state
            with deterministic_backward():
                (gradient,) = torch.autograd.grad(outputs, inputs, _repeat(self._gradients, rows)[None])
        return torch.cat([outputs.detach(), gradient])


def _repeat(rows: Tensor, count: int) -> Tensor:
    """The rows again and again [..., count, width]."""
    return torch.cat([rows] * -(-count // rows.shape[-2]), dim=-2)[..., :count, :]

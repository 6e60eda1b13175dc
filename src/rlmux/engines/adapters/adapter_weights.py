"""A LoRA adapter in the rollout engine: in the base's fused form, beside it and never merged into it.

    fused projection  W [in, out] of `transformer.DecoderWeights`       adapter   down [in, R]   up [R, out]

    fused       targets                          R = rank x targets that are there
    qkv         q_proj, k_proj, v_proj           `up` is zero outside the columns of its target
    output      o_proj
    gate_up     gate_proj, up_proj
    down        down_proj
    head        lm_head                          once, behind the blocks

The gain of the norm before a projection is folded into `down`, alpha / rank and the order of the query and key
channels into `up`, as they are in the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlmux.core.errors import PipelineError, UserError
from rlmux.engines.model.adapter_rows import HEAD, LowRank, rotation_pairs
from rlmux.engines.model.decoder_shape import DecoderShape
from rlmux.rl.config import AdapterConfig

TARGETS_BY_PROJECTION: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    HEAD: ("lm_head",),
}
_GAIN_BEFORE = {"qkv": 0, "gate_up": 1, HEAD: 0}
"""Which of a block's two norms precedes the projection; the last norm of all is as a block's of its own."""


class AdapterWeights:
    """One pipeline's adapter as views of one flat buffer, in the base's fused form."""

    def __init__(
        self,
        shape: DecoderShape,
        adapter: AdapterConfig,
        device: torch.device,
        gains: Tensor,
        *,
        flat: Tensor | None = None,
    ) -> None:
        """All zero until `refresh`. `gains` [2 * layers + 1, hidden]: of the two norms of each block and of the last
        one, in host memory; their dtype is the adapter's, too. `flat`: the buffer, where it is there already."""
        self.shape = shape
        self.adapter = adapter
        self._gains = gains
        self._targets = {
            name: [target for target in targets if target.rpartition(".")[2] in adapter.targets]
            for name, targets in TARGETS_BY_PROJECTION.items()
        }
        sizes = [size for index in range(shape.num_layers + 1) for size in self._sizes(index).values()]
        size = sum((num_in + num_out) * inner for num_in, inner, num_out in sizes)
        self.flat = torch.zeros(size, dtype=gains.dtype, device=device) if flat is None else flat
        self.layers = list(self._views())

    def over(self, flat: Tensor) -> AdapterWeights:
        """The same adapter as views of another buffer of this length."""
        return AdapterWeights(self.shape, self.adapter, flat.device, self._gains, flat=flat)

    def _sizes(self, index: int) -> dict[str, tuple[int, int, int]]:
        """(in, R, out) beside each fused projection of a block that has a target; behind the blocks, of the head."""
        shape = self.shape
        attention = shape.num_kv_heads * shape.group_size * shape.head_dim
        ends = {
            "qkv": (shape.hidden_size, shape.qkv_size),
            "output": (attention, shape.hidden_size),
            "gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
            "down": (shape.intermediate_size, shape.hidden_size),
        }
        if index == shape.num_layers:
            ends = {HEAD: (shape.hidden_size, shape.vocab_size)}
        inner = {name: self.adapter.rank * len(targets) for name, targets in self._targets.items()}
        return {name: (ends[name][0], inner[name], ends[name][1]) for name in ends if inner[name]}

    def _views(self) -> Iterator[dict[str, LowRank]]:
        start = 0
        for index in range(self.shape.num_layers + 1):
            layer = {}
            for name, (num_in, inner, num_out) in self._sizes(index).items():
                middle, end = start + num_in * inner, start + (num_in + num_out) * inner
                layer[name] = LowRank(
                    down=self.flat[start:middle].view(num_in, inner), up=self.flat[middle:end].view(inner, num_out)
                )
                start = end
            yield layer

    def refresh(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a file's tensors under peft's names; all are checked before any changes.

        Raises UserError for another adapter's tensors, PipelineError for numbers that are not finite.
        """
        self._check(tensors)
        scale = self.adapter.alpha / self.adapter.rank
        for index, layer in enumerate(self.layers):
            for name, low_rank in layer.items():
                stems = [_stem(index, target) for target in self._targets[name]]
                down = torch.cat([tensors[f"{stem}.lora_A.weight"].float() for stem in stems])
                if name in _GAIN_BEFORE:
                    down = down * self._gains[2 * index + _GAIN_BEFORE[name]]
                low_rank.down.copy_(down.T)
                low_rank.up.zero_()
                for number, (stem, target) in enumerate(zip(stems, self._targets[name], strict=True)):
                    rows = slice(number * self.adapter.rank, (number + 1) * self.adapter.rank)
                    own = tensors[f"{stem}.lora_B.weight"].float() * scale
                    low_rank.up[rows].copy_(self._fused(target, own))

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        expected = self._file_sizes()
        for name, size in expected.items():
            if name not in tensors:
                raise UserError(f"adapter: {name} is missing; accepted: the tensors that peft writes for its targets")
            if tuple(tensors[name].shape) != size:
                raise UserError(f"adapter: {name} is {tuple(tensors[name].shape)}; accepted: {size}")
            if not bool(torch.isfinite(tensors[name]).all()):
                raise PipelineError(f"adapter: {name} has numbers that are not finite")
        for name in tensors:
            if name not in expected:
                raise UserError(f"adapter: {name} has no place; accepted: targets {', '.join(self.adapter.targets)}")

    def _file_sizes(self) -> dict[str, tuple[int, int]]:
        shape, rank = self.shape, self.adapter.rank
        query, kv = shape.num_kv_heads * shape.group_size * shape.head_dim, shape.num_kv_heads * shape.head_dim
        ends = {
            "self_attn.q_proj": (shape.hidden_size, query),
            "self_attn.k_proj": (shape.hidden_size, kv),
            "self_attn.v_proj": (shape.hidden_size, kv),
            "self_attn.o_proj": (query, shape.hidden_size),
            "mlp.gate_proj": (shape.hidden_size, shape.intermediate_size),
            "mlp.up_proj": (shape.hidden_size, shape.intermediate_size),
            "mlp.down_proj": (shape.intermediate_size, shape.hidden_size),
        }
        sizes: dict[str, tuple[int, int]] = {}
        for index in range(shape.num_layers):
            for target in (target for targets in self._targets.values() for target in targets if target in ends):
                num_in, num_out = ends[target]
                sizes[f"{_stem(index, target)}.lora_A.weight"] = (rank, num_in)
                sizes[f"{_stem(index, target)}.lora_B.weight"] = (num_out, rank)
        if self._targets[HEAD]:
            sizes["base_model.model.lm_head.lora_A.weight"] = (rank, shape.hidden_size)
            sizes["base_model.model.lm_head.lora_B.weight"] = (shape.vocab_size, rank)
        return sizes

    def _fused(self, target: str, up: Tensor) -> Tensor:
        """B [out of the target, rank] as rows [rank, out of the fused projection], zero elsewhere."""
        shape, rank = self.shape, self.adapter.rank
        name = target.rpartition(".")[2]
        if name in ("gate_proj", "up_proj"):
            fused = up.new_zeros(2, shape.intermediate_size, rank)
            fused[0 if name == "gate_proj" else 1] = up
            return fused.flatten(0, 1).T
        if name not in ("q_proj", "k_proj", "v_proj"):
            return up.T
        heads = up.new_zeros(shape.num_kv_heads, shape.heads_per_group, shape.head_dim, rank)
        by_head = up.view(shape.num_kv_heads, -1, shape.head_dim, rank)
        first, last = {"q_proj": (0, -2), "k_proj": (-2, -1), "v_proj": (-1, None)}[name]
        heads[:, first:last] = by_head if name == "v_proj" else by_head[:, :, rotation_pairs(shape.head_dim)]
        return heads.reshape(shape.qkv_size, rank).T


def _stem(layer: int, target: str) -> str:
    """Common prefix of a target's two tensor names in a file."""
    if target == "lm_head":
        return f"base_model.model.{target}"
    return f"base_model.model.model.layers.{layer}.{target}"

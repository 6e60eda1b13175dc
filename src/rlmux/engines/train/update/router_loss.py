"""The auxiliary loss that keeps a mixture of experts balanced, as transformers' models have it.

    loss = experts * sum over experts (share of the picks * mean probability)        1 where all are picked alike

Source: Switch Transformer (arXiv 2101.03961), equations 4 to 6, over all layers at once as in transformers' Mixtral.
A step's micro-batches have a loss each, weighed by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlmux.rl.config import TrainConfig


def has_experts(config: Any) -> bool:
    """Whether a model of transformers with this config is a mixture of experts."""
    return _num_experts(config) is not None


def router_loss_coef(config: Any, train: TrainConfig) -> float:
    """Weight of the loss: from the file, else from config.json if that enables the loss; 0 without experts."""
    if not has_experts(config):
        return 0.0
    if train.router_aux_loss_coef is not None:
        return train.router_aux_loss_coef
    return float(config.router_aux_loss_coef) if getattr(config, "output_router_logits", False) else 0.0


def router_loss(logits_by_layer: Sequence[Tensor], config: Any) -> Tensor:
    """The loss of one micro-batch; logits [tokens, experts] of each layer with experts."""
    num_experts = _num_experts(config)
    logits = torch.cat(list(logits_by_layer))
    probabilities = torch.softmax(logits.float(), dim=-1)
    picked = probabilities.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
    counts = torch.bincount(picked, minlength=num_experts or 0).to(probabilities.dtype)
    return len(counts) * torch.sum(counts / len(logits) * probabilities.mean(dim=0))


def with_gradient_of(loss: Tensor, values: Tensor) -> Tensor:
    """`values`, with a backward pass that includes the one of `loss`."""
    kept: Tensor = _WithGradient.apply(values, loss)  # type: ignore[no-untyped-call]
    return kept


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, loss: Tensor) -> Tensor:
        context.ones = torch.ones_like(loss)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, context.ones


def _num_experts(config: Any) -> int | None:
    for key in ("num_experts", "num_local_experts"):
        if getattr(config, key, None):
            return int(getattr(config, key))
    return None

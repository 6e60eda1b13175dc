"""The values of a model in parts: no rank but the first ever has all of them.

    build_uncut_model   parameters on the meta device ──fully_shard──▶ rows without memory
    fill_rows           memory for a rank's own rows ──▶ values
                            a checkpoint whose files have the model's tensors: each rank reads its rows
                            else: the first rank builds the model, and sends each rank its rows

Invariant: rows have the bits of `build_trained_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlmux.engines.adapters.lora import inject_adapter
from rlmux.engines.model.model_io import build_model, build_skeleton, weight_paths
from rlmux.engines.train.update.ranks import Ranks, touching_others
from rlmux.engines.train.update.training_forward import PACKED
from rlmux.rl.config import ModelConfig, TrainingConfig

_TIED_HEAD = "lm_head.weight"


def build_uncut_model(config: TrainingConfig, vocab_size: int) -> PreTrainedModel:
    """The model whose parts are trained, its adapter in place. Parameters are on the meta device, but the adapter's.

    A model of another architecture than `PACKED` has its values, since its forward is measured. Raises UserError as
    `build_model` does.
    """
    model = build_skeleton(config.model, vocab_size)
    if model.config.model_type not in PACKED:
        model = build_model(config.model, vocab_size, config.model_seed)
    if config.adapter is not None:
        base = [each for each in model.parameters() if each.is_meta]
        # peft puts an adapter where its base is, so that must be on the CPU: views of one number.
        _replace(base, {id(each): torch.zeros(1).expand(each.shape) for each in base})
        inject_adapter(model, config.adapter, config.seed)
        _replace(base, {id(each): torch.empty(each.shape, device="meta") for each in base})
    return model


def _replace(parameters: list[nn.Parameter], tensors: Mapping[int, Tensor]) -> None:
    for each in parameters:
        new = nn.Parameter(tensors[id(each)], requires_grad=each.requires_grad)
        torch.utils.swap_tensors(each, new)  # type: ignore[no-untyped-call]


def fill_rows(scorer: Any, config: TrainingConfig, vocab_size: int, ranks: Ranks, device: torch.device) -> None:
    """Give the rows of a model that is cut memory on their device, and the values that the whole model begins with.

    `scorer`: the module that torch cut, with the model in it.
    """
    model = scorer.model
    without_values = {
        name.replace(".base_layer", ""): each for name, each in model.named_parameters() if rows_of(each).is_meta
    }
    scorer._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each.to(device))
    if not without_values:
        return
    path_by_name, found = _folder_tensors(config.model)
    if model.config.tie_word_embeddings:
        found.pop(_TIED_HEAD, None)
    if found == {name: tuple(each.shape) for name, each in without_values.items()}:
        for name, parameter in without_values.items():
            with safe_open(path_by_name[name], framework="pt") as file:
                begin, end = own_rows(parameter, ranks)
                rows_of(parameter).copy_(file.get_slice(name)[begin:end])
        return
    built = build_model(config.model, vocab_size, config.model_seed) if ranks.rank == 0 else None
    whole = {} if built is None else dict(built.named_parameters())
    for name, parameter in without_values.items():
        _scatter(whole.get(name), parameter, ranks)


def _folder_tensors(model: ModelConfig) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """File and shape of each tensor of a checkpoint folder; empty without safetensors files."""
    path_by_name: dict[str, Path] = {}
    shape_by_name: dict[str, tuple[int, ...]] = {}
    for path in [] if model.path is None else weight_paths(Path(model.path)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                path_by_name[name], shape_by_name[name] = path, tuple(file.get_slice(name).get_shape())
    return path_by_name, shape_by_name


def _scatter(whole: Tensor | None, parameter: Any, ranks: Ranks) -> None:
    """Send each rank its rows of a tensor that the first rank has."""
    shape = (rows_per_rank(parameter.shape[0], ranks.count), *parameter.shape[1:])
    parts = None
    if whole is not None:
        padded = torch.zeros(shape[0] * ranks.count, *shape[1:])
        padded[: len(whole)] = whole.detach()
        parts = list(torch.split(padded, shape[0]))
    received = torch.empty(shape)
    with touching_others():
        dist.scatter(received, parts, 0)
    rows = rows_of(parameter)
    rows.copy_(received[: len(rows)])


def rows_of(tensor: Any) -> Tensor:
    """This rank's rows of a parameter or gradient; other tensors are returned unchanged."""
    rows: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return rows.detach()


def rows_per_rank(num_rows: int, count: int) -> int:
    """Rows of the rank with most, as torch cuts them; the last ranks have fewer."""
    return -(-num_rows // count)


def own_rows(parameter: Any, ranks: Ranks) -> tuple[int, int]:
    """First of this rank's rows, and the one after its last."""
    num_rows = parameter.shape[0]
    per_rank = rows_per_rank(num_rows, ranks.count)
    return min(ranks.rank * per_rank, num_rows), min((ranks.rank + 1) * per_rank, num_rows)

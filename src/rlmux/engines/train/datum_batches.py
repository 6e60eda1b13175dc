"""Datums as micro-batches: every position is an input, and every position has a target of its own.

Sequences are sorted by length, and by content where lengths are equal: what is computed together, and in which order,
depends on what a request holds and not on the order in which it lists it.

A module of its own: it turns datums into tensors, and never touches weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from rlmux.core.errors import UserError
from rlmux.engines.train.update.micro_batches import MicroBatch
from rlmux.rl.client_requests import Datum
from rlmux.rl.datum_losses import TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumBatch:
    """Datums that go forward and backward together."""

    places: Sequence[int]
    """Places of its datums in the request."""
    batch: MicroBatch
    """Inputs and targets; all sampled-token fields are unused."""
    inputs: Sequence[Mapping[str, Tensor]]
    """Loss inputs [T] of each datum, on the device."""
    lengths: Sequence[int]


def check_datums(datums: Sequence[Datum], *, vocab_size: int, max_tokens: int) -> None:
    """Raises UserError for the first datum that cannot be trained on, by its place."""
    for place, datum in enumerate(datums):
        length = len(datum.tokens)
        if not 1 <= length <= max_tokens:
            raise UserError(f"datum {place}: {length} tokens; accepted: 1 to {max_tokens}")
        for name, values in datum.inputs.items():
            if values.shape != (length,):
                raise UserError(
                    f"datum {place}: loss_fn_inputs[{name!r}] has shape {list(values.shape)}; accepted: [{length}]"
                )
        for name, tokens in (("model_input", datum.tokens), (TARGETS, datum.inputs.get(TARGETS))):
            if tokens is not None and not (tokens.min() >= 0 and tokens.max() < vocab_size):
                raise UserError(f"datum {place}: {name} has a token out of range; accepted: 0 to {vocab_size - 1}")


def datum_batches(datums: Sequence[Datum], micro_batch_size: int, device: torch.device) -> list[DatumBatch]:
    """The micro-batches of a request, the shortest first."""
    order = sorted(range(len(datums)), key=lambda place: (len(datums[place].tokens), _content(datums[place])))
    return [
        _batch(datums, order[start : start + micro_batch_size], device)
        for start in range(0, len(order), micro_batch_size)
    ]


def _content(datum: Datum) -> bytes:
    digest = hashlib.sha256(datum.tokens.tobytes())
    for name in sorted(datum.inputs):
        digest.update(name.encode() + datum.inputs[name].tobytes())
    return digest.digest()


def _batch(datums: Sequence[Datum], places: Sequence[int], device: torch.device) -> DatumBatch:
    chosen = [datums[place] for place in places]
    lengths = [len(datum.tokens) for datum in chosen]
    tokens = torch.cat([torch.from_numpy(datum.tokens) for datum in chosen])
    unused = torch.zeros(len(tokens))
    batch = MicroBatch(
        input_tokens=tokens,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        runs=[(len(list(run)), length) for length, run in groupby(lengths)],
        sources=torch.arange(len(tokens)),
        targets=torch.cat([torch.from_numpy(datum.inputs[TARGETS]) for datum in chosen]),
        weights=unused,
        advantages=unused,
        sampled_logprobs=unused,
        is_stale=unused.bool(),
        num_tokens=len(tokens),
    ).to(device)
    inputs = [
        {name: torch.from_numpy(values).to(device) for name, values in datum.inputs.items() if name != TARGETS}
        for datum in chosen
    ]
    return DatumBatch(places=places, batch=batch, inputs=inputs, lengths=lengths)

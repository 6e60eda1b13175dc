"""Computes the KV of waiting contexts before they are seated, so that refilling a slot costs a copy.

    waiting trajectories ──▶ distinct contexts ──▶ batches of one padded length ──▶ `kv` of each trajectory

Trajectories of one prompt group share a prompt, and its KV is computed once. Those of different adapters share none.

A module of its own: it decides what is prefilled together, and never touches a slot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from rlmux.core.model import SubStage
from rlmux.engines.model.transformer import DecoderWeights, PositionTables, prefill
from rlmux.engines.rollout.adapter_table import AdapterTable
from rlmux.engines.rollout.batch_probe import PREFILL_BUCKET, BatchProbe, pad_rows
from rlmux.engines.rollout.chunk_tally import ChunkTally
from rlmux.engines.rollout.live_trajectory import LiveTrajectory
from rlmux.engines.rollout.request_queue import WaitingQueue

_Context = tuple[str, tuple[int, ...]]
"""The adapter that reads it, and its tokens."""

_MAX_TOKENS = 4096
"""Tokens of one forward pass, padding included."""


class PrefillAhead:
    """Prefills with one engine's weights, in batch shapes that `BatchProbe` found exact."""

    def __init__(
        self, weights: DecoderWeights, tables: PositionTables, probe: BatchProbe, adapters: AdapterTable
    ) -> None:
        self._adapters = adapters
        self._weights = weights
        self._tables = tables
        self._probe = probe

    def compute_ahead(
        self, live: LiveTrajectory, waiting: WaitingQueue[LiveTrajectory], num_slots: int, tally: ChunkTally
    ) -> None:
        """Fill in `kv` of the next trajectory and of those that wait behind it, for as many as there are slots."""
        for later in waiting.after(num_slots - 1):  # they were near the front once
            later.drop_prefilled_kv()
        self._compute_kv([live, *waiting.first(num_slots - 1)], tally)

    def _compute_kv(self, trajectories: Iterable[LiveTrajectory], tally: ChunkTally) -> None:
        """Fill in `kv` of each trajectory that needs it."""
        by_length: dict[int, dict[_Context, list[LiveTrajectory]]] = {}
        for live in trajectories:
            if live.needs_prefill:
                own = live.request.id.adapter, live.context
                length = -(-len(live.context) // PREFILL_BUCKET) * PREFILL_BUCKET
                by_length.setdefault(length, {}).setdefault(own, []).append(live)
        for length, lives_by_context in by_length.items():
            contexts = list(lives_by_context)
            while contexts:
                limit = max(1, _MAX_TOKENS // length)
                rows = self._probe.prefill_rows(min(len(contexts), limit), length)
                batch, contexts = contexts[:rows], contexts[rows:]
                for context, kv in zip(batch, self._prefill(batch, rows, length, tally), strict=True):
                    for live in lives_by_context[context]:
                        live.kv, live.is_prefilled_here = kv, True

    def _prefill(self, contexts: list[_Context], rows: int, length: int, tally: ChunkTally) -> list[Tensor]:
        """KV [layers, 2, kv_heads, len(context), head_dim] of each context, computed as `rows` rows of `length`."""
        start = time.perf_counter()
        tokens = torch.zeros(len(contexts), length, dtype=torch.int64)
        for row, (_, context) in enumerate(contexts):
            tokens[row, : len(context)] = torch.tensor(context)
        names = [name for name, _ in contexts] + [None] * (rows - len(contexts))
        adapters = self._adapters.rows(names, repeats=length)
        kv = prefill(self._weights, self._tables, pad_rows(tokens, rows).to(self._weights.flat.device), adapters)
        num_tokens: Counter[str] = Counter()
        for name, context in contexts:
            num_tokens[name] += len(context)
        tally.add_iterations(
            SubStage.PREFILL, rows, iterations=1, tokens=num_tokens, seconds=time.perf_counter() - start
        )
        return [kv[row, :, :, :, : len(context)] for row, (_, context) in enumerate(contexts)]

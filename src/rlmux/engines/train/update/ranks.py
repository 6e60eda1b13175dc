"""The ranks that train one pipeline together: assignment of micro-batches, and the reduction of results.

    leaves of the gradient tree    0 1 2 3 | 4 5 6 7     an update's micro-batches, dealt by `leaf_order`
    rank                              0    |    1        each rank sums a subtree of its own
    join                              └─── + ───┘        rank 2i with 2i + 1, then pairs of pairs: the tree's forks
    gather                         0 1 2 3   4 5 6 7     figures of the micro-batches, on every rank, in their order
    agree                             0 ──────▶ 1        whether to stop after it: the clock of rank 0 decides

Invariants: `join` and `gather` give every rank the same bits, and those of one rank that computed everything. Ranks
call `agree`, `join` and `gather` in the same order: all stop after the same number of micro-batches, so no rank waits
for one that was not called. A rank that loses another raises WorkerLostError.

Ranks find each other through a store that the first of them opens on a port of the system's choice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rlmux.core.errors import PipelineError, WorkerLostError
from rlmux.engines.train.update.tree_sum import leaf_order, subtree

_C: Any = dist
"""`torch.distributed`, untyped: it does not declare its exports."""
_LONGEST_WAIT = timedelta(hours=1)
"""Longest wait of a rank for another. The controller's limit for a call is shorter, and ends the whole gang."""
_CHUNK_ELEMENTS = 1 << 22
"""Elements of a gradient that two ranks exchange at once: the memory that joining takes beside the gradients."""

Item = TypeVar("Item")


class Ranks:
    """One rank's view of its gang."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        """A rank of `count`, a power of two. More than one are connected by `RankStore.join`."""
        self.rank = rank
        self.count = count

    # --- dealing --------------------------------------------------------------------------------------------

    def own(self, num_leaves: int) -> range:
        """Leaves of an update that this rank computes."""
        return subtree(num_leaves, self.rank, self.count)

    def positions(self, leaves: Sequence[Item], first: int = 0) -> list[tuple[int, Item] | None]:
        """This rank's items in order, with their numbers; a final None if another rank has one more.

        `first`: number of the first leaf.
        """
        own = [(first + leaf, leaves[leaf]) for leaf in self.own(len(leaves))]
        return [*own, *[None] * (self.num_positions(len(leaves)) - len(own))]

    def num_positions(self, num_leaves: int) -> int:
        """Micro-batches of the rank that has most."""
        return len(subtree(num_leaves, 0, self.count))

    # --- joining --------------------------------------------------------------------------------------------

    def agree(self, *, is_over: bool) -> bool:
        """The decision of rank 0."""
        if self.count == 1:
            return is_over
        answer = torch.tensor([is_over], dtype=torch.uint8)
        with touching_others():
            dist.broadcast(answer, 0)
        return bool(answer)

    def join(self, partial: Tensor | None, num_leaves: int, like: Tensor) -> Tensor:
        """The sum of all leaves, from each rank's partial sum; None for a rank without leaves.

        `partial` may be added into. The result has the shape of `like`.
        """
        total, width = partial, 1
        while width < self.count:
            partner = self.rank ^ width
            blocks = self.count // width
            has_other = bool(subtree(num_leaves, partner // width, blocks))
            total = self._join_pair(total, partner, like, has_other=has_other)
            width *= 2
        assert total is not None, "an update has at least one micro-batch"
        return total

    def _join_pair(self, mine: Tensor | None, partner: int, like: Tensor, *, has_other: bool) -> Tensor | None:
        """The sum of two neighbouring subtrees, on both ranks. Addition of two numbers has no order."""
        if mine is None and not has_other:
            return None
        total = torch.zeros_like(like) if mine is None else mine
        for part in torch.split(total.flatten(), _CHUNK_ELEMENTS):
            theirs = torch.empty_like(part)
            exchanges = [_C.P2POp(dist.isend, part, partner)] if mine is not None else []
            exchanges += [_C.P2POp(dist.irecv, theirs, partner)] if has_other else []
            with touching_others():
                for work in dist.batch_isend_irecv(exchanges):
                    work.wait()
            if has_other:
                part.copy_(theirs) if mine is None else part.add_(theirs)
        return total

    def gather(self, rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """The rows of all ranks, on every rank, sorted by their first figure: the number of a micro-batch."""
        if self.count == 1:
            return sorted(rows, key=_number)
        gathered: list[Any] = [None] * self.count
        with touching_others():
            dist.all_gather_object(gathered, list(rows))
        return sorted((row for of_rank in gathered for row in of_rank), key=_number)

    def is_same(self, text: str) -> bool:
        """Whether every rank has this text."""
        if self.count == 1:
            return True
        gathered: list[Any] = [None] * self.count
        with touching_others():
            dist.all_gather_object(gathered, text)
        return len(set(gathered)) == 1

    def of_first(self, text: str) -> str:
        """The text that rank 0 has."""
        if self.count == 1:
            return text
        texts = [text]
        with touching_others():
            dist.broadcast_object_list(texts, 0)
        return texts[0]


def _number(row: Sequence[float]) -> float:
    return row[0]


def in_leaf_order(batches: Sequence[Item]) -> list[Item]:
    """Micro-batches, sorted by size, as leaves: every rank gets small ones and large ones."""
    return [batches[place] for place in leaf_order(len(batches))]


class RankStore:
    """The meeting point of a gang, in its first rank's process."""

    def __init__(self, host: str) -> None:
        """Opens a port of the system's choice. `host`: this machine's address, as the other ranks reach it."""
        self._host = host
        self._store = _C.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_LONGEST_WAIT)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) for the other ranks."""
        return self._host, self._store.port


def join_ranks(store: RankStore | tuple[str, int], rank: int, count: int, *, host: str) -> Ranks:
    """Connect this process with the other ranks; returns once all have joined.

    `store`: the gang's, or its address. `host`: this machine's address, as the other ranks reach it.
    """
    interface = _interface_of(host)
    if interface is not None:  # else gloo takes the one that the machine's name leads to
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with touching_others():
        opened = store._store if isinstance(store, RankStore) else _C.TCPStore(*store, timeout=_LONGEST_WAIT)
        dist.init_process_group(backend, store=opened, rank=rank, world_size=count, timeout=_LONGEST_WAIT)
    return Ranks(rank, count)


def _interface_of(host: str) -> str | None:
    """The network interface with this address; None without one."""
    address = socket.gethostbyname(host)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return interface
    return None


@contextmanager
def touching_others() -> Iterator[None]:
    """Turn a failed exchange, caused by a lost rank, into the loss of the gang, not of the pipeline."""
    try:
        yield
    except (torch.OutOfMemoryError, PipelineError):
        raise
    except RuntimeError as error:
        raise WorkerLostError(f"a rank of its gang is gone: {str(error).splitlines()[0][:160]}") from error

"""Blocks of a long run packed once more, many into one: a third less, as columns are longer and LZMA takes its time.

    block block block … block ──merge, in a thread──▶ one block, which takes their place in one transaction

After a kill at any moment either the blocks are there or the one that has their rows. Readers get the same rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from rlmux.core.errors import LogError
from rlmux.report.blocks import XZ_MAGIC, merge


class _Merging(NamedTuple):
    first_seq: int
    last_seq: int
    merged: Future[bytes]


class Merger:
    """Merges the blocks of an open file, always so many and the oldest first. For the file's one writer."""

    def __init__(self, connection: sqlite3.Connection, num_blocks: int) -> None:
        self._connection = connection
        self._num_blocks = num_blocks
        self._executor: ThreadPoolExecutor | None = None
        self._merging: _Merging | None = None
        self._waiting: list[tuple[int, int]] = []
        """First and last row of each block that is not merged, ascending."""

    def take_up(self) -> None:
        """Find out which blocks the file has that are not merged; what was being merged is left."""
        found = "SELECT first_seq, last_seq FROM block WHERE substr(rows, 1, 1) != ? ORDER BY last_seq"
        self._waiting = self._connection.execute(found, (XZ_MAGIC[:1],)).fetchall()
        self._merging = None

    def add(self, first_seq: int, last_seq: int) -> None:
        """A new block is in the file."""
        self._waiting.append((first_seq, last_seq))

    def go_on(self, beside: Callable[[], None], *, waits: bool = False) -> None:
        """Take what was merged into the file, and begin with the next blocks where there are enough.

        `beside` is called in the transaction that does so. `waits`: for what is being merged.
        """
        if self._merging is not None and (waits or self._merging.merged.done()):
            self._take_in(self._merging, beside)
            self._merging = None
        if self._merging is None and len(self._waiting) >= self._num_blocks and not waits:
            self._begin()

    def close(self) -> None:
        """Leave what is being merged."""
        self._merging = None
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _begin(self) -> None:
        taken, self._waiting = self._waiting[: self._num_blocks], self._waiting[self._num_blocks :]
        first_seq, last_seq = taken[0][0], taken[-1][1]
        wanted = "SELECT rows FROM block WHERE first_seq >= ? AND last_seq <= ? ORDER BY last_seq"
        blocks = [rows for (rows,) in self._connection.execute(wanted, (first_seq, last_seq))]
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="merge-blocks")
        self._merging = _Merging(first_seq, last_seq, self._executor.submit(merge, blocks))

    def _take_in(self, merging: _Merging, beside: Callable[[], None]) -> None:
        execute = self._connection.execute
        first_seq, last_seq = merging.first_seq, merging.last_seq
        try:
            data = merging.merged.result()
        except LogError:  # a damaged block stays where it is: what can be read is read from the others
            return
        execute("BEGIN IMMEDIATE")
        execute("INSERT OR REPLACE INTO block VALUES (?, ?, ?)", (last_seq, first_seq, data))
        execute("DELETE FROM block WHERE first_seq >= ? AND last_seq < ?", (first_seq, last_seq))
        beside()
        execute("COMMIT")
        self._connection.executescript("PRAGMA incremental_vacuum")

"""Weights across a link, between real processes: every receiver gets every byte, once over the link, checked."""

from __future__ import annotations

import multiprocessing as mp
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmux.runtime.weights.thin_link import Link, Scheme, SyncError, SyncLayout, WeightReceiver, WeightSender

CONTEXT = mp.get_context("forkserver")

NOT_MET = 3
"""Exit code of a rank that did not find the others."""


def take_part(
    rank: int,
    layout: SyncLayout,
    num_bytes: int,
    scheme: Scheme,
    meeting: str,
    say: Callable[[tuple[Any, ...]], None],
    sender: type[WeightSender],
) -> None:
    """One rank: receivers say what they got, senders how much crossed the link."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=layout.num_senders + layout.num_receivers,
            timeout=timedelta(seconds=60),
        )
    except RuntimeError:
        sys.exit(NOT_MET)
    inside = dist.new_group([layout.receiver_rank(receiver) for receiver in range(layout.num_receivers)])
    for version in (3, 4):
        payload = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(version))
        if rank < layout.num_senders:
            counter = Counter()
            sender(layout, rank, dist.group.WORLD, link=counter).send(payload, version, scheme)
            say(("crossed", version, counter.num_bytes))
        else:
            try:
                received, got = WeightReceiver(layout, rank, dist.group.WORLD, inside).receive(scheme)
            except SyncError as error:
                say(("refused", str(error)))
            else:
                say(("received", got, torch.equal(received, payload)))
    dist.destroy_process_group()


class Counter(Link):
    """A link that counts instead of waiting."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


class Careless(WeightSender):
    """Its payload changes between the announcement and the sending."""

    def _announce(self, payload: torch.Tensor, version: int) -> None:
        super()._announce(payload + 1, version)


def sync(
    layout: SyncLayout, num_bytes: int, scheme: Scheme, folder: Path, sender: type[WeightSender] = WeightSender
) -> list[tuple[Any, ...]]:
    CONTEXT.set_forkserver_preload(["rlmux.runtime.workers.fork_server_imports", "rlmux.runtime.weights.thin_link"])
    world = layout.num_senders + layout.num_receivers
    for number in range(3):  # now and then Gloo's connections are not made: nothing of ours has run then
        said = CONTEXT.SimpleQueue()
        shared = (layout, num_bytes, scheme, str(folder / f"meet-{number}"), said.put, sender)
        ranks = [CONTEXT.Process(target=take_part, args=(rank, *shared)) for rank in range(world)]
        for process in ranks:
            process.start()
        while (alive := [one.sentinel for one in ranks if one.is_alive()]) and not any(one.exitcode for one in ranks):
            wait(alive)
        for process in ranks:
            if any(other.exitcode for other in ranks):
                process.kill()
            process.join()
        if NOT_MET not in [process.exitcode for process in ranks]:
            break
    assert [process.exitcode for process in ranks] == [0] * world
    return [said.get() for _ in range(2 * world)]


@pytest.mark.parametrize(
    ("num_senders", "num_receivers", "num_bytes"),
    [(2, 1, 100_003), (2, 3, 100_003), (3, 2, 7)],
    ids=["two to one", "chunks that do not divide", "less than a chunk"],
)
def test_every_receiver_has_every_byte_and_one_copy_crosses_the_link(tmp_path, num_senders, num_receivers, num_bytes):
    layout = SyncLayout(num_senders=num_senders, num_receivers=num_receivers, chunk_bytes=4096)
    said = sync(layout, num_bytes, Scheme.HIERARCHICAL, tmp_path)
    assert [one for one in said if one[0] == "received" and not one[2]] == []
    assert sorted(one[1] for one in said if one[0] == "received") == [3] * num_receivers + [4] * num_receivers
    crossed = [one[2] for one in said if one[0] == "crossed"]
    assert num_bytes <= sum(crossed) / 2 < num_bytes + num_receivers, "one copy, and the padding of the last shard"
    assert max(crossed) - min(crossed) <= num_receivers * layout.chunk_bytes, "each sender has an equal part"


def test_messages_are_as_large_as_a_version_allows_and_cover_each_shard_once():
    layout = SyncLayout(num_senders=2, num_receivers=8)
    sizes = {num_bytes: layout.chunks(num_bytes) for num_bytes in (7, 16 << 20, 1 << 30, 16_400_000_000)}
    assert [len(chunks) for chunks in sizes.values()] == [1, 8, 64, 123]
    for num_bytes, chunks in sizes.items():
        assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
        assert chunks[-1][1] == layout.shard_bytes(num_bytes)


def test_a_copy_for_each_receiver_crosses_as_often(tmp_path):
    layout = SyncLayout(num_senders=2, num_receivers=3, chunk_bytes=4096)
    said = sync(layout, 30_000, Scheme.PER_RECEIVER, tmp_path)
    assert all(one[2] for one in said if one[0] == "received")
    assert sum(one[2] for one in said if one[0] == "crossed") / 2 == 3 * 30_000


def test_bytes_that_are_not_those_announced_are_never_handed_out(tmp_path):
    layout = SyncLayout(num_senders=1, num_receivers=2)
    said = sync(layout, 5000, Scheme.HIERARCHICAL, tmp_path, sender=Careless)
    refusals = [one[1] for one in said if one[0] == "refused"]
    assert len(refusals) == 4
    assert "weights of version 3: the 5000 bytes received are not those sent" in refusals
    assert not any(one[0] == "received" for one in said)


def test_a_link_lets_through_no_more_than_its_rate_and_saves_up_a_burst_at_most(monkeypatch):
    now_s = [100.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr("rlmux.runtime.weights.thin_link.time", clock)
    link = Link(1_000_000, burst_bytes=1000)
    for _ in range(20):
        link.take(10_000)
    assert now_s[0] == pytest.approx(100.2)
    sleep(10.0)
    link.take(10_000)
    assert now_s[0] == pytest.approx(110.2 + 0.009), "the burst has crossed at once"

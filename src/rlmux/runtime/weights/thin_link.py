"""Weights from a training pool to a rollout pool over a thin link: one copy crosses, then the receivers share it out.

    senders 0 … S-1    all hold the whole payload       ══ thin link ══▶   receivers 0 … R-1

    scatter     chunk k of shard r goes from sender (r + k) mod S to receiver r, point to point: equal parts of senders
    share out   chunk k of every shard goes round all receivers at once, while chunk k + 1 is on the link

    time ≈ payload / link  +  one chunk's round inside        per-receiver copies: R · payload / link

A shard is a contiguous range of bytes, so the layouts of the two sides do not matter. Every receiver checks the sum
that sender 0 announced, computed where the bytes lie; a version that does not match is never handed out. Runs over
process groups of torch.distributed: gloo for host memory, NCCL for buffers on GPUs. Ranks: senders first, then
receivers.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from rlmux.core.errors import RlmuxError
from rlmux.engines.model.weight_checksum import Sample, weights_checksum

_C: Any = dist
"""`torch.distributed`, untyped: it does not declare its exports."""
_HEADER = struct.Struct("<qq16s")
"""Layout of the announcement: version, number of bytes, checksum."""
_SUMMED_BYTES = 1 << 24
"""Pieces of a payload, of which a large one's checksum covers a sample."""
_CHUNKS = 64
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES = 1 << 18, 1 << 24
_HEADER_TAG = 0
_MAX_ROUNDS_UNDER_WAY = 2
_TIMEOUT = timedelta(seconds=60)
"""Longest wait for a rank or a message."""


class SyncError(RlmuxError):
    """A received version differs from the sent one."""


class Scheme(StrEnum):
    """How the bytes get to all receivers."""

    HIERARCHICAL = "hierarchical"
    PER_RECEIVER = "per_receiver"
    """A whole copy for each receiver over the link: the baseline of the hierarchical scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLayout:
    """The ranks that take part. The same on every rank."""

    num_senders: int
    num_receivers: int
    chunk_bytes: int | None = None
    """Bytes of one shard per message; None: a 64th of the shard, which is early enough for a first chunk, but at least
    256 kB and at most 16 MB."""

    def receiver_rank(self, receiver: int) -> int:
        return self.num_senders + receiver

    def sender_of(self, receiver: int, number: int) -> int:
        """Sender of a receiver's chunk of this number."""
        return (receiver + number) % self.num_senders

    def shard_bytes(self, num_bytes: int) -> int:
        """Bytes of every shard; the last shards are padded."""
        return -(-num_bytes // self.num_receivers)

    def chunks(self, num_bytes: int) -> list[tuple[int, int]]:
        """(begin, end) of each chunk within its shard."""
        shard = self.shard_bytes(num_bytes)
        chunk = self.chunk_bytes or min(max(shard // _CHUNKS, _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
        return [(begin, min(begin + chunk, shard)) for begin in range(0, shard, chunk)]


class Link:
    """A token bucket: one sender's part of a link of limited rate, for tests and benchmarks without such a link."""

    def __init__(self, bytes_per_s: float, *, burst_bytes: int = 1 << 16) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._free_at_s = time.monotonic()

    def take(self, num_bytes: int) -> None:
        """Wait for the link time of so many bytes."""
        self._free_at_s = max(self._free_at_s, time.monotonic() - self._burst_s) + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, self._free_at_s - time.monotonic()))


class WeightSender:
    """A sender's end, on one rank of `world`, which has all senders and receivers."""

    def __init__(self, layout: SyncLayout, rank: int, world: dist.ProcessGroup, *, link: Link | None = None) -> None:
        self._layout = layout
        self._rank = rank
        self._world = world
        self._link = link

    def send(self, payload: torch.Tensor, version: int, scheme: Scheme = Scheme.HIERARCHICAL) -> None:
        """Send the payload (bytes, on CPU or the backend's device); returns when its buffers may be changed."""
        layout = self._layout
        num_bytes = payload.numel()
        if self._rank == 0:
            self._announce(payload, version)
        shard = layout.shard_bytes(num_bytes)
        under_way: list[Any] = []
        for number, (begin, end) in enumerate(layout.chunks(num_bytes)):
            for receiver in range(layout.num_receivers):
                if layout.sender_of(receiver, number) == self._rank:
                    chunk = payload[receiver * shard + begin : receiver * shard + end]
                    if len(chunk) < end - begin:  # of the last shard
                        chunk = torch.nn.functional.pad(chunk, (0, end - begin - len(chunk)))
                    under_way += self._send_chunk(chunk, receiver, number, scheme)
        for work in under_way:
            work.wait()

    def _send_chunk(self, chunk: torch.Tensor, receiver: int, number: int, scheme: Scheme) -> list[Any]:
        layout = self._layout
        targets = [receiver] if scheme is Scheme.HIERARCHICAL else range(layout.num_receivers)
        under_way = []
        for target in targets:
            if self._link is not None:
                self._link.take(chunk.numel())
            tag = _chunk_tag(layout, receiver, number)
            under_way.append(self._world.send([chunk], layout.receiver_rank(target), tag))
        return under_way

    def _announce(self, payload: torch.Tensor, version: int) -> None:
        packed = bytearray(_HEADER.pack(version, payload.numel(), _checksum(payload, version)))
        header = torch.frombuffer(packed, dtype=torch.uint8).to(payload.device)
        for receiver in range(self._layout.num_receivers):
            self._world.send([header], self._layout.receiver_rank(receiver), _HEADER_TAG).wait()


class WeightReceiver:
    """A receiver's end, on one rank of `world`. `inside` has the receivers alone, all of them, in order."""

    def __init__(
        self,
        layout: SyncLayout,
        rank: int,
        world: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        *,
        device: str = "cpu",
    ) -> None:
        """`device`: where the payload is to lie; the process groups must be able to send from there."""
        self._layout = layout
        self._receiver = rank - layout.num_senders
        self._world = world
        self._inside = inside
        self._device = device

    def receive(self, scheme: Scheme = Scheme.HIERARCHICAL) -> tuple[torch.Tensor, int]:
        """(payload, version). Raises SyncError if the received bytes differ from the sent ones."""
        layout = self._layout
        header = self._empty(_HEADER.size)
        self._world.recv([header], 0, _HEADER_TAG).wait()
        version, num_bytes, checksum = _HEADER.unpack(header.cpu().numpy().tobytes())
        shards = self._empty(layout.num_receivers, layout.shard_bytes(num_bytes))
        if scheme is Scheme.HIERARCHICAL:
            self._distribute(shards, num_bytes)
        else:
            self._take_all(shards, num_bytes)
        payload = shards.view(-1)[:num_bytes]
        if _checksum(payload, version) != checksum:
            raise SyncError(f"weights of version {version}: the {num_bytes} bytes received are not those sent")
        return payload, version

    def _distribute(self, shards: torch.Tensor, num_bytes: int) -> None:
        """Receive the whole own shard, and forward each chunk to the other receivers as soon as it arrives."""
        layout, mine = self._layout, self._receiver
        chunks = layout.chunks(num_bytes)
        coming = [
            self._world.recv(
                [shards[mine, begin:end]], layout.sender_of(mine, number), _chunk_tag(layout, mine, number)
            )
            for number, (begin, end) in enumerate(chunks)
        ]
        rounds: list[tuple[Any, list[torch.Tensor], int, int]] = []
        for work, (begin, end) in zip(coming, chunks, strict=True):
            work.wait()
            parts = [self._empty(end - begin) for _ in range(layout.num_receivers)]
            gathering = self._inside.allgather([parts], [shards[mine, begin:end]])
            rounds.append((gathering, parts, begin, end))
            if len(rounds) > _MAX_ROUNDS_UNDER_WAY:
                _finish_round(shards, *rounds.pop(0))
        for unfinished in rounds:
            _finish_round(shards, *unfinished)

    def _take_all(self, shards: torch.Tensor, num_bytes: int) -> None:
        layout = self._layout
        coming = [
            self._world.recv(
                [shards[receiver, begin:end]], layout.sender_of(receiver, number), _chunk_tag(layout, receiver, number)
            )
            for number, (begin, end) in enumerate(layout.chunks(num_bytes))
            for receiver in range(layout.num_receivers)
        ]
        for work in coming:
            work.wait()

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._device)


def open_store(address: str) -> Any:
    """A store in which ranks find each other, at its `port`; it lives in this process."""
    return _C.TCPStore(address, 0, is_master=True, wait_for_workers=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One use of a store, by the ranks of one delivery."""

    address: str
    port: int
    number: int


def join_meeting(
    meeting: Meeting, layout: SyncLayout, *, rank: int, address: str
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(world, the receivers' group) over gloo, apart from every other group of this process.

    `address`: of this rank's machine, where the others reach it. A sender has no part in the second group and gets
    the first one again.
    """
    store = _C.PrefixStore(str(meeting.number), _C.TCPStore(meeting.address, meeting.port, is_master=False))
    size = layout.num_senders + layout.num_receivers
    world = _gloo(_C.PrefixStore("world", store), rank, size, address)
    if rank < layout.num_senders:
        return world, world
    inside = _gloo(_C.PrefixStore("inside", store), rank - layout.num_senders, layout.num_receivers, address)
    return world, inside


def _gloo(store: Any, rank: int, size: int, address: str) -> dist.ProcessGroup:
    gloo = _C.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = _TIMEOUT
    group: dist.ProcessGroup = gloo(store, rank, size, options)
    return group


def _checksum(payload: torch.Tensor, version: int) -> bytes:
    pieces = {f"{number:06}": piece for number, piece in enumerate(torch.split(payload, _SUMMED_BYTES))}
    return bytes.fromhex(weights_checksum(pieces, Sample.of_version(version, pieces)).rpartition("-")[2])


def _finish_round(shards: torch.Tensor, work: Any, parts: list[torch.Tensor], begin: int, end: int) -> None:
    work.wait()
    for receiver, part in enumerate(parts):
        shards[receiver, begin:end] = part


def _chunk_tag(layout: SyncLayout, receiver: int, number: int) -> int:
    return 1 + number * layout.num_receivers + receiver

"""Weights between machines: from the trainer's node to the nodes of its rollout workers, before PUBLISH ends.

    trainers ──▶ file in a node's memory ══▶ a file of the same name in each rollout node's memory ──▶ rollout workers
     one a node                           │
             carriers, one a node:        ├─ objects        Ray brings the bytes to each node by itself, from the first
                                          └─ hierarchical   `thin_link.py`: one copy over the link, an equal
                                                            part from each training node, then shared out

Every version's sum is checked where it arrives, CRC-32 of objects, whose carriers do without torch; the worker that
loads it checks the checksum in the file. Only the PUBLISH that a delivery belongs to waits for it, and holds no device:
a slow link delays its own pipeline and no other. The controller keeps an empty file for each version that has arrived;
the bytes never come to it.

A module of its own: only clusters without shared memory use it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmux.runtime.local import SharedMemoryFolder
from rlmux.runtime.ray.cluster import RayNode
from rlmux.runtime.ray.worker import RayWorker

if TYPE_CHECKING:  # brings torch along, which objects do without
    from rlmux.runtime.weights.thin_link import Link, Meeting, SyncLayout

_NUM_AT_ONCE = 64
"""Most deliveries that one carrier takes part in at the same time."""


class Transport(StrEnum):
    """How weights get from node to node. The choice changes no byte."""

    AUTO = "auto"
    """Objects for one sender and one receiver, otherwise the two-stage scheme."""
    OBJECTS = "objects"
    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySync:
    """How a run syncs between its nodes."""

    transport: Transport = Transport.AUTO
    link_bytes_per_s: float | None = None
    """Most bytes a second that leave a carrier under the two-stage scheme, for tests of slow links; None: no limit."""

    def is_hierarchical(self, num_senders: int, num_receivers: int) -> bool:
        has_several = max(num_senders, num_receivers) > 1
        return self.transport is Transport.HIERARCHICAL or (self.transport is Transport.AUTO and has_several)


class WeightCarrier:
    """An actor on each node that holds the node's folder of weights and transfers its files."""

    def __init__(self, folder: Path, address: str, link_bytes_per_s: float | None) -> None:
        self._folder = SharedMemoryFolder.at(folder)
        self._address = address
        self._store: Any = None
        self._opening = threading.Lock()
        self._numbers = itertools.count()
        self._link: Link | None = None
        if link_bytes_per_s is not None:
            from rlmux.runtime.weights.thin_link import Link

            self._link = Link(link_bytes_per_s)

    def is_there(self) -> bool:
        return True

    def offer(self, name: str) -> tuple[bytes, int]:
        """(contents, CRC-32)."""
        contents = (self._folder.path / name).read_bytes()
        return contents, zlib.crc32(contents)

    def take(self, name: str, offered: tuple[bytes, int]) -> None:
        contents, crc32 = offered
        if zlib.crc32(contents) != crc32:
            raise ValueError(f"weights {name}: the {len(contents)} bytes received are not those sent")
        self._write(name, contents)

    def meet(self) -> Meeting:
        """A meeting of its own for each delivery, at this node's store."""
        from rlmux.runtime.weights.thin_link import Meeting, open_store

        with self._opening:  # versions may be published concurrently, and a receiver with a lost store waits long
            if self._store is None:
                self._store = open_store(self._address)
        return Meeting(address=self._address, port=self._store.port, number=next(self._numbers))

    def send(self, name: str, meeting: Meeting, layout: SyncLayout, sender: int) -> None:
        import torch

        from rlmux.runtime.weights.thin_link import WeightSender, join_meeting

        world, _ = join_meeting(meeting, layout, rank=sender, address=self._address)
        file = self._folder.path / name
        contents = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)  # mapped
        WeightSender(layout, sender, world, link=self._link).send(contents, version=0)

    def receive(self, name: str, meeting: Meeting, layout: SyncLayout, receiver: int) -> None:
        from rlmux.runtime.weights.thin_link import WeightReceiver, join_meeting

        rank = layout.receiver_rank(receiver)
        world, inside = join_meeting(meeting, layout, rank=rank, address=self._address)
        payload, _ = WeightReceiver(layout, rank, world, inside).receive()
        contents: Any = payload.numpy()
        self._write(name, contents.data)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._folder.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self._folder.close()

    def _write(self, name: str, contents: bytes | memoryview) -> None:
        file = self._folder.path / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = file.with_name(f"{file.name}.tmp")
        aside.write_bytes(contents)
        aside.rename(file)


@dataclass(slots=True)
class _Delivery:
    """One version on its way to its nodes."""

    trainer: RayWorker
    path: Path
    on_nodes: tuple[str, ...]
    waiting: list[ray.ObjectRef[Any]]
    then: Callable[[], None]
    failure: str | None = None


class Deliveries:
    """Versions in transit, and the nodes that have received them."""

    def __init__(self, here: Path, nodes: Mapping[str, str], sync: RaySync) -> None:
        """`here`: the controller's folder; `nodes`: address by Ray id."""
        self._here = here
        self._sync = sync
        self._carriers: dict[str, Any] = {}
        self._under_way: list[_Delivery] = []
        self._nodes_by_path: dict[Path, tuple[str, ...]] = {}
        ready = [self._carrier(ray_id, address).is_there.remote() for ray_id, address in nodes.items()]
        ray.get(ready)

    def folder_on(self, ray_id: str) -> Path:
        """The folder of a node's weights. Each node has its own name, since several nodes may be one machine."""
        return self._here.with_name(f"{self._here.name}-{ray_id[:12]}")

    def deliver(
        self,
        path: Path,
        trainer: RayWorker,
        sources: Sequence[RayNode],
        targets: Mapping[str, str],
        then: Callable[[], None],
    ) -> None:
        """Deliver the version to the target nodes, addresses by Ray id; `then` is called once all have it.

        Every source node has the same file, to the byte. `trainer`: lost if the delivery fails.
        """
        name = str(path.relative_to(self._here))
        having = {source.ray_id: source.address for source in sources}
        others = {ray_id: address for ray_id, address in targets.items() if ray_id not in having}
        senders = [self._carrier(ray_id, address) for ray_id, address in having.items()]
        receivers = [self._carrier(ray_id, address) for ray_id, address in others.items()]
        on_nodes = (*having, *others)
        self._under_way.append(_Delivery(trainer, path, on_nodes, self._begin(name, senders, receivers), then))
        if not others:
            self.update([])

    def _begin(self, name: str, senders: Sequence[Any], receivers: Sequence[Any]) -> list[ray.ObjectRef[Any]]:
        if not receivers:
            return []
        if not self._sync.is_hierarchical(len(senders), len(receivers)):
            offered = senders[0].offer.remote(name)
            return [receiver.take.remote(name, offered) for receiver in receivers]
        from rlmux.runtime.weights.thin_link import SyncLayout

        layout, meeting = SyncLayout(num_senders=len(senders), num_receivers=len(receivers)), senders[0].meet.remote()
        sends = [sender.send.remote(name, meeting, layout, place) for place, sender in enumerate(senders)]
        receives = [receiver.receive.remote(name, meeting, layout, place) for place, receiver in enumerate(receivers)]
        return [*sends, *receives]

    def watched(self) -> list[ray.ObjectRef[Any]]:
        return [reference for delivery in self._under_way for reference in delivery.waiting]

    def update(self, ready: Sequence[ray.ObjectRef[Any]]) -> list[RayWorker]:
        """Handle finished deliveries. Returns the trainers of failed ones, which are lost with the reason."""
        lost = []
        for delivery in list(self._under_way):
            for reference in [arrived for arrived in delivery.waiting if arrived in ready]:
                delivery.waiting.remove(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    delivery.failure = str(error).strip().splitlines()[-1]
            if delivery.failure is not None:
                self._under_way.remove(delivery)
                delivery.trainer.lose(f"its weights did not arrive: {delivery.failure}")
                lost.append(delivery.trainer)
            elif not delivery.waiting:
                self._under_way.remove(delivery)
                self._arrived(delivery)
        return lost

    def _arrived(self, delivery: _Delivery) -> None:
        path = delivery.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self._nodes_by_path[path] = delivery.on_nodes
        self._remove([path for path in self._nodes_by_path if not path.exists()])
        delivery.then()

    def withdraw(self, trainer: RayWorker) -> None:
        """Drop the versions of a trainer that ended: its successor publishes again from a checkpoint."""
        self._under_way = [delivery for delivery in self._under_way if delivery.trainer is not trainer]
        parent = self._here / trainer.pipeline
        gone = [path for path in self._nodes_by_path if path.parent == parent]
        for path in gone:
            path.unlink(missing_ok=True)
        self._remove(gone)

    def forget_node(self, ray_id: str) -> None:
        self._carriers.pop(ray_id, None)

    def close(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([carrier.close.remote() for carrier in self._carriers.values()], timeout=10)

    def _remove(self, paths: Sequence[Path]) -> None:
        for path in paths:
            name = str(path.relative_to(self._here))
            for ray_id in self._nodes_by_path.pop(path):
                if ray_id in self._carriers:
                    self._carriers[ray_id].remove.remote([name])

    def _carrier(self, ray_id: str, address: str) -> Any:
        if ray_id not in self._carriers:
            make: Any = ray.remote(WeightCarrier)
            strategy = NodeAffinitySchedulingStrategy(ray_id, soft=False)
            options = {"num_cpus": 0, "max_concurrency": _NUM_AT_ONCE, "max_restarts": -1}
            arguments = (self.folder_on(ray_id), address, self._sync.link_bytes_per_s)
            self._carriers[ray_id] = make.options(scheduling_strategy=strategy, **options).remote(*arguments)
        return self._carriers[ray_id]

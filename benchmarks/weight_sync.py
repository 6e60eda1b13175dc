"""Weights over a thin link to 8 receivers: one copy scattered and passed on, against a copy for each receiver.

    python benchmarks/weight_sync.py                    payload 16 MB, link 16 MB/s, 2 senders, 8 receivers
    python benchmarks/weight_sync.py --namespaces       the link is a shaped one between two network namespaces (root)

`one_sender` is the same by the first sender alone, over its own part of the link.

Every rank is a process. The link is a token bucket in the senders (each holds its part of the rate), or a pair of
virtual interfaces with a rate limit between two network namespaces; the inside of the receivers' pool is a loopback
device. Schemes alternate; medians. `limit` is payload over the link's rate.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing as mp
import os
import socket
import statistics
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmux.runtime.weights.thin_link import Link, Scheme, SyncLayout, WeightReceiver, WeightSender

ONE_SENDER = "one_sender"
_CLONE_NEWNET = 0x40000000


class ShapedLink:
    """Two network namespaces with one link between them; its rate is limited on the senders' side."""

    def __init__(self, mb_s: float) -> None:
        self._names = [f"rlmux-{os.getpid()}-{side}" for side in ("senders", "receivers")]
        devices = [f"rlm{os.getpid() % 100_000}{side}" for side in "sr"]
        self.places = list(zip(self._names, devices, strict=True))
        """(namespace, interface): of the senders, of the receivers."""
        for name in self._names:
            _run("ip", "netns", "add", name)
        (sender, sender_device), (receiver, receiver_device) = self.places
        _run("ip", "link", "add", sender_device, "netns", sender, "type", "veth",
             "peer", "name", receiver_device, "netns", receiver)  # fmt: skip
        for number, (name, device) in enumerate(self.places, start=1):
            _run("ip", "-n", name, "addr", "add", f"10.231.7.{number}/24", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        rate = f"{int(mb_s * (1 << 20) * 8)}bit"
        _run("tc", "-n", sender, "qdisc", "add", "dev", sender_device, "root",
             "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")  # fmt: skip

    def close(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def take_part(
    rank: int,
    layout: SyncLayout,
    arguments: argparse.Namespace,
    meeting: str,
    said: mp.SimpleQueue[Any],
    place: tuple[str, str] | None,
) -> None:
    torch.set_num_threads(1)
    if place is not None:
        namespace, os.environ["GLOO_SOCKET_IFNAME"] = place
        _enter(namespace)
    world = layout.num_senders + layout.num_receivers
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    inside = dist.new_group([layout.receiver_rank(receiver) for receiver in range(layout.num_receivers)])
    payload = torch.randint(
        256, (arguments.payload_mb << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    link = None if place is not None else Link(arguments.link_mb_s * (1 << 20) / layout.num_senders)
    of_one = SyncLayout(num_senders=1, num_receivers=layout.num_receivers)
    with_one = dist.new_group([0, *range(layout.num_senders, world)])
    everyone = dist.group.WORLD
    assert everyone is not None, "no group of all processes was made"
    assert with_one is not None, "no group with one sender was made"
    ways = [(scheme.value, scheme, layout, everyone) for scheme in Scheme]
    ways.append((ONE_SENDER, Scheme.HIERARCHICAL, of_one, with_one))
    for repeat in range(arguments.repeats):
        for name, scheme, used, group in ways:
            dist.barrier()
            start_s = time.monotonic()
            if rank < used.num_senders:
                WeightSender(used, rank, group, link=link).send(payload, repeat, scheme)
            elif rank >= layout.num_senders:
                own = rank - layout.num_senders + used.num_senders
                received, version = WeightReceiver(used, own, group, inside).receive(scheme)
                assert version == repeat
                assert torch.equal(received, payload)
            dist.barrier()
            if rank == 0:
                said.put((name, time.monotonic() - start_s))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload-mb", type=int, default=16)
    parser.add_argument("--link-mb-s", type=float, default=16.0)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    layout = SyncLayout(num_senders=arguments.senders, num_receivers=arguments.receivers)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rlmux.runtime.workers.fork_server_imports", "rlmux.runtime.weights.thin_link"])
    said = context.SimpleQueue()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        places: list[tuple[str, str] | None] = [None, None]
        if arguments.namespaces:
            places = [*stack.enter_context(contextlib.closing(ShapedLink(arguments.link_mb_s))).places]
        shared = (layout, arguments, str(Path(folder) / "meet"), said)
        ranks = [
            context.Process(target=take_part, args=(rank, *shared, places[rank >= layout.num_senders]))
            for rank in range(layout.num_senders + layout.num_receivers)
        ]
        for process in ranks:
            process.start()
        names = [*(scheme.value for scheme in Scheme), ONE_SENDER]
        measured = [said.get() for _ in range(arguments.repeats * len(names))]
        for process in ranks:
            process.join()
    medians = {name: statistics.median(s for other, s in measured if other == name) for name in names}
    limit_s = arguments.payload_mb / arguments.link_mb_s
    figures = {
        "payload_mb": arguments.payload_mb,
        "link_mb_s": arguments.link_mb_s,
        "senders": arguments.senders,
        "receivers": arguments.receivers,
        "limit_s": limit_s,
        **{f"{name}_s": medians[name] for name in names},
        "over_limit": medians[Scheme.HIERARCHICAL] / limit_s,
        "speedup": medians[Scheme.PER_RECEIVER] / medians[Scheme.HIERARCHICAL],
        "one_sender_over_all": medians[ONE_SENDER] / medians[Scheme.HIERARCHICAL],
    }
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:16} {value:.4g}")


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


if __name__ == "__main__":
    main()

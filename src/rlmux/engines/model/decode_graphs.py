"""Decode steps as CUDA graphs: launched whole, where one by one the host is slower than the device.

    first step of a kind    computed as it stands, on the stream that records: libraries set themselves up there
    second                  recorded, then launched
    later                   launched

A step of a small model is some hundred kernels of a few microseconds each, and the host needs about as long to launch
one. The kernels and their order are the same in both ways. What a graph reads and writes lies where it lay when it was
recorded: graphs are dropped with the plan that they belong to, which an offload does. So do its kernels stay in the
green context whose stream they were recorded on: each device fraction has its own stream and its own graphs.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from rlmux.engines.device_fraction import side_stream


class DecodeGraphs:
    """The recorded steps of one decode plan, by kind and by the device fraction under which they were recorded."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[float, Hashable], torch.cuda.CUDAGraph | None] = {}
        """None for a kind that was computed once and not recorded yet."""

    def run(self, kind: Hashable, step: Callable[[], None]) -> None:
        """Run `step`, which is the same at every call of this kind and never waits."""
        device_fraction, stream = side_stream()
        key = device_fraction, kind
        if key not in self._graphs:
            self._graphs[key] = None
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
        graph.replay()

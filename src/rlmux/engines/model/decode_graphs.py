"""Decode steps as CUDA graphs: launched whole, where one by one the host is slower than the device.

    first step of a kind    computed as it stands, on the stream that records: libraries set themselves up there
    second                  recorded, then launched
    later                   launched

A step of a small model is some hundred kernels of a few microseconds each, and the host needs about as long to launch
one. The kernels and their order are the same in both ways. What a graph reads and writes lies where it lay when it was
recorded: graphs are dropped with the plan that they belong to, which an offload does.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class DecodeGraphs:
    """The recorded steps of one decode plan, by kind."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of CUDA."""
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """None for a kind that was computed once and not recorded yet."""

    def run(self, kind: Hashable, step: Callable[[], None]) -> None:
        """Run `step`, which is the same at every call of this kind and never waits."""
        if kind not in self._graphs:
            self._graphs[kind] = None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                step()
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        graph = self._graphs[kind] or self._record(kind, step)
        graph.replay()

    def _record(self, kind: Hashable, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            step()
        self._graphs[kind] = graph
        return graph

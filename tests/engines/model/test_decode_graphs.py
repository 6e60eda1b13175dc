"""Recorded decode steps: one recording for each kind of step and device fraction, which reads where it was recorded.

With streams and graphs of ours, which note what is recorded and run it again: torch's need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmux.engines.model import decode_graphs
from rlmux.engines.model.decode_graphs import DecodeGraphs
from rlmux.engines.rollout import slot_engine
from rlmux.engines.rollout.slot_engine import SlotRolloutEngine
from rlmux.rl.config import AdapterConfig, ModelConfig, RolloutConfig
from rlmux.rl.types import TrajectoryRequest

VOCAB_SIZE = 41

STREAM = SimpleNamespace(wait_stream=lambda other: None)


class Graph:
    """What ran while it was recorded runs again, with what it read then."""

    recorded: Callable[[], None] | None = None

    def replay(self) -> None:
        assert self.recorded is not None
        self.recorded()


@pytest.fixture
def fraction(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The device fraction in force."""
    in_force = SimpleNamespace(now=1.0)

    @contextmanager
    def recording(graph: Graph, stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(decode_graphs, "side_stream", lambda: (in_force.now, STREAM))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: STREAM)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return in_force


def test_a_kind_is_computed_then_recorded_then_launched_for_each_fraction(
    fraction: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = DecodeGraphs()
    computed: list[float] = []
    launched: list[float] = []
    monkeypatch.setattr(Graph, "replay", lambda graph: launched.append(fraction.now))
    for fraction.now in (1.0, 0.4, 1.0, 1.0, 0.4, 1.0):
        graphs.run("kind", lambda: computed.append(fraction.now))
    assert computed == [1.0, 0.4, 1.0, 0.4]  # once as it stands, once recorded
    assert launched == [1.0, 1.0, 0.4, 1.0]


def test_recorded_steps_of_several_adapters_read_the_masks_of_the_present_rows(
    monkeypatch: pytest.MonkeyPatch, new_requests: Callable[..., list[TrajectoryRequest]], drain: Callable[..., Any]
) -> None:
    """A recording keeps the adapters and the masks of its first step: later steps have to write over these."""
    num_launched = 0

    class Recorded:
        def __init__(self) -> None:
            self._adapters: dict[Any, Any] = {}

        def run(self, kind: Any, step: Callable[[], None]) -> None:
            nonlocal num_launched
            (plan,) = (cell.cell_contents for cell in step.__closure__ or () if hasattr(cell.cell_contents, "adapters"))
            present = plan.adapters
            plan.adapters = self._adapters.setdefault(kind, present)
            num_launched += plan.adapters is not present
            step()
            plan.adapters = present

    answers = []
    for uses_graphs in (False, True):
        engine = engine_with_adapters("a", "b")
        engine._uses_graphs = uses_graphs
        monkeypatch.setattr(slot_engine, "DecodeGraphs", Recorded)
        for number, request in enumerate(new_requests(12)):
            engine.submit([replace(request, id=request.id._replace(adapter="ab"[number % 3 % 2]))])
        answers.append(drain(engine))
    assert answers[0] == answers[1]
    assert num_launched > 20


def test_an_adapter_that_comes_or_goes_takes_the_recordings_along() -> None:
    """Another one's matrices may lie elsewhere under the same name."""
    engine = engine_with_adapters("a")
    for change in (lambda: engine.add_adapter("b", None), lambda: engine.remove_adapter("a")):
        engine._plans[8, 48] = object()  # type: ignore[assignment]
        change()
        assert not engine._plans


def engine_with_adapters(*names: str) -> SlotRolloutEngine:
    rollout = RolloutConfig(num_slots=8, max_new_tokens=40, max_prompt_tokens=24)
    engine = SlotRolloutEngine(ModelConfig(), rollout, vocab_size=VOCAB_SIZE, seed=0)
    with torch.inference_mode():
        for name in names:
            engine.add_adapter(name, AdapterConfig(rank=4, alpha=8, targets=("q_proj", "down_proj")))
            weights = engine._adapters.weights(name)
            assert weights is not None
            generator = torch.Generator().manual_seed(ord(name))
            weights.flat.copy_(torch.randn(weights.flat.shape, generator=generator) * 0.3)
    return engine

"""What an update costs the host: it reads no number from the device for each micro-batch. Counted on cores."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines.train import test_datum_train
from tests.engines.train.test_train_engine import batch, config, run_stage, run_step
from torch.profiler import ProfilerActivity, profile

from rlmux.core.errors import PipelineError
from rlmux.core.model import Stage
from rlmux.engines.train.train_engine import TorchTrainEngine
from rlmux.engines.train.update import figures
from rlmux.engines.train.update.figures import Figures, require_finite

WAITS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal")
"""Operations that make the host wait for a device."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "decoupled": {"objective": "decoupled", "staleness": 1},
    "several updates": {"num_epochs": 2, "num_minibatches": 3, "kl_coef": 0.1},
}


class Waits:
    """Counts operations, and the waits of what is computed within it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reads = 0
        monkeypatch.setattr(figures, "wait_for", self._wait)
        self._profile = profile(activities=[ProfilerActivity.CPU])

    def _wait(self, device: torch.device) -> None:
        self._reads += 1

    def __enter__(self) -> Waits:
        self._profile.__enter__()
        self._reads = 0
        return self

    def __exit__(self, *ending: Any) -> None:
        self._profile.__exit__(*ending)
        self.operations = Counter(
            event.name.removeprefix("aten::") for event in self._profile.events() if event.name.startswith("aten::")
        )
        self.count = self._reads + sum(self.operations[name] for name in WAITS)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_waits_of_a_step_do_not_grow_with_its_micro_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1, 2):
        trainer = TorchTrainEngine(config(micro_batch_size=size, **OBJECTIVES[name]))
        run_step(trainer, batch(1))
        with Waits(monkeypatch) as waits:
            run_step(trainer, batch(2))
        found.append(waits)
    many, few = found
    num_updates = config(**OBJECTIVES[name]).algorithm.num_updates
    assert many.operations["embedding"] == 2 * few.operations["embedding"], "twice the forward passes"
    assert many.operations.total() < 2 * few.operations.total()
    assert many.count == few.count <= 4 * num_updates + 1


def test_waits_of_a_warmup_do_not_grow_with_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for size in (1, 5):
        trainer = TorchTrainEngine(config(sft_warmup=2, micro_batch_size=size))
        with Waits(monkeypatch) as waits:
            run_stage(trainer, Stage.SFT_WARMUP)
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_waits_of_a_request_do_not_grow_with_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = test_datum_train.request("cross_entropy", test_datum_train.datums(6, weights=(0.5, 1.0)))
    counts = []
    for size in (1, 6):
        trainer = test_datum_train.engine(micro_batch_size=size)
        with Waits(monkeypatch) as waits:
            test_datum_train.run(trainer, asked)
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_figures_are_the_numbers_that_the_device_computed() -> None:
    rows = Figures(torch.device("cpu"))
    rows.add(3, [torch.tensor(0.1, requires_grad=True), torch.tensor(7)])
    rows.add(1, [torch.tensor(math.nan), torch.tensor(True)])
    (first, second) = rows.read()
    assert first == (3, float(torch.tensor(0.1)), 7.0)
    assert second[0] == second[2] == 1
    assert math.isnan(second[1])
    assert rows.read() == []


def test_the_first_loss_that_is_not_finite_is_named() -> None:
    require_finite([1.0, -2.0], "a")
    with pytest.raises(PipelineError, match=r"^a: the loss is -inf; the weights are left as they were$"):
        require_finite([1.0, -math.inf, math.nan], "a")


def test_a_step_without_a_fresh_token_has_no_gap() -> None:
    trainer = TorchTrainEngine(config(staleness=1))
    run_step(trainer, batch(1))
    old = [replace(each, versions=(0,) * len(each.tokens)) for each in batch(2).trajectories]
    assert math.isnan(run_step(trainer, replace(batch(2), trajectories=old))["logprob_gap"])

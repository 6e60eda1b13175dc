"""Curves: those that say nothing are marked and come after the others."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.log_script import AlternatingRun
from tests.service.pages_server import Pages

pytestmark = pytest.mark.xdist_group("browser")
NUM_STEPS = 24
CHARTS = "main > .charts .chart"


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Rewards are noise, the loss falls, KL is one spike, entropy differs in its last bits alone."""
    run, chance = AlternatingRun(num_steps=NUM_STEPS), random.Random(5)
    for entry in run.script.rows:
        if entry.type == "step":
            step, metrics = entry.value["step"], entry.value["metrics"]
            metrics["reward_mean"] = chance.gauss(0.5, 0.1)
            metrics["loss"] = 2.0 - step / NUM_STEPS + chance.gauss(0.0, 0.02)
            metrics["kl"] = 5.0 if step == 12 else chance.gauss(0.01, 0.001)
            metrics["entropy"] = 3.0 + step * 1e-13
    served = Pages(run.script.write(tmp_path_factory.mktemp("runs") / "noisy"))
    yield served
    served.close()


@pytest.mark.parametrize(
    "path", ["/pipelines/noisy/sort", "/compare?of=noisy/sort,noisy/tools"], ids=["pipeline", "compare"]
)
def test_flat_curves_say_so_and_come_after_those_that_change(noisy, enter, path):
    page = enter(noisy, path)
    page.wait_for_selector(f"{CHARTS} canvas")
    titles = page.locator(f"{CHARTS} h3 b").all_inner_texts()
    assert titles == ["Loss", "KL to the reference (nats)", "Reward, mean", "Entropy (nats per token)"]
    flat = page.locator(f"{CHARTS}:has-text('flat within noise') h3 b").all_inner_texts()
    assert flat == titles[2:]

"""The rivals' table: one pipeline on 32 H100 under each system, over `verl` on the same work.

    GSM8K, MATH x 256 and 64 answers a device ─▶ rivals.play ─▶ tokens/s over verl, beside the published range

A system with a searched or best division has that; others are as their papers run them. RollPacker trains on shorter
answers, so its figure is steps a second, over its own sampling without rounds. `published` is the least of the range
that is accepted: figures over verl on other models, lengths and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlmux.papers import rivals
from rlmux.papers.paper_rows import MissCause, PaperRow, mean, row_over
from rlmux.papers.rivals.trainer import RivalResult
from rlmux.report.figures.charts import Line, line_chart
from rlmux.sim.models.substages import SubStageWorld
from rlmux.sim.results.sweep import Progress
from rlmux.sim.workloads.substage_pairs import GSM8K_4B, MATH_4B, crowd

NUM_DEVICES, NUM_STEPS = 8, 10
_ETAS = (0, 1, 2, 4, 8)
_OTHER_WORK = MissCause(text="published on other models, answer lengths and numbers of GPUs; not computed")

Play = Callable[[SubStageWorld], RivalResult]


def _best(system: str, **options: Any) -> Play:
    return lambda world: rivals.best_division(system, world, num_devices=NUM_DEVICES, num_steps=NUM_STEPS, **options)


def _play(system: str, **options: Any) -> Play:
    return lambda world: rivals.play(system, world, num_devices=NUM_DEVICES, num_steps=NUM_STEPS, **options)


SYSTEMS: dict[str, tuple[Play, tuple[float, float], str]] = {
    "rollpacker": (_play("rollpacker"), (1.30, 2.21), "tail batching alone, 16 to 64 H800"),
    "streamrl, synchronous": (_play("streamrl", is_async=False), (1.12, 2.12), "7B to 72B, 128 H800"),
    "streamrl, one step off": (_play("streamrl", is_async=True), (1.30, 2.66), "7B to 72B, 128 H800"),
    "asyncflow": (_play("asyncflow"), (1.59, 2.03), "mean and best, 32 to 1024 NPUs"),
    "areal, eta 4": (_best("areal", eta=4), (2.27, 2.77), "hours for 1000 steps, 128 to 192 H800"),
    "laminar, eta 4": (_best("laminar", eta=4), (1.0, 5.48), "up to, 1024 GPUs"),
}
"""How each system is played, its published range over verl, and where that was measured."""


def reproduce(*, num_seeds: int = 1, progress: Progress | None = None, out: Path | None = None) -> dict[str, Any]:
    """{"paper", "num_seeds", "rows"}; with `out`, throughput against staleness as a picture there."""
    works = [(name, recorded, answers) for name, recorded in _WORK.items() for answers in (256, 64)]
    rows = []
    for done, (name, recorded, answers) in enumerate(works):
        worlds = [_world(recorded, answers, seed) for seed in range(num_seeds)]
        baseline = [_play("verl")(world) for world in worlds]
        rows += list(_rows(f"{name}, {answers} answers a device", worlds, baseline))
        if progress is not None:
            progress(done + 1, len(works))
    report: dict[str, Any] = {"paper": "rivals over verl, 32 H100", "num_seeds": num_seeds, "rows": rows}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        picture = out / "staleness.svg"
        picture.write_text(staleness_chart(), encoding="utf-8")
        report["pictures"] = [str(picture)]
    return report


_WORK = {"GSM8K, Qwen3-4B": GSM8K_4B, "MATH, Qwen3-4B": MATH_4B}


def _world(recorded: Any, answers: int, seed: int) -> SubStageWorld:
    made = crowd((recorded,), num_gpus=4 * NUM_DEVICES, sequences_per_device=answers, seed=seed)
    world = made.arrivals[0].world
    assert isinstance(world, SubStageWorld)
    return world


def _rows(section: str, worlds: list[SubStageWorld], baseline: list[RivalResult]) -> Iterator[dict[str, Any]]:
    without_rounds = _play("rollpacker", prompts=1.0, samples=1.0)
    for system, (play, (low, high), source) in SYSTEMS.items():
        runs = [play(world) for world in worlds]
        is_shorter = system == "rollpacker"
        if is_shorter:
            pairs = zip(runs, map(without_rounds, worlds), strict=True)
            ratios = [over.mean_step_s / run.mean_step_s for run, over in pairs]
        else:
            ratios = [run.tokens_per_s / over.tokens_per_s for run, over in zip(runs, baseline, strict=True)]
        figure = f"{system}: {'steps/s' if is_shorter else 'tokens/s'}"
        row: PaperRow = row_over(
            ratios, section=section, figure=figure, published=low, source=source, ours=mean(ratios),
            accepted=(low, high), cause=_OTHER_WORK,
        )  # fmt: skip
        yield row.as_dict()


def staleness_chart() -> str:
    """Tokens/s over verl against mean staleness: AReaL and Laminar by eta, the others at theirs."""
    world = _world(GSM8K_4B, 256, 0)
    verl = _play("verl")(world)
    curves = [
        Line(name=system, points=sorted(_point(_best(system, eta=eta)(world), verl) for eta in _ETAS))
        for system in ("areal", "laminar")
    ]
    by_option = {
        "streamrl": [_play("streamrl", is_async=is_async) for is_async in (False, True)],
        "asyncflow": [_play("asyncflow", fraction=fraction) for fraction in (0.0, 1.0)],
    }
    lines = [Line(name=name, points=[_point(play(world), verl) for play in both]) for name, both in by_option.items()]
    return line_chart(
        [*curves, *lines],
        title="Throughput against staleness: GSM8K, Qwen3-4B, 32 H100",
        x_label="mean staleness, versions",
        y_label="tokens/s over verl",
    )


def _point(run: RivalResult, verl: RivalResult) -> tuple[float, float]:
    return run.staleness_mean, run.tokens_per_s / verl.tokens_per_s

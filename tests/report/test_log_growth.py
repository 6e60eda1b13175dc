"""The log stays small: rows are packed into blocks, and a long run's blocks into sealed segments."""

from __future__ import annotations

import random
from pathlib import Path

from rlmux.core.actions import RunStage
from rlmux.core.events import ChunkFinished, StageFinished
from rlmux.core.model import OrderId, PipelineId, Stage
from rlmux.log.run_log import LOG_NAME, LogLimits, RunLog

BYTES_PER_DAY = 150e6
"""Most bytes that sixteen busy devices may write in a day."""
REPORTS_PER_DAY = 16 * 2 * 86400
REPORTS_PER_STEP = 2 * 2 * 30
"""Reports of a pipeline's two devices in a step of 30 seconds."""


def progress(num_reports: int, num_devices: int = 16, *, seed: int = 0) -> list[ChunkFinished]:
    """Reports of busy devices, each every half second, with the noise of real clocks."""
    draw = random.Random(seed)
    tokens, seconds, active = [0] * num_devices, [0.0] * num_devices, [256] * num_devices
    reports = []
    for number in range(num_reports):
        device = number % num_devices
        spent_s = 0.5 + draw.random() * 0.03
        tokens[device] += draw.randint(3500, 4500)
        seconds[device] += spent_s
        active[device] = max(0, active[device] - draw.choice([0, 0, 1, 2]))
        reports.append(
            ChunkFinished(
                time_s=round(0.5 * (number / num_devices) + draw.random() * 0.01 + number * 1e-4, 6),
                order=device + 1,
                num_active=active[device],
                num_waiting=0,
                tokens=tokens[device],
                seconds=round(seconds[device], 6),
            )
        )
    return reports


def note_step(log: RunLog, number: int, draw: random.Random) -> None:
    """What a step of 256 trajectories leaves in the log besides progress: notes, orders and their ends."""
    pipeline, step, time_s = f"p{number % 8}", number // 8, round(number * 30 / 8 + draw.random(), 6)
    metrics = {f"metric_{index}": draw.random() for index in range(12)}
    log.note("step", time_s, pipeline=pipeline, step=step, metrics=metrics, weights_sha256=draw.randbytes(32).hex())
    runs = [[min(256, 1 + int(draw.expovariate(1 / 40)))] for _ in range(256)]
    iterations = [["dense_decode", rows, draw.randint(1, 40), draw.randint(1, 999), 0.5] for rows in (8, 16, 32, 64)]
    log.note("rollout", time_s, pipeline=pipeline, step=step, slots=64, group_size=8, runs=runs, iterations=iterations)
    for index, stage in enumerate((Stage.GENERATE, Stage.REWARD, Stage.UPDATE, Stage.PUBLISH)):
        order = OrderId(100 + 4 * number + index)
        seconds = round(30 * draw.random(), 6)
        log.append_event(StageFinished(time_s=time_s, order=order, seconds=seconds, tokens=draw.randint(8000, 12000)))
        log.append_actions(
            [
                RunStage(
                    order=order, pipeline=PipelineId(pipeline), step=step, stage=stage, devices=(), weight_version=step
                )
            ]
        )


def test_a_sealed_segment_leaves_a_small_file_behind(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {"policy": "p"}, limits=LogLimits(segment_rows=10_000)) as log:
        for report in progress(10_100):
            log.append_event(report)
            log.commit()
    assert (tmp_path / LOG_NAME).stat().st_size < 60_000 < (tmp_path / "run.0001.db").stat().st_size


def test_sixteen_busy_devices_write_at_most_150_mb_a_day(tmp_path: Path) -> None:
    sizes, draw = [], random.Random(1)
    with RunLog.create(tmp_path, {"policy": "p"}) as log:
        for number, report in enumerate(progress(20_000), 1):
            log.append_event(report)
            if number % REPORTS_PER_STEP == 0:
                note_step(log, number // REPORTS_PER_STEP, draw)
            log.commit()
            if number % 10_000 == 0:
                sizes.append((tmp_path / LOG_NAME).stat().st_size)
    assert (sizes[1] - sizes[0]) / 10_000 * REPORTS_PER_DAY <= BYTES_PER_DAY

"""The log stays small: rows are packed into blocks, and a long run's blocks into sealed segments."""

from __future__ import annotations

import random
from pathlib import Path

from rlmux.core.events import ChunkFinished
from rlmux.report.log import LOG_NAME, LogLimits, RunLog

BYTES_PER_DAY = 50e6
"""Most bytes that sixteen busy devices may write in a day."""
REPORTS_PER_DAY = 16 * 2 * 86400


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


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_sealed_segment_leaves_a_small_file_behind(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {"policy": "p"}, limits=LogLimits(segment_rows=10_000)) as log:
        for report in progress(10_100):
            log.append_event(report)
            log.commit()
    assert (tmp_path / LOG_NAME).stat().st_size < 60_000 < (tmp_path / "run.0001.db").stat().st_size


def test_sixteen_busy_devices_write_at_most_50_mb_a_day(tmp_path: Path) -> None:
    sizes = []
    with RunLog.create(tmp_path, {"policy": "p"}) as log:
        for number, report in enumerate(progress(20_000), 1):
            log.append_event(report)
            log.commit()
            if number % 10_000 == 0:
                sizes.append((tmp_path / LOG_NAME).stat().st_size)
    assert (sizes[1] - sizes[0]) / 10_000 * REPORTS_PER_DAY <= BYTES_PER_DAY

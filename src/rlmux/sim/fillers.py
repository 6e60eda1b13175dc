"""What fillers of a simulated run came to: kept apart, so that every other figure is of the other pipelines alone.

    Collector ── is it a filler's? ─▶ FillerFigures ─▶ FillerResult, one a filler

A filler is billed for the devices that it computed on, for as long as it did; the nodes are held by others, or by none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rlmux.core.model import Cluster, DeviceId, PipelineId


@dataclass(frozen=True, slots=True, kw_only=True)
class FillerResult:
    """What one filler got."""

    pipeline: PipelineId
    submit_s: float
    left_s: float | None
    """Time at which it was over; None where the run ended first."""
    steps: int
    device_s: float
    """Seconds of one device for which it computed or switched."""
    usd: float
    """Price of these."""
    refused: str = ""


@dataclass(slots=True)
class _Filler:
    submit_s: float
    left_s: float | None = None
    steps: int = 0
    device_s: float = 0.0
    usd: float = 0.0
    refused: str = ""


class FillerFigures:
    """Told of each change by the collector."""

    def __init__(self, cluster: Cluster) -> None:
        pools = cluster.pools.items()
        self._usd_per_device_s = {name: pool.usd_per_node_hour / pool.devices_per_node / 3600 for name, pool in pools}
        self.by_id: dict[PipelineId, _Filler] = {}
        """Figures of each filler so far."""

    def set_price(self, pool: str, usd_per_device_s: float) -> None:
        """Devices of the pool cost this from now on; an order is billed at the price at its end."""
        self._usd_per_device_s[pool] = usd_per_device_s

    def submit(self, pipeline: PipelineId, now_s: float) -> None:
        self.by_id[pipeline] = _Filler(now_s)

    def leave(self, pipeline: PipelineId, now_s: float) -> None:
        self.by_id[pipeline].left_s = now_s

    def refuse(self, pipeline: PipelineId, reason: str) -> None:
        self.by_id[pipeline].refused = reason

    def end_step(self, pipeline: PipelineId) -> None:
        self.by_id[pipeline].steps += 1

    def compute(self, pipeline: PipelineId, devices: tuple[DeviceId, ...], seconds: float) -> None:
        """It held the devices for so long."""
        filler = self.by_id[pipeline]
        filler.device_s += seconds * len(devices)
        filler.usd += seconds * sum(self._usd_per_device_s[device.pool] for device in devices)

    def results(self) -> tuple[FillerResult, ...]:
        """Every filler, in the order of submission."""
        return tuple(FillerResult(pipeline=name, **asdict(filler)) for name, filler in self.by_id.items())


def totals(results: tuple[FillerResult, ...]) -> Mapping[str, float]:
    """The numbers of `simulate --json` about all fillers together."""
    return {
        "num": len(results),
        "num_finished": sum(filler.left_s is not None and not filler.refused for filler in results),
        "steps": sum(filler.steps for filler in results),
        "device_hours": sum(filler.device_s for filler in results) / 3600,
        "usd": sum(filler.usd for filler in results),
    }

"""Figures of every lane for Prometheus: read from the indexes at each scrape, in a registry of this server's own.

    index.db of each lane ──collect──▶ registry ──▶ text    the log's figures: they survive a restart of the server
    answered requests ────observe────▶    ┘                 the one figure of this process

Counters count what is settled (`report.follow`), which no later row takes back; rebuilt runs and repeated
steps are the exceptions. A pipeline has series while it runs and ten minutes longer, so that their
number follows that of the running pipelines, not that of all there ever were.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from rlmux.report.timeline.intervals import Kind
from rlmux.service.dashboard.auth.access import SERVER
from rlmux.service.dashboard.handlers import NOT_SHOWN_STATES, Reads
from rlmux.service.dashboard.parameters import Caller
from rlmux.service.dashboard.router import JSON
from rlmux.service.index.store import IndexReader

REQUEST_BUCKETS_S = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
SHOWN_AFTER_END_S = 600.0
"""Seconds of the run's clock for which an ended pipeline still has series."""

_OF_LANE = {
    "rlmux_run_seconds": ("makespan_s", "Seconds since the run's start, by its clock"),
    "rlmux_index_lag_seconds": ("index_lag_s", "Seconds by which the index is behind the log"),
    "rlmux_control_overhead_ratio": ("control_overhead", "Share of device-seconds that rlmux itself took"),
    "rlmux_slo_kept_ratio": ("slo_attainment", "Share of the pipelines with an SLO that keep it"),
}
"""Gauges of a lane: its key in the API, and its help text."""
_COUNTED = {
    "rlmux_switches": ("num_switches", "Orders that began with a switch"),
    "rlmux_migrations": ("num_migrations", "Tails and shards of rollouts that migrated to other devices"),
}
_OF_HARDWARE = {
    "rlmux_device_use_ratio": ("use", "Share of the last second or more in which the device computed, by its counter"),
    "rlmux_device_memory_bytes": ("memory_bytes", "Memory of the device"),
    "rlmux_device_memory_used_bytes": ("memory_used_bytes", "Memory of the device that is used, by any process"),
    "rlmux_device_power_watts": ("power_w", "Power that the device draws"),
    "rlmux_device_temperature_celsius": ("temperature_c", "Temperature of the device"),
}
"""Gauges of a device, from the machine's counters."""
_OF_PIPELINE = {
    "rlmux_pipeline_step": ("step", "Last published step"),
    "rlmux_pipeline_steps_planned": ("num_steps", "Steps that the pipeline is to make"),
    "rlmux_pipeline_step_seconds": ("step_s_mean", "Mean seconds of a step, without the first"),
    "rlmux_pipeline_step_slowdown": ("step_slowdown", "Seconds of a step over those it would have alone"),
    "rlmux_pipeline_slo_slowdown": ("slo_slowdown", "Largest step slowdown that the pipeline accepts"),
    "rlmux_pipeline_tokens": ("tokens", "Tokens sampled in rollouts whose result counts"),
}
"""Gauges of a pipeline: a step that is done again takes its figures back."""
_OF_LAST_STEP = ("reward_mean", "kl", "entropy", "grad_norm", "logprob_gap", "response_len_mean")
"""Exported metrics of the last published step, as `rlmux_pipeline_METRIC`."""
_OUTCOMES = "outcomes/"
"""How the names of metrics begin that count outcomes of programs and environments."""


class Scrape(Collector):
    """What `/metrics` answers."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._registry = CollectorRegistry()
        self._requests = Histogram(
            "rlmux_http_request_seconds",
            "Seconds until an answer began, by address",
            ("route", "status"),
            registry=self._registry,
            buckets=REQUEST_BUCKETS_S,
        )
        self._registry.register(self)

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Note one answered request. `route`: the route's path, without parameters."""
        self._requests.labels(route, str(status)).observe(seconds)

    def answer(self, caller: Caller) -> PlainTextResponse:
        encode, media_type = choose_encoder(caller.headers.get("accept", ""))
        headers = {"Cache-Control": "no-store", "Content-Type": media_type}
        return PlainTextResponse(encode(self._registry), headers=headers)

    def grafana(self) -> Response:
        """A dashboard to import into Grafana."""
        return Response((Path(__file__).parent / "grafana.json").read_bytes(), media_type=JSON)

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        for row in (self._reads.lane_row(name, SERVER) for name in self._reads.names()):
            families.gauge(
                "rlmux_lane_up", "Whether a process goes on with the run", row["state"] == "running", lane=row["name"]
            )
            if row["state"] in NOT_SHOWN_STATES:
                continue  # it has no index, and no other series
            _add_lane(families, row)
            with self._reads.open(row["name"], SERVER) as reader:
                _add_devices(families, row["name"], reader)
                _add_pipelines(families, row["name"], reader)
                _add_alerts(families, row["name"], reader)
        return families.every()


class _Families:
    """Series by the figure that they are of."""

    def __init__(self) -> None:
        self._made: dict[str, Metric] = {}

    def gauge(self, name: str, help_text: str, value: float | None, **labels: str) -> None:
        """Nothing where there is no value."""
        self._add(GaugeMetricFamily, name, help_text, value, labels)

    def counter(self, name: str, help_text: str, value: float | None, **labels: str) -> None:
        self._add(CounterMetricFamily, name, help_text, value, labels)

    def every(self) -> Iterator[Metric]:
        yield from self._made.values()

    def _add(self, family: Any, name: str, help_text: str, value: float | None, labels: dict[str, str]) -> None:
        if value is not None:
            made = self._made.setdefault(name, family(name, help_text, labels=list(labels)))
            made.add_metric(list(labels.values()), float(value))  # type: ignore[attr-defined]


def _add_lane(families: _Families, row: dict[str, Any]) -> None:
    lane = row["name"]
    for name, (key, help_text) in _OF_LANE.items():
        families.gauge(name, help_text, row[key], lane=lane)
    for name, (key, help_text) in _COUNTED.items():
        families.counter(name, help_text, row[key], lane=lane)
    memory = row.get("host_memory") or {}
    families.gauge("rlmux_host_memory_bytes", "Memory of the controller's machine", memory.get("bytes"), lane=lane)
    help_text = "Memory of the controller's machine that is used"
    families.gauge("rlmux_host_memory_used_bytes", help_text, memory.get("used_bytes"), lane=lane)
    for status, num in row["pipelines"].items():
        families.gauge("rlmux_pipelines", "Pipelines by status", num, lane=lane, status=status)


def _add_devices(families: _Families, lane: str, reader: IndexReader) -> None:
    for sums in reader.facts["settled"]:
        help_text = "Device-seconds by what they went to, up to where nothing changes any more"
        labels = {key: sums[key] for key in ("pool", "kind", "cause")}
        families.counter("rlmux_device_seconds", help_text, sums["seconds"], lane=lane, **labels)
    for (text,) in reader.rows("SELECT json FROM device ORDER BY place"):
        device = json.loads(text)
        help_text = "Whether the device computes now"
        families.gauge("rlmux_device_busy", help_text, device["kind"] == Kind.BUSY, lane=lane, device=device["id"])
        for name, (key, help_text) in _OF_HARDWARE.items():
            families.gauge(name, help_text, (device["hardware"] or {}).get(key), lane=lane, device=device["id"])


def _add_alerts(families: _Families, lane: str, reader: IndexReader) -> None:
    firing = Counter((alert["rule"], alert["level"]) for alert in reader.facts["alerts"])
    for (rule, level), num in sorted(firing.items()):
        families.gauge("rlmux_alerts_firing", "Alerts that fire, by rule", num, lane=lane, rule=rule, level=level)


def _add_pipelines(families: _Families, lane: str, reader: IndexReader) -> None:
    now_s = reader.facts["end_s"]
    for (text,) in reader.rows("SELECT json FROM pipeline ORDER BY place"):
        row = json.loads(text)
        is_recent = row["ended_s"] is not None and now_s - row["ended_s"] < SHOWN_AFTER_END_S
        if row["status"] != "running" and not is_recent:
            continue
        labels = {"lane": lane, "pipeline": row["name"]}
        for name, (key, help_text) in _OF_PIPELINE.items():
            families.gauge(name, help_text, row[key], **labels)
        last = _last_metrics(reader, row["name"])
        for key in _OF_LAST_STEP:
            families.gauge(f"rlmux_pipeline_{key}", f"{key} of the last published step", last.get(key), **labels)
        for key in sorted(key for key in last if key.startswith(_OUTCOMES)):
            families.gauge(
                "rlmux_pipeline_outcomes",
                "Trajectories of the last published step that failed, met a limit, or were tried again",
                last[key],
                outcome=key.removeprefix(_OUTCOMES),
                **labels,
            )


def _last_metrics(reader: IndexReader, name: str) -> dict[str, Any]:
    found = reader.rows(
        "SELECT json FROM step WHERE pipeline = ? AND json IS NOT NULL ORDER BY step DESC LIMIT 1", name
    )
    return dict(json.loads(found[0][0])["metrics"]) if found else {}

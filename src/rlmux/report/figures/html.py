"""`timeline.html`: one file, no outside resources, readable without scripts.

headline numbers
timeline                the drawing of device_chart.py
where the time went     per device, by cause
pipelines               numbers and endings
"""

# ruff: noqa: RUF001  typographic signs are meant: this text is read in a browser

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from rlmux.core.model import PipelineId
from rlmux.report.figures.device_chart import Chart
from rlmux.report.figures.device_rows import CLASS_BY_CAUSE
from rlmux.report.figures.svg import PALETTE, percent_text, seconds_text, tag
from rlmux.report.slos import move_words, slo_words
from rlmux.report.summary import StepTimes, step_times, summarize
from rlmux.report.timeline.build import DeviceTimeline, Timeline
from rlmux.report.timeline.intervals import Cause, Charge, Kind
from rlmux.report.timeline.records import STOPPED

_MAX_DEVICES_IN_TABLE = 24
_LEGEND = (
    ("wait", "waiting for a pipeline (its colour below)"),
    ("sync", "weight sync, migration"),
    ("tool", "tool wait"),
    ("switch", "switch"),
    ("starting", "worker starting"),
    ("held", "held back by the policy"),
    ("lost", "lost work, worker stood still"),
    ("ctrl", "control"),
    ("idle", "nothing admitted"),
)


def page(timeline: Timeline, title: str = "run", steps: StepTimes | None = None) -> str:
    """The contents of `timeline.html`. `steps`: `step_times` of the timeline, if already computed."""
    view = _View(timeline, step_times(timeline) if steps is None else steps)
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        tag("title", escape(f"{title} · rlmux")),
        f"<style>{_resource('page.css')}{view.colours()}</style>",
    ]
    body = [
        view.heading(title),
        *view.banners(),
        view.tiles(),
        view.chart(),
        view.where_the_time_went(),
        view.pipelines(),
        "<footer>Definitions: busy, a stage computes; switch, state leaves and loads; bubble, a pipeline "
        "holds the device while nothing runs; idle, no pipeline holds it. They add up to the makespan. Made from "
        "the log alone; <code>trace.json</code> beside this page opens in Perfetto.</footer>",
        '<div id="tip"></div>',
        f"<script>{_resource('page.js')}</script>",
    ]
    document = tag("html", tag("head", *head), tag("body", "\n", "\n".join(body), "\n"), lang="en")
    return f"<!doctype html>\n{document}\n"


def _resource(name: str) -> str:
    return files("rlmux.report.figures").joinpath(name).read_text(encoding="utf-8")


class _View:
    def __init__(self, timeline: Timeline, steps: StepTimes) -> None:
        self.timeline = timeline
        self.steps = steps
        self.summary = summarize(timeline, steps)
        self.colour = {name: index % len(PALETTE) for index, name in enumerate(timeline.pipelines)}

    def colours(self) -> str:
        used = sorted(set(self.colour.values()))
        light = "".join(f"--p{i}:{PALETTE[i][0]};" for i in used)
        dark = "".join(f"--p{i}:{PALETTE[i][1]};" for i in used)
        rules = "".join(
            f".p{i}{{fill:var(--p{i})}}.c{i}{{stroke:var(--p{i})}}.k{i}{{background:var(--p{i})}}" for i in used
        )
        return (
            f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{rules}"
            ".stack .tail{opacity:.4}.stack .open{opacity:.6}"
        )

    # ------------------------------------------------------------------ words and numbers

    def heading(self, title: str) -> str:
        header = self.timeline.header
        facts = [
            f"policy <b>{escape(str(header.get('policy', '?')))}</b>",
            f"backend {escape(str(header.get('backend', '?')))}",
            f"{len(self.timeline.pipelines)} pipelines on {len(self.timeline.devices)} devices",
            escape(str(header.get("created", ""))),
            f"rlmux {escape(str(header.get('rlmux_version', '')))}",
        ]
        return f'<h1>{escape(title)}</h1><p class="meta">{" · ".join(fact for fact in facts if fact)}</p>'

    def banners(self) -> list[str]:
        banners = [
            tag("p", f"<b>{escape(name)}</b> {record.status}: {escape(record.reason)}", class_="banner")
            for name, record in self.timeline.pipelines.items()
            if record.reason and record.status in ("failed", "refused")
        ]
        if not self.timeline.is_over:
            statuses = {str(record.status) for record in self.timeline.pipelines.values()}
            what = (
                "The run was stopped before its end; <code>rlmux resume</code> continues it."
                if STOPPED in statuses
                else "The log has no end: the run is on, or was cut off."
            )
            known = seconds_text(self.timeline.makespan_s)
            banners.append(tag("p", f"{what} Drawn to the last known time, {known}.", class_="banner open"))
        return banners

    def tiles(self) -> str:
        summary = self.summary
        devices = "".join(
            f"<span>{percent_text(busy)} <small>{escape(name)}</small></span>" for name, busy in self._utilizations()
        )
        tiles = [("makespan", seconds_text(summary["makespan_s"]))]
        if summary["tokens_per_s"]:
            tiles.append(("sampled tokens per second", f"{summary['tokens_per_s']:,.0f}"))
        tiles.append(("utilization", devices))
        slowdowns = [
            f"<span>{slowdown} <small>{escape(name)}</small></span>"
            for name, pipeline in list(summary["pipelines"].items())[:6]
            if (slowdown := _slowdown(pipeline)) and not _is_filler(pipeline)
        ]
        if slowdowns:
            tiles.append(("step slowdown against alone", "".join(slowdowns)))
        if summary["control_overhead"] is not None:
            tiles.append(("control overhead", percent_text(summary["control_overhead"])))
        tiles.append(("switches", f"{summary['num_switches']:,}"))
        if summary["num_migrations"]:
            tails = summary["mechanisms"]["tails"]["migrations"]
            shards = f"{summary['num_migrations'] - tails:,} <small>shards</small>"
            tiles.append(("migrations", f"<span>{tails:,} <small>tails</small></span><span>{shards}</span>"))
        return '<dl class="tiles">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in tiles) + "</dl>"

    def _utilizations(self) -> list[tuple[str, float]]:
        """Per device; per pool where there are many."""
        return [
            (
                title,
                sum(charge.seconds for charge in charges if charge.kind is Kind.BUSY) / total_s if total_s else 0.0,
            )
            for title, _, charges, total_s in self._rows_of_time(max_devices=4)
        ]

    def where_the_time_went(self) -> str:
        rows = "".join(self._time_row(*row) for row in self._rows_of_time(_MAX_DEVICES_IN_TABLE))
        head = "".join(
            tag("th", text, class_="l" if text == "" else None)
            for text in ("device", "", "busy", "switch", "bubble", "idle")
        )
        return f"<h2>Where the time went</h2><table><tr>{head}</tr>{rows}</table>"

    def _rows_of_time(self, max_devices: int) -> list[tuple[str, str, list[Charge], float]]:
        """(name, description, charges, total seconds) of each device, or of each pool."""
        makespan_s = self.timeline.makespan_s
        devices = list(self.timeline.devices.values())
        if len(devices) <= max_devices:
            return [(str(device.id), device.pool, list(device.charges), makespan_s) for device in devices]
        by_pool: dict[str, list[DeviceTimeline]] = {}
        for device in devices:
            by_pool.setdefault(device.pool, []).append(device)
        return [
            (pool, f"{len(members)} devices", _add_charges(members), makespan_s * len(members))
            for pool, members in by_pool.items()
        ]

    def _time_row(self, name: str, what: str, charges: list[Charge], total_s: float) -> str:
        if total_s <= 0.0:
            return ""
        parts = "".join(self._part(charge, total_s) for charge in charges)
        why = " · ".join(
            f"{escape(self._charge_name(charge))} <b>{percent_text(charge.seconds / total_s)}</b>"
            for charge in charges
            if charge.seconds / total_s >= 0.0005
        )
        cells = "".join(
            tag("td", percent_text(sum(charge.seconds for charge in charges if charge.kind is kind) / total_s))
            for kind in Kind
        )
        title = f"<b>{escape(name)}</b>" + (f'<br><span class="why">{escape(what)}</span>' if what not in name else "")
        bar = f'<div class="stack">{parts}</div><div class="why">{why}</div>'
        return f'<tr><td>{title}</td><td class="wide">{bar}</td>{cells}</tr>'

    def _part(self, charge: Charge, total_s: float) -> str:
        part = charge.seconds / total_s
        title = f"{self._charge_name(charge)}\n{seconds_text(charge.seconds)} · {percent_text(part)}"
        return tag("i", class_=self._stack_class(charge), style=f"width:{part * 100:.3f}%", data_tip=title)

    def _stack_class(self, charge: Charge) -> str:
        if charge.kind is not Kind.BUSY:
            return f"b-{CLASS_BY_CAUSE[charge.cause]}"
        return f"k{self.colour_of(charge.pipeline)}" + (" tail" if charge.cause is Cause.TAIL else "")

    def _charge_name(self, charge: Charge) -> str:
        if charge.kind is Kind.BUSY:
            return f"{charge.pipeline}" if charge.cause is Cause.COMPUTE else f"{charge.cause} of {charge.pipeline}"
        in_order = charge.cause in (Cause.TOOL_WAIT, Cause.SWITCH, Cause.STARTING, Cause.LOST, Cause.STANDSTILL)
        return f"{charge.cause} of {charge.pipeline}" if in_order else charge.label

    def colour_of(self, pipeline: PipelineId | None) -> int:
        return self.colour.get(pipeline or PipelineId(""), 0)

    def pipelines(self) -> str:
        head = "".join(
            tag("th", text, class_="l" if text in ("status", "weights") else None)
            for text in (
                "pipeline", "status", "steps", "tokens", "trajectories", "reward, first → last", "mean step",
                "slowdown", "accepted", "weights",
            )
        )  # fmt: skip
        pipelines = self.summary["pipelines"]
        rows = "".join(self._pipeline_row(name, p) for name, p in pipelines.items())
        stated = "".join(
            tag("p", f"{escape(name)}: {escape(words)}")
            for name, p in pipelines.items()
            for words in (slo_words(p), move_words(len(p["moves"])), (p["delivery"] or {}).get("says"))
            if words
        )
        return f'<h2>Pipelines</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>{stated}'

    def _pipeline_row(self, name: str, pipeline: Mapping[str, Any]) -> str:
        record = self.timeline.pipelines[PipelineId(name)]
        of_all = f" of {record.pipeline.num_steps}" if record.pipeline.num_steps is not None else ""
        slo = pipeline["slo_slowdown"]
        slowdown = _slowdown(pipeline) or "–"
        if slo is not None and pipeline["step_slowdown"] is not None:
            slowdown = tag("span", slowdown, class_="over" if pipeline["step_slowdown"] > slo else "good")
        sha256 = pipeline["weights_sha256"]
        cells = [
            f'<td><span class="dot k{self.colour[PipelineId(name)]}"></span><b>{escape(name)}</b></td>',
            tag("td", escape(pipeline["status"]), class_="l failed" if pipeline["status"] == "failed" else "l"),
            tag("td", f"{pipeline['steps']:,}{of_all}"),
            tag("td", f"{pipeline['tokens']:,}"),
            tag("td", f"{pipeline['trajectories']:,}"),
            tag("td", _reward(pipeline)),
            tag("td", "–" if pipeline["step_s_mean"] is None else seconds_text(pipeline["step_s_mean"])),
            tag("td", slowdown),
            tag("td", "–" if slo is None else f"≤ {slo:.2f}×"),
            tag("td", escape(sha256[:12]) if sha256 else "–", class_="l hash", title=sha256),
        ]
        return f"<tr>{''.join(cells)}</tr>"

    # ------------------------------------------------------------------ the chart

    def chart(self) -> str:
        if self.timeline.makespan_s <= 0.0 or not self.timeline.devices:
            return "<h2>Timeline</h2><p>Nothing has run yet.</p>"
        tools = (
            '<span class="tools">drag to pan, ctrl + wheel to zoom '
            '<button id="zoom-out" aria-label="zoom out">−</button>'
            '<button id="zoom-in" aria-label="zoom in">+</button><button id="zoom-all">all</button></span>'
        )
        slowdown = {PipelineId(name): _slowdown(p) for name, p in self.summary["pipelines"].items()}
        chart = Chart(self.timeline, self.steps, self.colour, slowdown)
        drawing = chart.draw()
        heading = f"<h2>{tools}Timeline <small>{chart.note}</small></h2>"
        return f'{heading}{self._legend()}<div class="scroll">{drawing}</div>'

    def _legend(self) -> str:
        present = {
            CLASS_BY_CAUSE.get(charge.cause) for device in self.timeline.devices.values() for charge in device.charges
        }
        items = [
            f'<span><i class="k{self.colour[name]}"></i><b>{escape(name)}</b></span>'
            for name in self.timeline.pipelines
        ][:16]
        items += [f'<span><i class="b-{css}"></i>{text}</span>' for css, text in _LEGEND if css in present]
        return f'<div class="key">{"".join(items)}</div>'


def _is_filler(pipeline: Mapping[str, Any]) -> bool:
    return "score" in pipeline


def _reward(pipeline: Mapping[str, Any]) -> str:
    """Reward of the first and the last step, or, where there is a score, the mean of all."""
    first, last = pipeline["reward_first"], pipeline["reward_last"]
    if first is None:
        return "–"
    return f"mean <b>{pipeline['score']:.3f}</b>" if _is_filler(pipeline) else f"{first:.3f} → <b>{last:.3f}</b>"


def _slowdown(pipeline: Mapping[str, Any]) -> str:
    if _is_filler(pipeline):
        return "filler"
    return "" if pipeline["step_slowdown"] is None else f"{pipeline['step_slowdown']:.2f}×"


def _add_charges(devices: Iterable[DeviceTimeline]) -> list[Charge]:
    sums: dict[tuple[Kind, Cause, PipelineId | None], Charge] = {}
    for device in devices:
        for charge in device.charges:
            name = (charge.kind, charge.cause, charge.pipeline)
            before = sums.get(name)
            sums[name] = charge if before is None else replace(before, seconds=before.seconds + charge.seconds)
    kinds = list(Kind)
    return sorted(sums.values(), key=lambda charge: (kinds.index(charge.kind), -charge.seconds))

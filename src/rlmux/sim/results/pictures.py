"""Pictures of simulations: SVG files for a paper, and one page that holds them all.

cost.svg         $/h over time, a line for each policy
gpus.svg         GPUs over time, likewise
dollars.svg      what each policy's dollars were paid for, from the bound up to its cost
slowdowns.svg    percentage of pipelines whose mean step slowdown is at most x
POLICY.gantt.svg what computes on which device in the first hours, for runs that kept their spans
index.html       all of them and the table of figures; needs no network
waterfall.svg    what a plan's dollars per hour are paid for, from the bound up to the total
NAME.png         each picture again as pixels, light, where the extra `png` is installed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmux.core.errors import UserError
from rlmux.core.model import Stage
from rlmux.report.figures.charts import Bar, GanttRow, Line, distribution, gantt_chart, line_chart, waterfall_chart
from rlmux.report.figures.svg import tag
from rlmux.sim.results.plan_costs import PAID_FOR
from rlmux.sim.results.result import PlacementSample, SimResult, Span

_TABLE = (
    ("$/h", "cost_usd_per_hour", "{:,.0f}"),
    ("$/h with the paper's penalty", "penalised_cost_usd_per_hour", "{:,.0f}"),
    ("within SLO", "slo_attainment", "{:.1%}"),
    ("mean step slowdown", "mean_step_slowdown", "{:.3f}"),
    ("worst", "max_step_slowdown", "{:.2f}"),
    ("rollout pool busy", "utilization.rollout", "{:.0%}"),
    ("training pool busy", "utilization.train", "{:.0%}"),
    ("peak rollout GPUs", "peak_gpus.rollout", "{:,.0f}"),
    ("peak training GPUs", "peak_gpus.train", "{:,.0f}"),
)


PARTS: Mapping[str, str] = {
    "bound": "work on nodes never idle",
    "switches": "switches",
    "rollout_idle": "idle rollout nodes",
    "train_idle": "idle training nodes",
    "other": "work on dearer nodes",
}
"""What `SimResult.parts_usd` is paid for, in words."""

_CUT = 4.0


def write_pictures(results: Mapping[str, Sequence[SimResult]], folder: Path, *, title: str) -> tuple[Path, ...]:
    """Write the pictures of the first seed of each policy, and the table over all; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    first = {name: runs[0] for name, runs in results.items()}
    pictures = {
        "cost.svg": cost_chart(first, title=title),
        "gpus.svg": gpu_chart(first, title=title),
        "dollars.svg": dollar_chart(first, title=title),
        "slowdowns.svg": slowdown_chart(first, title=title),
    }
    for name, result in first.items():
        if result.spans:
            pictures[f"{name}.gantt.svg"] = gantt(result.spans, title=f"{title}, {name}: who computes where")
    for name, text in pictures.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "index.html").write_text(page(title, pictures, results), "utf-8")
    pixels = [_beside(folder / name, text) for name, text in pictures.items()] if can_draw_pixels() else []
    return (*(folder / name for name in (*pictures, "index.html")), *pixels)


def write_waterfall(paid_for: Mapping[str, float], folder: Path, *, title: str) -> tuple[Path, ...]:
    """Write the picture of a plan's dollars per hour, and its pixels; no file where nothing is paid."""
    if not any(paid_for.values()):
        return ()
    folder.mkdir(parents=True, exist_ok=True)
    path, svg = folder / "waterfall.svg", plan_waterfall(paid_for, title=title)
    path.write_text(svg, "utf-8")
    return (path, _beside(path, svg)) if can_draw_pixels() else (path,)


def can_draw_pixels() -> bool:
    """Whether the extra `png` is installed."""
    return find_spec("resvg_py") is not None


def png(svg: str, *, width: int = 1600) -> bytes:
    """The picture as a PNG of that many pixels across, on white.

    Raises UserError without the extra `png`.
    """
    if not can_draw_pixels():
        raise UserError("a PNG needs resvg: pip install 'rlmux[png]' (the SVG needs nothing)")
    drawn = import_module("resvg_py").svg_to_bytes(svg_string=svg, width=width, background="#ffffff")
    return bytes(drawn)


def _beside(path: Path, svg: str) -> Path:
    target = path.with_suffix(".png")
    target.write_bytes(png(svg))
    return target


def cost_chart(results: Mapping[str, SimResult], *, title: str) -> str:
    return line_chart(
        [
            Line(name=name, points=_over_time(run, lambda sample: sample.usd_per_hour), is_step=True)
            for name, run in results.items()
        ],
        title=f"{title}: cost over time",
        x_label="hours since the first submission",
        y_label="$ per hour",
    )


def dollar_chart(results: Mapping[str, SimResult], *, title: str) -> str:
    """A waterfall for each policy: each part of its dollars begins where the one before it ends."""
    rows = []
    for name, run in results.items():
        bars, paid_usd = [], 0.0
        for part, usd in run.parts_usd.items():
            label = f"{name}, {PARTS[part]}: ${usd:,.0f}"
            bars.append(Bar(begin=paid_usd, end=max(paid_usd, paid_usd + usd), name=PARTS[part], label=label))
            paid_usd += usd
        rows.append(GanttRow(name=name, bars=bars))
    return gantt_chart(rows, title=f"{title}: what is paid for", x_label="dollars")


def plan_waterfall(paid_for: Mapping[str, float], *, title: str) -> str:
    """Dollars per hour by what they are paid for; parts of nothing are left out."""
    parts = {PAID_FOR[part]: usd for part, usd in paid_for.items() if usd}
    return waterfall_chart(parts, title=f"{title}: what is paid for", x_label="dollars per hour", total="all")


def gpu_chart(results: Mapping[str, SimResult], *, title: str) -> str:
    return line_chart(
        [
            Line(
                name=name,
                points=_over_time(run, lambda sample: sum(sample.gpus_by_pool.values())),
                is_step=True,
            )
            for name, run in results.items()
        ],
        title=f"{title}: GPUs over time",
        x_label="hours since the first submission",
        y_label="GPUs held",
    )


def slowdown_chart(results: Mapping[str, SimResult], *, title: str) -> str:
    """Distributions, cut: a baseline without SLOs has a tail that would flatten the rest."""
    lines = []
    is_cut = False
    for name, run in results.items():
        slowdowns = [p.step_slowdown for p in run.pipelines if p.step_slowdown is not None]
        points = [(min(x, _CUT), y) for x, y in distribution(slowdowns)]
        is_cut = is_cut or max(slowdowns, default=0.0) > _CUT
        lines.append(Line(name=name, points=points, is_step=True))
    return line_chart(
        lines,
        title=f"{title}: step slowdown of the pipelines",
        x_label="mean step slowdown" + (f" ({_CUT:g} stands for more, too)" if is_cut else ""),
        y_label="% of pipelines at most this slow",
    )


def gantt(spans: Sequence[Span], *, title: str, hours: float | None = None) -> str:
    """The pipelines that computed on each device over time; training is drawn full, rollout pale."""
    rows: dict[str, list[Bar]] = {}
    ordered = sorted(spans, key=lambda span: (span.devices[0], span.begin_s))
    for span in ordered:
        if hours is not None and span.begin_s > hours * 3600:
            continue
        label = f"{span.pipeline}: {span.stage} of step {span.step}, {span.end_s - span.begin_s:.0f} s"
        for device in span.devices:
            rows.setdefault(f"{device.pool} {device.node}.{device.index}", []).append(
                Bar(
                    begin=span.begin_s / 60,
                    end=span.end_s / 60,
                    name=str(span.pipeline),
                    label=label,
                    is_pale=span.stage is Stage.GENERATE,
                )
            )
    return gantt_chart(
        [GanttRow(name=name, bars=bars) for name, bars in rows.items()],
        title=f"{title} (rollout pale, training full)",
        x_label="minutes since the first submission",
    )


def spans_of_group(spans: Sequence[Span], pipeline: str) -> list[Span]:
    """Those of the pipeline and of all that shared devices with it, directly or through others.

    Raises UserError if it computed nothing while spans were kept.
    """
    devices = {device for span in spans if span.pipeline == pipeline for device in span.devices}
    if not devices:
        known = ", ".join(dict.fromkeys(str(span.pipeline) for span in spans[:200])) or "none: spans_until_s was 0"
        raise UserError(f"no spans of pipeline {pipeline!r}; accepted: {known}")
    while True:
        members = {span.pipeline for span in spans if not devices.isdisjoint(span.devices)}
        shared = {device for span in spans if span.pipeline in members for device in span.devices}
        if shared == devices:
            return [span for span in spans if span.pipeline in members]
        devices = shared


def page(title: str, pictures: Mapping[str, str], results: Mapping[str, Sequence[SimResult]]) -> str:
    """One file that needs nothing else."""
    runs = next(iter(results.values()))
    about = f"curves are the first seed's, the table holds means over seeds: {len(runs)}"
    figures = "".join(tag("figure", text) for text in pictures.values())
    return (
        "<!doctype html>"
        + tag(
            "html",
            tag(
                "head",
                '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
                tag("title", escape(f"rlmux simulate: {title}")),
                tag("style", _STYLE),
            ),
            tag(
                "body",
                tag("h1", escape(title)),
                tag("p", escape(about)),
                tag("div", _table(results), class_="scroll"),
                tag("div", figures, class_="figures"),
            ),
            lang="en",
        )
        + "\n"
    )


def _table(results: Mapping[str, Sequence[SimResult]]) -> str:
    head = tag("tr", tag("th", "policy"), *(tag("th", escape(name)) for name, _, _ in _TABLE))
    rows = []
    for policy, runs in results.items():
        cells = [tag("td", escape(policy))]
        for _, key, form in _TABLE:
            values = [_figure(run, key) for run in runs]
            cells.append(tag("td", form.format(sum(values) / len(values))))
        rows.append(tag("tr", *cells))
    return tag("table", head, *rows)


def _figure(run: SimResult, key: str) -> float:
    value: Any = run.figures()
    for part in key.split("."):
        value = value[part]
    return float(value)


def _over_time(run: SimResult, what: Callable[[PlacementSample], float]) -> list[tuple[float, float]]:
    samples = run.samples
    start_s = samples[0].time_s if samples else 0.0
    return [((sample.time_s - start_s) / 3600, float(what(sample))) for sample in samples]


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{margin:0 auto;max-width:1580px;padding:24px;background:#fff;color:#1d2125;"
    'font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",Arial,sans-serif}'
    "h1{font-size:20px;margin:0}p{margin:4px 0 16px;color:#5c646d}"
    "table{border-collapse:collapse;margin-bottom:20px;font-variant-numeric:tabular-nums}"
    "th,td{padding:5px 14px 5px 0;text-align:right;border-bottom:1px solid #e1e4e8;white-space:nowrap}"
    "th{font-weight:400;font-size:12px;color:#5c646d}th:first-child,td:first-child{text-align:left}"
    ".scroll{overflow-x:auto}figure{margin:0}figure svg{display:block;width:100%;height:auto}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,640px),1fr));gap:20px}"
    "@media(prefers-color-scheme:dark){body{background:#14171a;color:#e6e8eb}p,th{color:#a0a8b1}"
    "th,td{border-color:#2c3238}}"
)

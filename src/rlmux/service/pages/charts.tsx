// Curves with uPlot: one chart a metric, all with one cursor. Raw values always show; smoothing lies over them.
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { type Marks, bothTimes, tickInDay, ticksOf } from "./clock";
import { onTheme, themeColours } from "./colours";
import { useShown } from "./lane";
import { areFlat } from "./noise";
import { Term } from "./parts";
import { figure, metricName } from "./words";

type Values = (number | null)[];

export interface Curve {
  x: Values;
  y: Values;
  min?: Values;
  max?: Values;
}

interface Props {
  title: string;
  curve: Curve;
  colour: number;
  /** What x counts: `step`, `seconds`. */
  unit: string;
  /** Steps over which the thick line is averaged; 0 draws none. */
  smoothing: number;
  /** Charts with the same name share a cursor. */
  cursor: string;
}

const HEIGHT = 150;
/** Steps from one mark of an axis to the next: there is no half a step. */
const WHOLE = [1, 10, 100, 1000, 10_000, 100_000].flatMap((ten) => [ten, 2 * ten, 5 * ten]);

/** A box with a plot in it, as wide as the page leaves it and in the colours of the theme; made anew when `needs` change. */
function usePlot(make: (host: HTMLElement) => uPlot, needs: readonly unknown[]) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const host = box.current;
    if (!host) return;
    let plot = make(host);
    const redraw = () => {
      plot.destroy();
      plot = make(host);
    };
    const size = new ResizeObserver(() => plot.setSize({ width: host.clientWidth, height: HEIGHT }));
    size.observe(host);
    const stop = onTheme(redraw);
    return () => {
      size.disconnect();
      stop();
      plot.destroy();
    };
  }, needs);
  return box;
}

export function Chart(props: Props) {
  const marks = useShown().lane.clock;
  const reading = useRef<HTMLSpanElement>(null);
  const box = usePlot((host) => draw(host, { ...props, marks }, reading.current), [props.curve, JSON.stringify(marks), props.smoothing, props.colour, props.unit]);
  return (
    <section class="chart">
      <h3>
        <b title={props.title}>{/stale/.test(props.title) ? <Term word="staleness">{metricName(props.title)}</Term> : metricName(props.title)}</b> <span ref={reading}>{figure(props.curve.y.findLast((value) => value !== null))}</span>
      </h3>
      {areFlat([props.curve]) && <Flat />}
      <div ref={box} />
    </section>
  );
}

/** Below the title of a curve that says nothing. */
function Flat() {
  return (
    <p class="flat" title="The means of its quarters differ by no more than the changes from step to step explain.">
      flat within noise
    </p>
  );
}

/** An axis of run seconds in one unit, with the time of day below each mark. */
function timeAxis(axis: uPlot.Axis, marks: Marks): uPlot.Axis {
  const ticksIn = (plot: uPlot, low: number, high: number) => ticksOf(high - low || 1, plot.width / 110);
  return {
    ...axis,
    size: marks.length ? 38 : 24,
    splits: (plot, _, low, high) => {
      const { step_s } = ticksIn(plot, low, high);
      const first = Math.ceil(low / step_s);
      return Array.from({ length: Math.floor(high / step_s) - first + 1 }, (_, index) => (first + index) * step_s);
    },
    values: (plot, ticks) => {
      const { label, step_s } = ticksIn(plot, plot.scales.x?.min ?? 0, plot.scales.x?.max ?? 1);
      let day = "";
      return ticks.map((at_s) => {
        const words = tickInDay(marks, at_s, step_s, day);
        day = words.day;
        return words.text ? `${label(at_s)}\n${words.text}` : label(at_s);
      });
    },
  };
}

function draw(host: HTMLElement, { curve, colour, unit, smoothing, cursor, marks }: Props & { marks: Marks }, reading: HTMLElement | null): uPlot {
  const theme = themeColours();
  const stroke = theme.pipelines[colour] ?? theme.ink;
  const axis = { stroke: theme.muted, grid: { stroke: theme.line, width: 1 }, ticks: { show: false }, font: "11px system-ui,sans-serif" };
  const hasBand = curve.min !== undefined && curve.max !== undefined;
  const smooth = smoothing > 0 ? averaged(curve.y, smoothing) : null;
  const series: uPlot.Series[] = [
    {},
    { stroke, width: smooth ? 1 : 1.6, alpha: smooth ? 0.45 : 1, points: { show: curve.y.length < 2 } },
    ...(smooth ? [{ stroke, width: 2, points: { show: false } }] : []),
    ...(hasBand ? [{ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } }] : []),
  ];
  const first = smooth ? 3 : 2;
  const data = [curve.x, curve.y, ...(smooth ? [smooth] : []), ...(hasBand ? [curve.max, curve.min] : [])] as uPlot.AlignedData;
  return new uPlot(
    {
      width: host.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: cursor }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: rangeOf } },
      series,
      ...(hasBand && { bands: [{ series: [first, first + 1] as [number, number], fill: `color-mix(in srgb, ${stroke} 22%, transparent)` }] }),
      axes: [unit === "step" ? { ...axis, size: 24, incrs: WHOLE, values: (_, ticks) => ticks.map(String) } : timeAxis(axis, marks), { ...axis, size: 54, values: (_, ticks) => ticks.map(figure) }],
      hooks: {
        setCursor: [
          (plot) => {
            if (!reading) return;
            const at = plot.cursor.idx;
            const value = at == null ? curve.y.findLast((each) => each !== null) : curve.y[at];
            const x = at == null ? null : curve.x[at];
            reading.textContent = (x == null ? "" : `${unit === "step" ? `step ${x}` : bothTimes(marks, x)}: `) + figure(value);
          },
        ],
      },
    },
    data,
    host,
  );
}

/** What a curve is at every step; null for one that changes, or has fewer than two steps. */
export function constantOf({ y, min, max }: Curve): number | null {
  const values = [...y, ...(min ?? []), ...(max ?? [])].filter((value): value is number => value !== null);
  const first = values[0];
  return first !== undefined && y.length > 1 && values.every((value) => value === first) ? first : null;
}

/** The fold below the first curves. */
export function More({ count, children }: { count: number; children: ComponentChildren }) {
  if (count === 0) return null;
  return (
    <details class="more">
      <summary>{count} more curves</summary>
      {children}
    </details>
  );
}

/** Metrics without a curve: they are the same at every step. */
export function Constants({ values }: { values: readonly (readonly [string, number | null])[] }) {
  const constant = values.filter((one): one is [string, number] => one[1] !== null);
  if (constant.length === 0) return null;
  return (
    <section aria-label="the same at every step">
      <h2>The same at every step</h2>
      <div class="why constants">
        {constant.map(([name, value], index) => (
          <>
            {index > 0 && " · "}
            <span title={name}>{metricName(name)}</span> <b>{figure(value)}</b>
          </>
        ))}
      </div>
    </section>
  );
}

/** A curve among others on one axis; with `min` and `max`, a band around it. */
export interface Run {
  name: string;
  colour: number;
  dash: number[];
  curve: Curve;
}

/** Curves on one axis, told apart by their dashes as much as by their colours. */
export function Overlay({ title, runs }: { title: string; runs: readonly Run[] }) {
  const box = usePlot((host) => lay(host, runs), [JSON.stringify(runs)]);
  const last = ({ curve }: Run) => figure(curve.y.findLast((value) => value !== null));
  return (
    <section class="chart" aria-label={`${title}: ${runs.map((run) => run.name).join(", ")}`}>
      <h3>
        <b title={title}>{metricName(title)}</b> <span>{runs.length <= 4 ? runs.map(last).join(" · ") : ""}</span>
      </h3>
      {areFlat(runs.map(({ curve }) => curve)) && <Flat />}
      <div ref={box} />
    </section>
  );
}

/** What the lines of `Overlay` are. */
export function RunKey({ runs }: { runs: readonly Omit<Run, "curve">[] }) {
  return (
    <div class="key">
      {runs.map((run) => (
        <span key={run.name}>
          <svg width="26" height="8" aria-hidden="true">
            <line x1="0" y1="4" x2="26" y2="4" stroke={`var(--p${run.colour})`} stroke-width="2" stroke-dasharray={run.dash.join(" ")} />
          </svg>{" "}
          {run.name}
        </span>
      ))}
    </div>
  );
}

function lay(host: HTMLElement, runs: readonly Run[]): uPlot {
  const theme = themeColours();
  const axis = { stroke: theme.muted, grid: { stroke: theme.line, width: 1 }, ticks: { show: false }, font: "11px system-ui,sans-serif" };
  const tables: uPlot.AlignedData[] = [];
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  for (const { colour, dash, curve } of runs) {
    const stroke = theme.pipelines[colour] ?? theme.ink;
    series.push({ stroke, width: 1.6, dash, spanGaps: true, points: { show: curve.y.length < 2 } });
    if (curve.min && curve.max) {
      bands.push({ series: [series.length, series.length + 1], fill: `color-mix(in srgb, ${stroke} 18%, transparent)` });
      series.push(...[0, 1].map(() => ({ stroke: "transparent", spanGaps: true, points: { show: false } })));
    }
    tables.push([curve.x, curve.y, ...(curve.min && curve.max ? [curve.max, curve.min] : [])] as uPlot.AlignedData);
  }
  return new uPlot(
    {
      width: host.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "compare" }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: rangeOf } },
      series,
      bands,
      axes: [{ ...axis, size: 24, incrs: WHOLE, values: (_, ticks) => ticks.map(String) }, { ...axis, size: 54, values: (_, ticks) => ticks.map(figure) }],
    },
    uPlot.join(tables),
    host,
  );
}

export interface Line {
  name: string;
  values: Values;
  dash: number[];
  /** Of the first line, which is also filled. */
  isMain?: boolean;
}

/** Lines over time, told apart by their dashes as much as by their colours; the words beside say what each is. */
export function Lines({ label, x, lines, value }: { label: string; x: Values; lines: readonly Line[]; value: (value: number | null | undefined) => string }) {
  const reading = useRef<HTMLSpanElement>(null);
  const marks = useShown().lane.clock;
  const say = (at: number | null | undefined) => lines.map((line) => `${line.name} ${value(line.values[at ?? line.values.length - 1])}`).join(" · ");
  const box = usePlot(
    (host) => {
      const theme = themeColours();
      const axis = { stroke: theme.muted, grid: { stroke: theme.line, width: 1 }, ticks: { show: false }, font: "11px system-ui,sans-serif" };
      const strokeOf = (line: Line) => (line.isMain ? (theme.pipelines[0] ?? theme.ink) : theme.ink);
      return new uPlot(
        {
          width: host.clientWidth,
          height: HEIGHT,
          legend: { show: false },
          cursor: { y: false, points: { size: 6 } },
          scales: { x: { time: false }, y: { range: (_, __, high) => [0, (high || 1) * 1.08] } },
          series: [
            {},
            ...lines.map((line) => ({
              stroke: strokeOf(line),
              width: line.isMain ? 2 : 1.4,
              dash: line.dash,
              points: { show: line.values.length < 2 },
              ...(line.isMain && { fill: `color-mix(in srgb, ${strokeOf(line)} 14%, transparent)` }),
            })),
          ],
          axes: [timeAxis(axis, marks), { ...axis, size: 54, values: (_, ticks) => ticks.map((tick) => value(tick)) }],
          hooks: {
            setCursor: [
              (plot) => {
                const at = plot.cursor.idx;
                if (reading.current) reading.current.textContent = (at == null ? "at the end: " : `${bothTimes(marks, x[at] ?? 0)}: `) + say(at);
              },
            ],
          },
        },
        [x, ...lines.map((line) => line.values)] as uPlot.AlignedData,
        host,
      );
    },
    [x, JSON.stringify(marks), ...lines.map((line) => line.values)],
  );
  return (
    <section class="chart lines" aria-label={label}>
      <h3>
        <span class="legend">
          {lines.map((line) => (
            <span>
              <svg width="26" height="8" aria-hidden="true">
                <line x1="0" y1="4" x2="26" y2="4" stroke={line.isMain ? "var(--p0)" : "var(--ink)"} stroke-width={line.isMain ? 2.5 : 1.5} stroke-dasharray={line.dash.join(" ")} />
              </svg>{" "}
              {line.name}
            </span>
          ))}
        </span>
        <span ref={reading}>at the end: {say(null)}</span>
      </h3>
      <div ref={box} />
    </section>
  );
}

/** A little room above and below; around a constant, a range that shows it as one. */
function rangeOf(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** The exponential mean over about so many steps; steps without a number leave it as it is. */
function averaged(values: Values, span: number): Values {
  const weight = 2 / (span + 1);
  let mean: number | null = null;
  return values.map((value) => {
    if (value !== null) mean = mean === null ? value : mean + weight * (value - mean);
    return value === null ? null : mean;
  });
}

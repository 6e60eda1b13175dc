// Where things lie on the board, and what the filter shows.
//
//   overview │ axis │ a row for each device │ a row for each pipeline │ rewards
import type { Timeline } from "../shapes";
import type { Span } from "./feed";

export const GUTTER = 138;
export const OVERVIEW = { y: 6, height: 40 };
export const AXIS = { y: 50, height: 20 };
const MAX_PIPELINE_ROWS = 16;
const CURVES_HEIGHT = 84;

export interface Row {
  kind: "device" | "pipeline";
  /** Place in the timeline's list of devices or of pipelines. */
  index: number;
  name: string;
  y: number;
  height: number;
}

export interface Layout {
  width: number;
  height: number;
  rows: Row[];
  rowsEnd: number;
  /** Where the rewards are drawn; null where there are too many pipelines. */
  curves: { y: number; height: number } | null;
  /** Whether a pipeline is shown in full; the others are faint. */
  isMatch: boolean[];
}

export interface Filter {
  devices: string[];
  pipelines: string[];
}

/** `device:rollout sort`: rows of devices whose name has `rollout`, work and waits of pipelines whose name has `sort`. */
export function filterOf(text: string): Filter {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const isDevice = (word: string) => /^(device|pool):/.test(word);
  return {
    devices: words.filter(isDevice).map((word) => word.replace(/^\w+:/, "")),
    pipelines: words.filter((word) => !isDevice(word)).map((word) => word.replace(/^pipeline:/, "")),
  };
}

export function layoutOf(timeline: Timeline, filter: Filter, width: number): Layout {
  const has = (name: string, parts: string[]) => parts.length === 0 || parts.some((part) => name.toLowerCase().includes(part));
  const devices = timeline.devices.flatMap(({ id }, index) => (has(id, filter.devices) ? [{ index, name: id }] : []));
  const isMatch = timeline.pipelines.map((name) => has(name, filter.pipelines));
  const pipelines = timeline.pipelines.flatMap((name, index) => (isMatch[index] ? [{ index, name }] : []));
  const height = heightOf(devices.length);
  const rows: Row[] = [];
  let y = AXIS.y + AXIS.height + 2;
  for (const device of devices) {
    rows.push({ kind: "device", ...device, y, height });
    y += height + (height >= 12 ? 4 : 1);
  }
  const isShown = pipelines.length <= MAX_PIPELINE_ROWS;
  if (isShown) {
    y += 12;
    for (const pipeline of pipelines) {
      rows.push({ kind: "pipeline", ...pipeline, y, height: 22 });
      y += 26;
    }
  }
  const curves = isShown && pipelines.length > 0 ? { y: y + 8, height: CURVES_HEIGHT } : null;
  return { width, rows, rowsEnd: y, curves, height: (curves ? curves.y + curves.height : y) + 8, isMatch };
}

function heightOf(numDevices: number): number {
  const steps: [number, number][] = [[4, 52], [8, 36], [16, 24], [32, 17], [64, 11], [128, 7], [256, 4]];
  return steps.find(([most]) => numDevices <= most)?.[1] ?? 3;
}

/** Seconds and pixels of the plot, which begins after the gutter. */
export class Scale {
  readonly perSecond: number;

  constructor(
    readonly span: Span,
    readonly left: number,
    readonly width: number,
  ) {
    this.perSecond = width / (span.t1 - span.t0);
  }

  x(at_s: number): number {
    return this.left + (at_s - this.span.t0) * this.perSecond;
  }

  at(x: number): number {
    return this.span.t0 + (x - this.left) / this.perSecond;
  }
}

/** Round seconds between marks, so that there are about `most` in a span. */
export function tickOf(span_s: number, most: number): number {
  const raw = span_s / Math.max(1, most);
  const whole = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  if (raw > 30) return whole.find((each) => each >= raw) ?? 86400 * Math.ceil(raw / 86400);
  const size = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= raw * 0.999) ?? 10 * size;
}

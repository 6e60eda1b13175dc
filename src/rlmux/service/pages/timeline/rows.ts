// Where things lie on the board, and what the filter shows.
//
//   overview │ axis │ a row for each device │ a row for each pipeline or project │ rewards
//
// Up to 16 pipelines each have a row. Of more, the 16 with most seconds in view do, and the others are counted.
import type { Timeline } from "./lives";
import type { Span } from "./feed";

export const GUTTER = 138;
export const OVERVIEW = { y: 6, height: 40 };
/** Two lines of words: seconds of the run, and time of day. */
export const AXIS = { y: 50, height: 34 };
const MAX_ROWS = 16;
const CURVES_HEIGHT = 132;
const MORE_HEIGHT = 16;
const HIDDEN_PROJECT = "another project";
const NO_PROJECT = "no project";

export interface Row {
  kind: "device" | "pipeline" | "project";
  /** Place in the timeline's list of devices or of pipelines; of a project, its first pipeline's. */
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
  /** The rows of pipelines or projects. */
  marked: Row[];
  /** The place in `marked` of the row that a pipeline's work is drawn in. */
  markOf: ReadonlyMap<number, number>;
  /** Pipelines or projects in view without a row. */
  more: number;
  /** The pipelines in view that are named. */
  named: Named;
  /** Where the rewards are drawn; null: no named pipeline has any. */
  curves: { y: number; height: number } | null;
  /** Whether a pipeline is shown in full; the others are faint. */
  isMatch: boolean[];
}

export interface Named {
  /** Places in the timeline's list. */
  pipelines: number[];
  more: number;
}

/** A span and how long devices worked in it, by pipeline. */
export interface View {
  span: Span;
  seconds: ReadonlyMap<number, number>;
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

/** `view`: null until it is known what is in view. */
export function layoutOf(timeline: Timeline, filter: Filter, width: number, isByProject: boolean, view: View | null): Layout {
  const has = (name: string, parts: string[]) => parts.length === 0 || parts.some((part) => name.toLowerCase().includes(part));
  const devices = timeline.devices.flatMap(({ id }, index) => (has(id, filter.devices) ? [{ index, name: id }] : []));
  const isMatch = timeline.pipelines.map((name) => has(name, filter.pipelines));
  const matched = [...timeline.pipelines.keys()].filter((place) => isMatch[place]);
  const secondsOf = (place: number) => secondsIn(timeline, view, place);
  const pipelines = mostOf(matched, secondsOf);
  const projects = mostOf(projectsOf(timeline, matched), ([, own]) => sumOf(own.map(secondsOf)));
  const shown = isByProject
    ? projects.kept.map(([name, own]) => ({ kind: "project" as const, name, own }))
    : pipelines.kept.map((place) => ({ kind: "pipeline" as const, name: timeline.pipelines[place] ?? "", own: [place] }));
  const height = heightOf(devices.length);
  const rows: Row[] = [];
  let y = AXIS.y + AXIS.height + 2;
  for (const device of devices) {
    rows.push({ kind: "device", ...device, y, height });
    y += height + (height >= 12 ? 4 : 1);
  }
  if (shown.length) y += 12;
  const marked = shown.map(({ kind, name, own }, at): Row => ({ kind, name, index: own[0] ?? 0, y: y + 26 * at, height: 22 }));
  const more = (isByProject ? projects : pipelines).more;
  y += 26 * marked.length + (more ? MORE_HEIGHT : 0);
  const markOf = new Map(shown.flatMap(({ own }, at) => own.map((place) => [place, at] as const)));
  const named = { pipelines: pipelines.kept, more: pipelines.more };
  const curves = named.pipelines.some((place) => timeline.lives[place]?.has_rewards) ? { y: y + 8, height: CURVES_HEIGHT } : null;
  return { width, rows: [...rows, ...marked], rowsEnd: y, marked, markOf, more, named, curves, height: (curves ? curves.y + curves.height : y) + 8, isMatch };
}

function projectsOf(timeline: Timeline, places: number[]): [string, number[]][] {
  const found = new Map<string, number[]>();
  for (const place of places) {
    const name = timeline.lives[place] ? timeline.lives[place].project || NO_PROJECT : HIDDEN_PROJECT;
    const own = found.get(name);
    if (own) own.push(place);
    else found.set(name, [place]);
  }
  return [...found];
}

/** How long devices worked for a pipeline in view; null: it was not admitted there. */
function secondsIn(timeline: Timeline, view: View | null, place: number): number | null {
  const known = view?.seconds.get(place);
  const life = timeline.lives[place];
  if (known !== undefined || !view || life?.begun_s == null) return known ?? null;
  return life.begun_s < view.span.t1 && (life.ended_s ?? timeline.end_s) > view.span.t0 ? 0 : null;
}

function sumOf(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b) : null;
}

/** All, where they are few; of more, those with most seconds, in their order, and how many others have any. */
function mostOf<Each>(all: Each[], secondsOf: (one: Each) => number | null): { kept: Each[]; more: number } {
  if (all.length <= MAX_ROWS) return { kept: all, more: 0 };
  const found = all.map((one, at) => ({ one, at, seconds: secondsOf(one) })).filter(({ seconds }) => seconds !== null);
  const most = found.sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0) || a.at - b.at).slice(0, MAX_ROWS);
  return { kept: most.sort((a, b) => a.at - b.at).map(({ one }) => one), more: found.length - most.length };
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

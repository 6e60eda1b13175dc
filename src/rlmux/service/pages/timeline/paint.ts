// Intervals drawn one by one: work in its pipeline's colour, shade by stage; waits hatched, with a stripe in the colour of the
// pipeline that is waited for, and their names where there is room.
import { type Colours, NUM_COLOURS, nameOf, paintOf, shadeOf } from "../colours";
import type { Timeline } from "./lives";
import { stageName } from "../words";
import { type Intervals, NO_PIPELINE } from "./binary";
import type { Layout, Row, Scale } from "./rows";

export interface Ink {
  colours: Colours;
  hatch: CanvasPattern | null;
}

type Box = [x: number, y: number, width: number, height: number];

/** Rectangles by what they are filled with: a canvas is fast where its fill rarely changes. */
class Boxes {
  readonly #byFill = new Map<string, Box[]>();

  add(fill: string, alpha: number, box: Box): void {
    const key = `${alpha}|${fill}`;
    const boxes = this.#byFill.get(key);
    if (boxes) boxes.push(box);
    else this.#byFill.set(key, [box]);
  }

  draw(context: CanvasRenderingContext2D): void {
    for (const [key, boxes] of this.#byFill) {
      const [alpha, fill] = key.split("|") as [string, string];
      context.globalAlpha = Number(alpha);
      context.fillStyle = fill;
      for (const box of boxes) context.fillRect(...box);
    }
    context.globalAlpha = 1;
  }
}

interface Label {
  text: string;
  box: Box;
  isWait: boolean;
}

/** Draw the rows of a span. */
export function paintIntervals(context: CanvasRenderingContext2D, intervals: Intervals, timeline: Timeline, layout: Layout, scale: Scale, ink: Ink): void {
  const sheet = new Sheet(intervals, timeline, layout, scale, ink);
  for (let at = 0; at < intervals.count; at++) sheet.add(at);
  sheet.draw(context);
}

class Sheet {
  readonly #work = new Boxes();
  readonly #waits: Box[] = [];
  readonly #marks = new Boxes();
  readonly #labels: Label[] = [];
  readonly #deviceRows = new Map<number, Row>();
  readonly #pipelineRows = new Map<number, Row>();
  readonly #numLanes = new Map<number, number>();
  readonly #steps = new Map<string, { row: Row; pipeline: number; step: number; t0: number; t1: number }>();

  constructor(
    readonly intervals: Intervals,
    readonly timeline: Timeline,
    readonly layout: Layout,
    readonly scale: Scale,
    readonly ink: Ink,
  ) {
    for (const row of layout.rows) if (row.kind === "device") this.#deviceRows.set(row.index, row);
    for (const [pipeline, at] of layout.markOf) if (layout.marked[at]) this.#pipelineRows.set(pipeline, layout.marked[at]);
    for (let at = 0; at < intervals.count; at++) {
      const [device, lane] = [intervals.device[at] ?? 0, intervals.lane[at] ?? 0];
      if (lane > 0) this.#numLanes.set(device, Math.max(this.#numLanes.get(device) ?? 1, lane + 1));
    }
  }

  add(at: number): void {
    const { start, seconds, pipeline } = this.intervals;
    const [begin, length] = [start[at] ?? 0, seconds[at] ?? 0];
    const x = this.scale.x(begin);
    const width = Math.max(length * this.scale.perSecond, 0.6);
    if (x + width < 0 || x > this.scale.left + this.scale.width) return;
    const name = this.timeline.pipelines[pipeline[at] ?? NO_PIPELINE];
    const row = this.#deviceRows.get(this.intervals.device[at] ?? -1);
    const kind = this.#kindOf(at);
    if (row) this.#addToDevice(at, row, x, width, kind, name);
    const own = this.#pipelineRows.get(pipeline[at] ?? -1);
    if (own && kind === "busy") this.#addToPipeline(at, own, x, width);
  }

  draw(context: CanvasRenderingContext2D): void {
    this.#work.draw(context);
    if (this.ink.hatch) {
      context.fillStyle = this.ink.hatch;
      for (const box of this.#waits) context.fillRect(...box);
    }
    this.#marks.draw(context);
    this.#drawSteps(context);
    this.#drawLabels(context);
  }

  #kindOf(at: number): string {
    const kind = this.timeline.kind_by_cause[this.intervals.cause[at] ?? 0];
    return typeof kind === "number" ? (this.timeline.kinds[kind] ?? "idle") : (kind ?? "idle");
  }

  #addToDevice(at: number, row: Row, x: number, width: number, kind: string, name: string | undefined): void {
    const { colours } = this.ink;
    const cause = this.timeline.causes[this.intervals.cause[at] ?? 0] ?? "";
    const stage = this.timeline.stages[this.intervals.stage[at] ?? 255];
    const faint = name !== undefined && !this.layout.isMatch[this.intervals.pipeline[at] ?? 0] ? 0.15 : 1;
    const lanes = this.intervals.order[at] ? (this.#numLanes.get(row.index) ?? 1) : 1;
    const height = row.height / lanes;
    const box: Box = [x, row.y + height * (lanes > 1 ? (this.intervals.lane[at] ?? 0) : 0), width, height];
    const colour = colours.pipelines[(this.intervals.pipeline[at] ?? 0) % NUM_COLOURS] ?? colours.ink;
    if (kind === "idle") return;
    if (kind === "busy") {
      this.#work.add(colour, faint * (cause === "tail" ? 0.35 : shadeOf(stage)), box);
      if (width > 46) this.#labels.push({ text: `${name} ${this.intervals.step[at]} · ${stageName(stage ?? cause)}`, box, isWait: false });
      return;
    }
    this.#work.add(colours[paintOf(cause)], faint, box);
    if (kind !== "bubble") return;
    if (height >= 7 && width > 3) this.#waits.push(box);
    if (name !== undefined && height >= 7) this.#marks.add(colour, faint, [x, box[1] + height - 3, width, 3]);
    if (width > 60) this.#labels.push({ text: nameOf(cause, name), box, isWait: true });
  }

  /** Upper half: rollout. Lower half: what follows it. */
  #addToPipeline(at: number, row: Row, x: number, width: number): void {
    const stage = this.timeline.stages[this.intervals.stage[at] ?? 255];
    const half = row.height / 2 - 1;
    const pipeline = this.intervals.pipeline[at] ?? 0;
    const colour = this.ink.colours.pipelines[pipeline % NUM_COLOURS] ?? this.ink.colours.ink;
    this.#work.add(colour, shadeOf(stage), [x, row.y + (stage === "generate" ? 0 : half + 2), width, half]);
    const step = this.intervals.step[at] ?? 0;
    const [t0, t1] = [this.intervals.start[at] ?? 0, (this.intervals.start[at] ?? 0) + (this.intervals.seconds[at] ?? 0)];
    const known = this.#steps.get(`${pipeline}/${step}`);
    if (known) Object.assign(known, { t0: Math.min(known.t0, t0), t1: Math.max(known.t1, t1) });
    else this.#steps.set(`${pipeline}/${step}`, { row, pipeline, step, t0, t1 });
  }

  #drawSteps(context: CanvasRenderingContext2D): void {
    const { colours } = this.ink;
    context.font = "10.5px system-ui,sans-serif";
    context.textBaseline = "middle";
    for (const { row, pipeline, step, t0, t1 } of this.#steps.values()) {
      const [x, end] = [this.scale.x(t0), this.scale.x(t1)];
      if (end - x < 5) continue;
      context.fillStyle = colours.ink;
      context.globalAlpha = 0.55;
      context.fillRect(x, row.y - 1, 1, row.height + 2);
      context.globalAlpha = 1;
      const name = row.kind === "project" ? `${this.timeline.pipelines[pipeline]} ` : "";
      const text = [`${name}${step || "warm-up"}`, step ? String(step) : ""].find((each) => 7 * each.length + 8 < end - x); // measuring each is slow
      if (text) write(context, text, x + 4, row.y + row.height / 2, colours);
    }
  }

  #drawLabels(context: CanvasRenderingContext2D): void {
    context.font = "11px system-ui,sans-serif";
    context.textBaseline = "middle";
    for (const { text, box, isWait } of this.#labels) {
      const left = Math.max(box[0], 0) + 5;
      const room = Math.min(box[0] + box[2], this.scale.left + this.scale.width) - left - 4;
      if (box[3] < 12 || room < 30) continue;
      const shown = context.measureText(text).width <= room ? text : shorter(context, text, room);
      if (shown) write(context, shown, left, box[1] + box[3] / 2 - (isWait ? 1 : 0), this.ink.colours);
    }
  }
}

/** Text on a piece of the page's own colour, so that it can be read on any hatch and any hue. */
function write(context: CanvasRenderingContext2D, text: string, x: number, y: number, colours: Colours): void {
  context.globalAlpha = 0.78;
  context.fillStyle = colours.paper;
  context.fillRect(x - 2, y - 7, context.measureText(text).width + 4, 14);
  context.globalAlpha = 1;
  context.fillStyle = colours.ink;
  context.fillText(text, x, y);
}

/** The longest beginning of whole words that fits; of a wait, what is waited for. */
function shorter(context: CanvasRenderingContext2D, text: string, room: number): string {
  const words = text.replace(/^waiting for (the )?/, "").split(" ");
  if (context.measureText(words.join(" ")).width <= room) return words.join(" ");
  while (words.length > 1) {
    words.pop();
    const tried = words.join(" ").replace(/ (of|·)$/, "");
    if (context.measureText(tried).width <= room) return tried;
  }
  return "";
}

/** Diagonal lines: the sign of a wait, for eyes that do not tell the colours apart. */
export function hatchOf(context: CanvasRenderingContext2D, colours: Colours, ratio: number): CanvasPattern | null {
  const size = Math.round(6 * ratio);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  if (!pen) return null;
  pen.strokeStyle = colours.muted;
  pen.globalAlpha = 0.55;
  pen.lineWidth = ratio * 0.9;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern?.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

// The canvas: draws at most once a frame, and while a reader pans only moves a picture that is already painted.
//
//   input.ts ─▶ setSpan ─┐
//   feed.ts  ─▶ news ────┼─▶ invalidate ─▶ one frame: overview, layer (rows, painted ahead on both sides), axis, curves, marks
//   filter, theme ───────┘
//
// Rows of pipelines follow the view when it has been still for a moment, and all of it is here.
import { type Colours, NUM_COLOURS, themeColours } from "../colours";
import type { Timeline } from "./lives";
import { type Marks, tickInDay, ticksOf, timeOfDay } from "../clock";
import { count, moment } from "../words";
import { type Pictures, Painter } from "./bitmap";
import { type Curve, drawCurveAxis, drawCurves } from "./curves";
import { type Chunk, Feed, type Span } from "./feed";
import { type Hit, hitInterval, hitTiles } from "./hit";
import { drawOverview } from "./overview";
import { hatchOf, paintIntervals } from "./paint";
import { AXIS, type Filter, GUTTER, type Layout, type Named, OVERVIEW, type Row, Scale, type View, filterOf, layoutOf } from "./rows";

export interface Listener {
  onSpan(span: Span): void;
  /** The pipelines in view are others than before. */
  onNamed(named: Named): void;
  onHover(hit: Hit | null, at_s: number | null): void;
  onTrouble(error: Error | null): void;
}

/** The rows of a span that is wider than the view. */
interface Layer {
  canvas: HTMLCanvasElement;
  scale: Scale;
  key: string;
}

const MARGIN = 0.5;
const SETTLE_MS = 150;

export class Board {
  span: Span;
  layout: Layout;
  measured: Span | null = null;
  curves: Curve[] = [];
  readonly feed: Feed;
  readonly #canvas: HTMLCanvasElement;
  readonly #listener: Listener;
  #colours: Colours = themeColours();
  #clock: Marks = [];
  #filter: Filter = filterOf("");
  #isByProject = false;
  #view: View | null = null;
  #settling = 0;
  #layer: Layer | null = null;
  #pictures = new WeakMap<object, Pictures>();
  #marks = new WeakMap<object, HTMLCanvasElement>();
  #frame = 0;
  #version = 0;
  #pointer: { x: number; y: number } | null = null;
  #width = 0;
  #ratio = 1;

  constructor(canvas: HTMLCanvasElement, timeline: Timeline, span: Span, listener: Listener) {
    this.#canvas = canvas;
    this.#listener = listener;
    this.feed = new Feed(timeline, () => {
      this.#refresh();
      this.#settleSoon();
    });
    this.span = span;
    this.layout = layoutOf(timeline, this.#filter, canvas.clientWidth, false, null);
    this.resize();
  }

  get timeline(): Timeline {
    return this.feed.timeline;
  }

  get plotWidth(): number {
    return Math.max(50, this.#width - GUTTER);
  }

  get scale(): Scale {
    return new Scale(this.span, GUTTER, this.plotWidth);
  }

  // ---------------------------------------------------------------- what changes

  update(timeline: Timeline): void {
    const { causes } = this.timeline;
    this.feed.update(timeline);
    if (causes.length !== timeline.causes.length) this.#pictures = new WeakMap();
    this.#relayout();
  }

  setClock(marks: Marks): void {
    this.#clock = marks;
    this.invalidate();
  }

  setFilter(text: string): void {
    this.#filter = filterOf(text);
    this.#pictures = new WeakMap();
    this.#relayout();
  }

  setGrouping(isByProject: boolean): void {
    this.#isByProject = isByProject;
    this.#relayout();
  }

  /** Move the view; it stays within the run and does not get narrower than a tenth of a millisecond a pixel. */
  setSpan({ t0, t1 }: Span): void {
    const { start_s, end_s } = this.timeline;
    const [whole_s, least_s] = [Math.max(1e-3, end_s - start_s), this.plotWidth * 1e-4];
    const wide_s = Math.min(Math.max(t1 - t0, Math.min(least_s, whole_s)), whole_s * 1.04);
    const middle_s = (t0 + t1) / 2;
    const begin_s = Math.min(Math.max(middle_s - wide_s / 2, start_s - whole_s * 0.02), end_s + whole_s * 0.02 - wide_s);
    this.span = { t0: begin_s, t1: begin_s + wide_s };
    this.#listener.onSpan(this.span);
    this.#settleSoon();
    this.invalidate();
  }

  setMeasured(span: Span | null): void {
    this.measured = span;
    this.invalidate();
  }

  point(at: { x: number; y: number } | null): void {
    this.#pointer = at;
    this.#listener.onHover(at ? this.hit(at.x, at.y) : null, at && at.x >= GUTTER ? this.scale.at(at.x) : null);
    this.invalidate();
  }

  retheme(): void {
    this.#colours = themeColours();
    this.#pictures = new WeakMap();
    this.#refresh();
  }

  resize(): void {
    this.#width = this.#canvas.clientWidth;
    this.#ratio = Math.min(2, devicePixelRatio || 1);
    this.#relayout();
  }

  close(): void {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#settling);
    this.feed.close();
  }

  hit(x: number, y: number): Hit | null {
    const row = this.layout.rows.find((each) => each.kind === "device" && y >= each.y && y < each.y + each.height);
    if (!row || x < GUTTER) return null;
    const at_s = this.scale.at(x);
    const { intervals } = this.feed;
    if (!intervals || !this.#showsIntervals()) return hitTiles(this.feed.ready(this.span), this.timeline, row, at_s);
    return hitInterval(intervals, this.timeline, row, at_s, 0);
  }

  // ---------------------------------------------------------------- a frame

  invalidate(): void {
    if (this.#frame === 0) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  #refresh(): void {
    this.#version++;
    this.#listener.onTrouble(this.feed.error);
    this.invalidate();
  }

  #settleSoon(): void {
    clearTimeout(this.#settling);
    this.#settling = setTimeout(() => this.#settle(), this.#view ? SETTLE_MS : 0);
  }

  /** Name what is in view now. What is not all here yet settles when it comes. */
  #settle(): void {
    if (!this.#isWhole()) return;
    this.#view = { span: this.span, seconds: this.feed.secondsIn(this.span, this.plotWidth) };
    const now = layoutOf(this.timeline, this.#filter, this.#width, this.#isByProject, this.#view);
    if (shownBy(now) !== shownBy(this.layout)) this.#relayout();
  }

  #relayout(): void {
    this.layout = layoutOf(this.timeline, this.#filter, this.#width, this.#isByProject, this.#view);
    this.#marks = new WeakMap();
    this.#listener.onNamed(this.layout.named);
    this.#canvas.dataset.rows = this.layout.marked.map(({ name }) => name).join(" "); // for those who cannot see it
    const [width, height] = [Math.round(this.#width * this.#ratio), Math.round(this.layout.height * this.#ratio)];
    if (this.#canvas.width !== width || this.#canvas.height !== height) {
      this.#canvas.width = width;
      this.#canvas.height = height;
      this.#canvas.style.height = `${this.layout.height}px`;
    }
    this.#refresh();
  }

  #showsIntervals(): boolean {
    return this.feed.isFew(this.span) && this.feed.covers(this.span);
  }

  #draw(): void {
    this.#frame = 0;
    const context = this.#canvas.getContext("2d");
    if (!context || this.#width === 0) return;
    this.feed.want(this.span, this.plotWidth);
    context.setTransform(this.#ratio, 0, 0, this.#ratio, 0, 0);
    context.fillStyle = this.#colours.paper;
    context.fillRect(0, 0, this.#width, this.layout.height);
    this.#drawAxis(context);
    this.#drawRows(context);
    if (this.layout.curves) drawCurves(context, this.curves, this.layout.curves, this.scale, this.#colours, this.timeline.pipelines);
    this.#drawNames(context);
    this.#drawMeasured(context);
    this.#drawPointer(context);
    this.#drawStrip(context);
    this.#canvas.dataset.state = this.#isWhole() ? "whole" : "waiting"; // for those who measure
  }

  #isWhole(): boolean {
    if (this.feed.isFew(this.span)) return this.feed.covers(this.span);
    return this.feed.chunks(this.span, this.feed.levelFor(this.span, this.plotWidth)).every((chunk) => chunk.tiles !== null);
  }

  #drawRows(context: CanvasRenderingContext2D): void {
    const layer = this.#currentLayer();
    if (!layer) return;
    const { scale } = this;
    const [x, width] = [scale.x(layer.scale.span.t0), layer.scale.width * (scale.perSecond / layer.scale.perSecond)];
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.plotWidth, this.layout.rowsEnd);
    context.clip();
    context.drawImage(layer.canvas, x, 0, width, this.layout.rowsEnd);
    context.restore();
  }

  /** The layer that is there if it covers the view at its scale; painted anew otherwise. */
  #currentLayer(): Layer | null {
    const has = this.#layer;
    const { start_s, end_s } = this.timeline;
    const inside = has && has.scale.span.t0 <= Math.max(this.span.t0, start_s) && has.scale.span.t1 >= Math.min(this.span.t1, end_s);
    const isSharp = has && Math.abs(has.scale.perSecond / this.scale.perSecond - 1) < 1e-9;
    const key = `${this.#version} ${this.#showsIntervals()} ${this.#width} ${this.#ratio}`;
    if (has && inside && isSharp && has.key === key) return has;
    const extra_s = (this.span.t1 - this.span.t0) * MARGIN;
    const scale = new Scale({ t0: this.span.t0 - extra_s, t1: this.span.t1 + extra_s }, 0, this.plotWidth * (1 + 2 * MARGIN));
    const canvas = has?.canvas ?? document.createElement("canvas");
    canvas.width = Math.round(scale.width * this.#ratio);
    canvas.height = Math.max(1, Math.round(this.layout.rowsEnd * this.#ratio));
    this.#layer = { canvas, scale, key };
    this.#paintLayer(canvas, scale);
    return this.#layer;
  }

  #paintLayer(canvas: HTMLCanvasElement, scale: Scale): void {
    const context = canvas.getContext("2d");
    if (!context) return;
    context.setTransform(this.#ratio, 0, 0, this.#ratio, 0, 0);
    const ink = { colours: this.#colours, hatch: hatchOf(context, this.#colours, this.#ratio) };
    this.#drawGround(context, scale);
    if (this.#showsIntervals() && this.feed.intervals) return paintIntervals(context, this.feed.intervals, this.timeline, this.layout, scale, ink);
    const painter = new Painter(this.timeline, this.#colours, this.layout.isMatch);
    for (const chunk of this.feed.ready(scale.span)) this.#drawChunk(context, chunk, painter, scale, ink.hatch);
  }

  /** The ground of each row: hatched later where something waits, outlined where no pipeline holds the device. */
  #drawGround(context: CanvasRenderingContext2D, scale: Scale): void {
    const [x, end] = [scale.x(this.timeline.start_s), scale.x(this.timeline.end_s)];
    context.strokeStyle = this.#colours.line;
    context.fillStyle = this.#colours.track;
    for (const row of this.layout.rows) {
      if (row.kind !== "device") context.fillRect(x, row.y, end - x, row.height);
      else if (row.height >= 7) context.strokeRect(x + 0.5, row.y + 0.5, end - x - 1, row.height - 1);
    }
  }

  #drawChunk(context: CanvasRenderingContext2D, chunk: Chunk, painter: Painter, scale: Scale, hatch: CanvasPattern | null): void {
    const { tiles } = chunk;
    if (!tiles) return;
    const pictures = this.#picturesOf(tiles, painter);
    const marks = this.#marksOf(tiles, painter);
    const begin_s = tiles.first_bucket * tiles.bucket_s;
    const x = scale.x(begin_s);
    const width = scale.x(begin_s + tiles.num_buckets * tiles.bucket_s) - x;
    const left = Math.max(x, scale.x(this.timeline.start_s));
    const right = Math.min(x + width, scale.x(this.timeline.end_s));
    context.save();
    context.beginPath();
    context.rect(left, 0, right - left, this.layout.rowsEnd);
    context.clip();
    context.imageSmoothingEnabled = width < tiles.num_buckets;
    for (const row of this.layout.rows) {
      if (row.kind !== "device") {
        context.fillStyle = this.#colours.track;
        context.fillRect(left, row.y, right - left, row.height);
        this.#drawLives(context, row, scale);
        context.drawImage(marks, 0, 2 * this.layout.marked.indexOf(row) + 0.5, tiles.num_buckets, 1, x, row.y, width, row.height);
        continue;
      }
      context.fillStyle = this.#colours.paper;
      context.fillRect(left, row.y, right - left, row.height);
      if (hatch) {
        context.fillStyle = hatch;
        context.fillRect(left, row.y, right - left, row.height);
      }
      context.drawImage(pictures.devices, 0, row.index * pictures.high, tiles.num_buckets, pictures.high, x, row.y, width, row.height);
    }
    context.restore();
  }

  /** A faint band from the admission to the end of a row's pipelines: in each column of tiles only one has its colour. */
  #drawLives(context: CanvasRenderingContext2D, row: Row, scale: Scale): void {
    context.globalAlpha = 0.18;
    for (const [place, at] of this.layout.markOf) {
      const life = this.layout.marked[at] === row ? this.timeline.lives[place] : undefined;
      if (life?.begun_s == null) continue;
      const x = scale.x(life.begun_s);
      context.fillStyle = this.#colours.pipelines[place % NUM_COLOURS] ?? this.#colours.ink;
      context.fillRect(x, row.y, scale.x(life.ended_s ?? this.timeline.end_s) - x, row.height);
    }
    context.globalAlpha = 1;
  }

  #picturesOf(tiles: object & Parameters<Painter["paint"]>[0], painter: Painter): Pictures {
    const known = this.#pictures.get(tiles);
    if (known) return known;
    const made = painter.paint(tiles);
    this.#pictures.set(tiles, made);
    return made;
  }

  #marksOf(tiles: Chunk["tiles"] & object, painter: Painter): HTMLCanvasElement {
    const known = this.#marks.get(tiles) ?? painter.paintMarks(tiles, this.layout);
    this.#marks.set(tiles, known);
    return known;
  }

  // ---------------------------------------------------------------- what is around the rows

  #drawAxis(context: CanvasRenderingContext2D): void {
    const { scale, span } = this;
    const { step_s, label } = ticksOf(span.t1 - span.t0, this.plotWidth / 100);
    let day = "";
    const words: string[] = [];
    context.font = "11px system-ui,sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (let at_s = Math.ceil(span.t0 / step_s) * step_s; at_s <= span.t1; at_s += step_s) {
      const x = Math.round(scale.x(at_s)) + 0.5;
      if (x < GUTTER) continue;
      const isWhole = x > GUTTER + 26 && x < this.#width - 26;
      context.fillStyle = this.#colours.line;
      context.fillRect(x, AXIS.y + AXIS.height - 3, 1, this.layout.height - AXIS.y - AXIS.height);
      context.fillStyle = this.#colours.muted;
      if (!isWhole) continue;
      context.fillText(label(at_s), x, AXIS.y + 8);
      const below = tickInDay(this.#clock, at_s, step_s, day);
      day = below.day;
      context.fillText(below.text, x, AXIS.y + 22);
      words.push(`${label(at_s)} ${below.text}`);
    }
    context.textAlign = "left";
    this.#canvas.dataset.axis = words.join("|"); // for those who cannot see it
  }

  #drawNames(context: CanvasRenderingContext2D): void {
    context.fillStyle = this.#colours.paper;
    context.fillRect(0, 0, GUTTER, this.layout.height);
    context.textBaseline = "middle";
    for (const row of this.layout.rows) {
      if (row.height < 7) continue;
      const isPipeline = row.kind === "pipeline";
      if (isPipeline) {
        context.fillStyle = this.#colours.pipelines[row.index % this.#colours.pipelines.length] ?? this.#colours.ink;
        context.fillRect(10, row.y + row.height / 2 - 4, 8, 8);
      }
      context.fillStyle = this.#colours.ink;
      context.font = `${row.kind === "device" ? "" : "600 "}${Math.min(12, row.height + 2)}px system-ui,sans-serif`;
      context.fillText(row.name, isPipeline ? 23 : 10, row.y + row.height / 2 + 0.5, GUTTER - (isPipeline ? 28 : 16));
    }
    context.font = "11px system-ui,sans-serif";
    context.fillStyle = this.#colours.muted;
    const { more, rowsEnd, curves } = this.layout;
    if (more) context.fillText(`and ${count(more)} more`, 10, rowsEnd - 10);
    if (curves) drawCurveAxis(context, this.curves, curves, this.scale, this.#colours);
  }

  #drawMeasured(context: CanvasRenderingContext2D): void {
    if (!this.measured) return;
    const [x, end] = [this.scale.x(this.measured.t0), this.scale.x(this.measured.t1)];
    context.fillStyle = this.#colours.pipelines[0] ?? this.#colours.ink;
    context.globalAlpha = 0.14;
    context.fillRect(Math.max(GUTTER, x), AXIS.y, Math.max(0, end - Math.max(GUTTER, x)), this.layout.height);
    context.globalAlpha = 1;
    for (const edge of [x, end]) if (edge >= GUTTER) context.fillRect(edge, AXIS.y, 1, this.layout.height);
  }

  #drawPointer(context: CanvasRenderingContext2D): void {
    if (!this.#pointer || this.#pointer.x < GUTTER || this.#pointer.y < AXIS.y) return;
    const x = Math.round(this.#pointer.x) + 0.5;
    context.fillStyle = this.#colours.ink;
    context.globalAlpha = 0.5;
    context.fillRect(x, AXIS.y, 1, this.layout.height);
    context.globalAlpha = 1;
    const at_s = this.scale.at(x);
    const text = [moment(at_s, Math.min(10, this.span.t1 - this.span.t0)), timeOfDay(this.#clock, at_s)].filter(Boolean).join(" · ");
    context.font = "11px system-ui,sans-serif";
    const width = context.measureText(text).width + 8;
    const left = Math.min(x + 1, this.#width - width);
    context.fillRect(left, AXIS.y, width, 16);
    context.fillStyle = this.#colours.paper;
    context.fillText(text, left + 4, AXIS.y + 8);
  }

  #drawStrip(context: CanvasRenderingContext2D): void {
    const { start_s, end_s } = this.timeline;
    const whole = new Scale({ t0: start_s, t1: Math.max(end_s, start_s + 1e-3) }, GUTTER, this.plotWidth);
    const level = this.feed.levelFor(whole.span, this.plotWidth);
    this.feed.wantTiles(whole.span, level);
    const painter = new Painter(this.timeline, this.#colours, this.layout.isMatch);
    const pictures = this.feed.chunks(whole.span, level).flatMap(({ tiles }) => (tiles ? [{ tiles, picture: this.#picturesOf(tiles, painter).overview }] : []));
    drawOverview(context, pictures, whole, this.span, OVERVIEW, this.#colours);
  }
}

/** What of a layout changes with the view. */
function shownBy({ marked, more, named }: Layout): string {
  return JSON.stringify([marked, more, named]);
}

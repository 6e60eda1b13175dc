// What of a timeline is here, and what to ask for: tiles in chunks that a browser may keep, intervals where few are in view.
//
//   view ─▶ want() ─▶ chunks of the level with about a bucket a pixel; intervals too, when the view has few
//   chunk: 1024 buckets of one level from a multiple of 1024: the same address for every view, so it is asked for once
import { getBytes } from "../api";
import { of } from "../lane";
import type { Timeline } from "./lives";
import { type Intervals, NO_PIPELINE, type Tiles, intervalsOf, tilesOf } from "./binary";

export interface Span {
  t0: number;
  t1: number;
}

const CHUNK_BUCKETS = 1024;
const MAX_CHUNKS = 48;
/** Intervals in view below which each is drawn by itself. */
const FEW = 4000;
/** Buckets of the coarsest level that is still fine enough, per pixel. */
const BUCKETS_PER_PIXEL = 0.7;

export interface Chunk {
  key: string;
  span: Span;
  /** null while it is on its way. */
  tiles: Tiles | null;
  /** Something in it may change. */
  isOpen: boolean;
}

export class Feed {
  timeline: Timeline;
  intervals: Intervals | null = null;
  readonly #chunks = new Map<string, Chunk>();
  readonly #onNews: () => void;
  #asked: (Span & { abort: AbortController }) | null = null;
  error: Error | null = null;

  constructor(timeline: Timeline, onNews: () => void) {
    this.timeline = timeline;
    this.#onNews = onNews;
  }

  /** The timeline went on. What may have changed is asked for again when it is next in view. */
  update(timeline: Timeline): void {
    const isAnew = timeline.rev !== this.timeline.rev || timeline.lane !== this.timeline.lane;
    const hasMore = isAnew || timeline.seq !== this.timeline.seq;
    const asked = this.#asked;
    const toEnd = asked !== null && asked.t1 >= this.timeline.end_s;
    this.timeline = timeline;
    if (isAnew) this.#chunks.clear();
    if (!hasMore) return;
    for (const chunk of this.#chunks.values()) if (chunk.isOpen && chunk.tiles) this.#load(chunk);
    if (isAnew) this.intervals = null;
    if (asked) this.#ask({ t0: asked.t0, t1: toEnd ? timeline.end_s : asked.t1 });
  }

  levelFor(span: Span, pixels: number): number {
    const wanted_s = (span.t1 - span.t0) / (pixels * BUCKETS_PER_PIXEL);
    const level = this.timeline.bucket_s.findLastIndex((bucket_s) => bucket_s <= wanted_s);
    return Math.max(0, level);
  }

  isFew(span: Span): boolean {
    const whole_s = Math.max(1e-9, this.timeline.end_s - this.timeline.start_s);
    return this.timeline.num_intervals * Math.min(1, (span.t1 - span.t0) / whole_s) <= FEW;
  }

  /** Ask for what a view shows and does not have. */
  want(span: Span, pixels: number): void {
    if (this.isFew(span)) this.#wantIntervals(span);
    else this.wantTiles(span, this.levelFor(span, pixels));
  }

  /** Ask for the chunks of a level; those that failed are asked for again when they are next drawn. */
  wantTiles(span: Span, level: number): void {
    for (const chunk of this.chunks(span, level)) if (!chunk.tiles && !this.#pending.has(chunk.key)) this.#load(chunk);
  }

  /** The chunks of a level that a span touches, whether they are here or not. */
  chunks(span: Span, level: number): Chunk[] {
    const chunk_s = (this.timeline.bucket_s[level] ?? 1) * CHUNK_BUCKETS;
    const first = Math.floor(Math.max(span.t0, this.timeline.start_s) / chunk_s);
    const last = Math.floor((Math.min(span.t1, this.timeline.end_s) - 1e-9) / chunk_s);
    const found = [];
    for (let index = first; index <= last; index++) found.push(this.#chunk(level, index, chunk_s));
    return found;
  }

  /** Chunks of any level that are here, coarse ones first: what can be shown until the right ones come. */
  ready(span: Span): Chunk[] {
    return [...this.#chunks.values()]
      .filter((chunk) => chunk.tiles && chunk.span.t1 > span.t0 && chunk.span.t0 < span.t1)
      .sort((a, b) => (b.tiles?.level ?? 0) - (a.tiles?.level ?? 0));
  }

  covers(span: Span): boolean {
    const has = this.intervals;
    return has !== null && has.t0 <= Math.max(span.t0, this.timeline.start_s) + 1e-6 && has.t1 >= Math.min(span.t1, this.timeline.end_s) - 1e-6;
  }

  /** How long devices worked for each pipeline in a span that is here: in tiles, a bucket is its first pipeline's. */
  secondsIn(span: Span, pixels: number): Map<number, number> {
    const seconds = new Map<number, number>();
    const add = (pipeline: number, spent_s: number) => {
      if (spent_s > 0 && pipeline !== NO_PIPELINE) seconds.set(pipeline, (seconds.get(pipeline) ?? 0) + spent_s);
    };
    if (this.isFew(span)) this.#addIntervals(span, add);
    else for (const { tiles } of this.chunks(span, this.levelFor(span, pixels))) if (tiles) addTiles(tiles, span, add);
    return seconds;
  }

  #addIntervals({ t0, t1 }: Span, add: (pipeline: number, spent_s: number) => void): void {
    const all = this.intervals;
    for (let at = 0; at < (all?.count ?? 0); at++) {
      const begin_s = all!.start[at]!;
      const kind = this.timeline.kinds[this.timeline.kind_by_cause[all!.cause[at]!]!];
      if (kind === "busy" || kind === "switch") add(all!.pipeline[at]!, Math.min(t1, begin_s + all!.seconds[at]!) - Math.max(t0, begin_s));
    }
  }

  close(): void {
    this.#asked?.abort.abort();
  }

  // ---------------------------------------------------------------- asking

  readonly #pending = new Set<string>();

  #chunk(level: number, index: number, chunk_s: number): Chunk {
    const key = `${level}/${index}`;
    const known = this.#chunks.get(key);
    if (known) {
      this.#chunks.delete(key); // the one used last is thrown away last
      this.#chunks.set(key, known);
      return known;
    }
    const chunk: Chunk = { key, span: { t0: index * chunk_s, t1: (index + 1) * chunk_s }, tiles: null, isOpen: true };
    this.#chunks.set(key, chunk);
    for (const old of this.#chunks.keys()) {
      if (this.#chunks.size <= MAX_CHUNKS) break;
      this.#chunks.delete(old);
    }
    return chunk;
  }

  #load(chunk: Chunk): void {
    this.#pending.add(chunk.key);
    const { open_from, rev } = this.timeline;
    const level = chunk.key.split("/")[0];
    const path = `/timeline/${of(this.timeline.lane)}/tiles?t0=${chunk.span.t0}&t1=${chunk.span.t1}&level=${level}&rev=${rev}`;
    getBytes(path)
      .then((bytes) => {
        chunk.tiles = tilesOf(bytes);
        chunk.isOpen = open_from !== null && chunk.span.t1 > open_from;
        this.error = null;
      })
      .catch((error: Error) => (this.error = error))
      .finally(() => {
        this.#pending.delete(chunk.key);
        this.#onNews();
      });
  }

  #wantIntervals(span: Span): void {
    const asked = this.#asked;
    const [t0, t1] = [Math.max(span.t0, this.timeline.start_s), Math.min(span.t1, this.timeline.end_s)];
    if (t1 <= t0 || (asked && asked.t0 <= t0 && asked.t1 >= t1 && this.isFew(asked))) return;
    const margin_s = this.isFew({ t0: 0, t1: 3 * (t1 - t0) }) ? t1 - t0 : (t1 - t0) / 4;
    this.#ask({ t0: Math.max(t0 - margin_s, this.timeline.start_s), t1: Math.min(t1 + margin_s, this.timeline.end_s) });
  }

  #ask({ t0, t1 }: Span): void {
    this.#asked?.abort.abort();
    const asked = { t0, t1, abort: new AbortController() };
    this.#asked = asked;
    getBytes(`/timeline/${of(this.timeline.lane)}/intervals?t0=${asked.t0}&t1=${asked.t1}&rev=${this.timeline.rev}`, asked.abort.signal)
      .then((bytes) => {
        this.intervals = { ...intervalsOf(bytes), t0: asked.t0, t1: asked.t1 };
        this.error = null;
        this.#onNews();
      })
      .catch((error: Error) => {
        if (error.name === "AbortError") return;
        this.#asked = null;
        this.error = error;
        this.#onNews();
      });
  }
}

function addTiles(tiles: Tiles, { t0, t1 }: Span, add: (pipeline: number, spent_s: number) => void): void {
  const { bucket_s, first_bucket, num_buckets } = tiles;
  const first = Math.max(0, Math.floor(t0 / bucket_s) - first_bucket);
  const end = Math.min(num_buckets, Math.ceil(t1 / bucket_s) - first_bucket);
  for (let row = 0; row < tiles.busy.length; row += num_buckets) {
    for (let at = row + first; at < row + end; at++) add(tiles.top[at]!, ((tiles.busy[at]! + tiles.switched[at]!) / 255) * bucket_s);
  }
}

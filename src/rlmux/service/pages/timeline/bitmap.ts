// Tiles as pictures: one pixel a bucket, each device a few pixels high, stacked by what its time went to.
//
// A picture is painted once and then only stretched, so a frame costs the same for a thousand intervals and for a million.
import { type Colours, NUM_COLOURS, paintOf } from "../colours";
import type { Timeline } from "./lives";
import { NO_PIPELINE, type Tiles } from "./binary";
import type { Layout } from "./rows";

export interface Pictures {
  devices: HTMLCanvasElement;
  /** Height of a device in pixels of the picture. */
  high: number;
  /** All devices together, stacked by pipeline. */
  overview: HTMLCanvasElement;
}

/** A colour as the low three bytes of a pixel: a picture of a long run has millions, each written at once. */
type Ink = number;

const FAINT = 40;
const WAIT_ALPHA = 165;
const OVERVIEW_HIGH = 40;

export class Painter {
  readonly #pipelines: Ink[];
  readonly #causes: Ink[];
  readonly #switch: Ink;
  readonly #idle: Ink;
  readonly #wait: Ink;
  readonly #isMatch: boolean[];
  readonly #isAll: boolean;

  constructor(timeline: Timeline, colours: Colours, isMatch: boolean[]) {
    this.#isMatch = isMatch;
    this.#isAll = isMatch.every(Boolean);
    this.#pipelines = colours.pipelines.map(inkOf);
    this.#causes = timeline.causes.map((cause) => inkOf(colours[paintOf(cause)]));
    this.#switch = inkOf(colours.switch);
    this.#idle = inkOf(colours.paper);
    this.#wait = inkOf(colours.wait);
  }

  paint(tiles: Tiles): Pictures {
    const high = tiles.num_devices <= 32 ? 16 : 8;
    const devices = new ImageData(tiles.num_buckets, tiles.num_devices * high);
    const columns = pixelsOf(devices);
    for (let device = 0; device < tiles.num_devices; device++) {
      for (let bucket = 0; bucket < tiles.num_buckets; bucket++) this.#column(columns, tiles, device, bucket, high);
    }
    return { devices: canvasOf(devices), high, overview: canvasOf(this.#overview(tiles)) };
  }

  /**
   * The rows of pipelines or projects, as strong as the busiest device that works for one of theirs. Each is two equal pixels
   * high: between their middles a stretched picture has nothing of its neighbours.
   */
  paintMarks(tiles: Tiles, { marked, markOf }: Layout): HTMLCanvasElement {
    const image = new ImageData(tiles.num_buckets, 2 * Math.max(1, marked.length));
    const pixels = pixelsOf(image);
    for (let at = 0; at < tiles.busy.length; at++) {
      const [top, busy] = [tiles.top[at]!, tiles.busy[at]!];
      const mark = busy > 0 ? markOf.get(top) : undefined;
      if (mark === undefined) continue;
      const to = 2 * mark * tiles.num_buckets + (at % tiles.num_buckets);
      if (busy > pixels[to]! >>> 24) pixels[to] = pixels[to + tiles.num_buckets] = inked(this.#pipelines[top % NUM_COLOURS] ?? 0, busy);
    }
    return canvasOf(image);
  }

  #overview(tiles: Tiles): ImageData {
    const image = new ImageData(tiles.num_buckets, OVERVIEW_HIGH);
    const pixels = pixelsOf(image);
    const most = 255 * Math.max(1, tiles.num_devices);
    for (let bucket = 0; bucket < tiles.num_buckets; bucket++) {
      const busy = new Map<number, number>();
      let [switched, bubble] = [0, 0];
      for (let at = bucket; at < tiles.busy.length; at += tiles.num_buckets) {
        const top = tiles.top[at] ?? NO_PIPELINE;
        if (tiles.busy[at]) busy.set(top, (busy.get(top) ?? 0) + (tiles.busy[at] ?? 0));
        switched += tiles.switched[at] ?? 0;
        bubble += tiles.bubble[at] ?? 0;
      }
      const parts = [...busy].sort(([a], [b]) => a - b).map(([top, sum]): [number, Ink | undefined] => [sum, this.#pipelines[top % NUM_COLOURS]]);
      let [done, row] = [0, 0];
      for (const [sum, colour] of [...parts, [switched, this.#switch] as const, [bubble, this.#wait] as const]) {
        done += sum;
        for (; row + 0.5 < (done / most) * OVERVIEW_HIGH; row++) pixels[(OVERVIEW_HIGH - 1 - row) * tiles.num_buckets + bucket] = inked(colour ?? this.#idle, 255);
      }
    }
    return image;
  }

  #column(pixels: Uint32Array, tiles: Tiles, device: number, bucket: number, high: number): void {
    const at = device * tiles.num_buckets + bucket;
    const busy = (tiles.busy[at]! * high) / 255;
    const switched = busy + (tiles.switched[at]! * high) / 255;
    const waited = switched + (tiles.bubble[at]! * high) / 255;
    const top = tiles.top[at]!;
    const alpha = !this.#isAll && top !== NO_PIPELINE && !this.#isMatch[top] ? FAINT : 255;
    const work = inked(this.#pipelines[top % NUM_COLOURS] ?? this.#idle, alpha);
    const change = inked(this.#switch, alpha);
    const wait = inked(this.#causes[tiles.cause[at]!] ?? this.#idle, WAIT_ALPHA);
    const idle = inked(this.#idle, 255);
    let to = ((device + 1) * high - 1) * tiles.num_buckets + bucket;
    for (let level = 0.5; level < high; level++, to -= tiles.num_buckets) {
      pixels[to] = level < busy ? work : level < switched ? change : level < waited ? wait : idle;
    }
  }
}

function inked(ink: Ink, alpha: number): number {
  return ((alpha << 24) | ink) >>> 0;
}

/** One number a pixel: red is its lowest byte, as every browser's machine has it. */
function pixelsOf(image: ImageData): Uint32Array {
  return new Uint32Array(image.data.buffer);
}

function canvasOf(image: ImageData): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

/** `#rgb` or `#rrggbb`. */
function inkOf(text: string): Ink {
  const digits = text.slice(1);
  const full = digits.length === 3 ? digits.replace(/./g, "$&$&") : digits;
  const value = Number.parseInt(full, 16);
  return ((value & 255) << 16) | (value & 0xff00) | (value >> 16);
}

// Tiles as pictures: one pixel a bucket, each device a few pixels high, stacked by what its time went to.
//
// A picture is painted once and then only stretched, so a frame costs the same for a thousand intervals and for a million.
import { type Colours, NUM_COLOURS, paintOf } from "../colours";
import type { Timeline } from "../shapes";
import { NO_CAUSE, NO_PIPELINE, type Tiles } from "./binary";

export interface Pictures {
  devices: HTMLCanvasElement;
  /** Height of a device in pixels of the picture. */
  high: number;
  pipelines: HTMLCanvasElement;
  /** All devices together, stacked by pipeline. */
  overview: HTMLCanvasElement;
}

type Rgb = readonly [number, number, number];

const FAINT = 40;
const WAIT_ALPHA = 165;
const OVERVIEW_HIGH = 40;

export class Painter {
  readonly #pipelines: Rgb[];
  readonly #causes: Rgb[];
  readonly #switch: Rgb;
  readonly #idle: Rgb;
  readonly #wait: Rgb;
  readonly #timeline: Timeline;
  readonly #isMatch: boolean[];
  readonly #isAll: boolean;

  constructor(timeline: Timeline, colours: Colours, isMatch: boolean[]) {
    this.#timeline = timeline;
    this.#isMatch = isMatch;
    this.#isAll = isMatch.every(Boolean);
    this.#pipelines = colours.pipelines.map(rgbOf);
    this.#causes = timeline.causes.map((cause) => rgbOf(colours[paintOf(cause)]));
    this.#switch = rgbOf(colours.switch);
    this.#idle = rgbOf(colours.paper);
    this.#wait = rgbOf(colours.wait);
  }

  paint(tiles: Tiles): Pictures {
    const high = tiles.num_devices <= 32 ? 16 : 8;
    const devices = new ImageData(tiles.num_buckets, tiles.num_devices * high);
    const pipelines = new ImageData(tiles.num_buckets, Math.max(1, this.#timeline.pipelines.length));
    for (let device = 0; device < tiles.num_devices; device++) {
      for (let bucket = 0; bucket < tiles.num_buckets; bucket++) {
        this.#column(devices, tiles, device, bucket, high);
        markPipeline(pipelines, tiles, device * tiles.num_buckets + bucket, bucket, this.#pipelines);
      }
    }
    return { devices: canvasOf(devices), high, pipelines: canvasOf(pipelines), overview: canvasOf(this.#overview(tiles)) };
  }

  #overview(tiles: Tiles): ImageData {
    const image = new ImageData(tiles.num_buckets, OVERVIEW_HIGH);
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
      const parts = [...busy].sort(([a], [b]) => a - b).map(([top, sum]): [number, Rgb | undefined] => [sum, this.#pipelines[top % NUM_COLOURS]]);
      let [done, row] = [0, 0];
      for (const [sum, colour] of [...parts, [switched, this.#switch] as const, [bubble, this.#wait] as const]) {
        done += sum;
        for (; row + 0.5 < (done / most) * OVERVIEW_HIGH; row++) put(image, bucket, OVERVIEW_HIGH - 1 - row, colour ?? this.#idle, 255);
      }
    }
    return image;
  }

  #column(image: ImageData, tiles: Tiles, device: number, bucket: number, high: number): void {
    const at = device * tiles.num_buckets + bucket;
    const rows = (part: number | undefined) => ((part ?? 0) * high) / 255;
    const busy = rows(tiles.busy[at]);
    const switched = busy + rows(tiles.switched[at]);
    const waited = switched + rows(tiles.bubble[at]);
    const top = tiles.top[at] ?? NO_PIPELINE;
    const isFaint = !this.#isAll && top !== NO_PIPELINE && !this.#isMatch[top];
    const cause = tiles.cause[at] ?? NO_CAUSE;
    for (let row = 0; row < high; row++) {
      const level = row + 0.5;
      const colour = level < busy ? this.#pipelines[top % NUM_COLOURS] : level < switched ? this.#switch : level < waited ? this.#causes[cause] : this.#idle;
      const alpha = level < switched ? (isFaint ? FAINT : 255) : level < waited ? WAIT_ALPHA : 255;
      put(image, bucket, (device + 1) * high - 1 - row, colour ?? this.#idle, alpha);
    }
  }
}

/** A pipeline's row is as strong as the busiest device that works for it. */
function markPipeline(image: ImageData, tiles: Tiles, at: number, bucket: number, colours: Rgb[]): void {
  const top = tiles.top[at] ?? NO_PIPELINE;
  const busy = tiles.busy[at] ?? 0;
  if (top >= image.height || busy === 0) return;
  const before = image.data[4 * (top * image.width + bucket) + 3] ?? 0;
  if (busy > before) put(image, bucket, top, colours[top % NUM_COLOURS] ?? [0, 0, 0], busy);
}

function put(image: ImageData, x: number, y: number, [red, green, blue]: Rgb, alpha: number): void {
  const at = 4 * (y * image.width + x);
  image.data[at] = red;
  image.data[at + 1] = green;
  image.data[at + 2] = blue;
  image.data[at + 3] = alpha;
}

function canvasOf(image: ImageData): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

/** `#rgb` or `#rrggbb`. */
function rgbOf(text: string): Rgb {
  const digits = text.slice(1);
  const full = digits.length === 3 ? digits.replace(/./g, "$&$&") : digits;
  const value = Number.parseInt(full, 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

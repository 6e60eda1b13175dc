// What lies under the pointer, as plain facts: an interval where they are here, a bucket of tiles otherwise.
import { nameOf } from "../colours";
import type { Timeline } from "./lives";
import { stageName } from "../words";
import { type Intervals, NO_CAUSE, NO_PIPELINE, type Tiles } from "./binary";
import type { Chunk } from "./feed";
import type { Row } from "./rows";

export interface Hit {
  device: string;
  at_s: number;
  title: string;
  facts: [string, string | number][];
  start_s: number;
  seconds: number;
}

/** The first interval at or after which nothing of the device begins before a time: intervals are by device, then start. */
function positionOf(intervals: Intervals, device: number, at_s: number): number {
  let [low, high] = [0, intervals.count];
  while (low < high) {
    const middle = (low + high) >> 1;
    const before = (intervals.device[middle] ?? 0) < device || (intervals.device[middle] === device && (intervals.start[middle] ?? 0) <= at_s);
    if (before) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export function hitInterval(intervals: Intervals, timeline: Timeline, row: Row, at_s: number, lane: number): Hit | null {
  const isAt = (at: number) => at_s < (intervals.start[at] ?? 0) + (intervals.seconds[at] ?? 0);
  const last = positionOf(intervals, row.index, at_s);
  let found = -1;
  for (let at = last; at >= 0 && at > last - 16 && intervals.device[at] === row.index; at--) {
    if (!isAt(at)) continue;
    if (found < 0 || intervals.lane[at] === lane) found = at;
    if (intervals.lane[at] === lane) break;
  }
  return found < 0 ? null : factsOf(intervals, timeline, row, at_s, found);
}

function factsOf(intervals: Intervals, timeline: Timeline, row: Row, at_s: number, at: number): Hit {
  const pipeline = timeline.pipelines[intervals.pipeline[at] ?? NO_PIPELINE];
  const cause = timeline.causes[intervals.cause[at] ?? NO_CAUSE] ?? "";
  const stage = stageName(timeline.stages[intervals.stage[at] ?? 255]);
  const [step, order, fraction] = [intervals.step[at] ?? 0, intervals.order[at] ?? 0, intervals.fraction[at] ?? 1];
  const facts: [string, string | number][] = [];
  if (stage) facts.push(["stage", stage]);
  if (step) facts.push(["step", step]);
  if (order) facts.push(["order", order]);
  if (fraction < 1) facts.push(["device fraction", fraction.toFixed(2)]);
  const isWork = cause === "compute" || cause === "tail";
  const title = isWork ? `${pipeline}: ${cause === "tail" ? "tail" : "computing"}` : nameOf(cause, pipeline);
  return { device: row.name, at_s, title, facts, start_s: intervals.start[at] ?? 0, seconds: intervals.seconds[at] ?? 0 };
}

export function hitTiles(chunks: readonly Chunk[], timeline: Timeline, row: Row, at_s: number): Hit | null {
  for (const { tiles } of [...chunks].reverse()) {
    const bucket = tiles ? Math.floor(at_s / tiles.bucket_s) - tiles.first_bucket : -1;
    if (tiles && bucket >= 0 && bucket < tiles.num_buckets) return bucketOf(tiles, timeline, row, at_s, bucket);
  }
  return null;
}

function bucketOf(tiles: Tiles, timeline: Timeline, row: Row, at_s: number, bucket: number): Hit {
  const at = row.index * tiles.num_buckets + bucket;
  const share = (plane: Uint8Array) => `${Math.round(((plane[at] ?? 0) / 255) * 100)} %`;
  const [top, cause] = [timeline.pipelines[tiles.top[at] ?? NO_PIPELINE], timeline.causes[tiles.cause[at] ?? NO_CAUSE]];
  const facts: [string, string][] = [
    ["busy", share(tiles.busy)],
    ["switch", share(tiles.switched)],
    ["bubble", share(tiles.bubble)],
  ];
  if (cause) facts.push(["mostly", cause]);
  return { device: row.name, at_s, title: top ? `mostly ${top}` : "no work", facts, start_s: (tiles.first_bucket + bucket) * tiles.bucket_s, seconds: tiles.bucket_s };
}

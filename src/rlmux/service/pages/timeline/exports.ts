// The view as a file: a picture, a table of its intervals, a trace that Perfetto and chrome://tracing open.
//
// The intervals are those that the service has of the view; where there are too many it says how much narrower to look.
import { getBytes } from "../api";
import { of } from "../lane";
import type { Timeline } from "./lives";
import { type Intervals, NO_CAUSE, NO_PIPELINE, intervalsOf } from "./binary";
import type { Span } from "./feed";

interface Piece {
  device: string;
  start_s: number;
  seconds: number;
  kind: string;
  cause: string;
  pipeline: string;
  stage: string;
  step: number;
  order: number;
}

const COLUMNS = ["device", "start_s", "seconds", "kind", "cause", "pipeline", "stage", "step", "order"] as const;

export async function saveTable(timeline: Timeline, span: Span): Promise<void> {
  const rows = (await piecesOf(timeline, span)).map((piece) => COLUMNS.map((name) => cell(piece[name])).join(","));
  save(new Blob([[COLUMNS.join(","), ...rows, ""].join("\r\n")], { type: "text/csv" }), `${timeline.lane}.csv`);
}

export async function saveTrace(timeline: Timeline, span: Span): Promise<void> {
  const pieces = await piecesOf(timeline, span);
  const lines = new Map(timeline.devices.map(({ id }, index) => [id, index + 1]));
  const names = [...lines].map(([name, tid]) => ({ ph: "M", name: "thread_name", pid: 1, tid, args: { name } }));
  const events = pieces.map(({ device, start_s, seconds, ...args }) => ({
    ...{ ph: "X", pid: 1, tid: lines.get(device), ts: 1e6 * start_s, dur: 1e6 * seconds, cat: args.kind },
    name: args.kind === "busy" ? `${args.pipeline} ${args.step} ${args.stage}` : [args.cause, args.pipeline].filter(Boolean).join(" "),
    args,
  }));
  save(new Blob([JSON.stringify({ traceEvents: [...names, ...events] })], { type: "application/json" }), `${timeline.lane}.trace.json`);
}

export async function savePicture(timeline: Timeline, canvas: HTMLCanvasElement): Promise<void> {
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
  if (blob) save(blob, `${timeline.lane}.png`);
}

async function piecesOf(timeline: Timeline, { t0, t1 }: Span): Promise<Piece[]> {
  const from_s = Math.max(t0, timeline.start_s);
  const upto_s = Math.min(t1, timeline.end_s);
  const found = intervalsOf(await getBytes(`/timeline/${of(timeline.lane)}/intervals?t0=${from_s}&t1=${upto_s}`));
  return Array.from({ length: found.count }, (_, at) => pieceOf(timeline, found, at));
}

function pieceOf(timeline: Timeline, all: Intervals, at: number): Piece {
  const [cause, pipeline] = [all.cause[at]!, all.pipeline[at]!];
  const kind = timeline.kind_by_cause[cause];
  return {
    device: timeline.devices[all.device[at]!]?.id ?? "",
    start_s: all.start[at]!,
    seconds: all.seconds[at]!,
    kind: typeof kind === "number" ? (timeline.kinds[kind] ?? "") : (kind ?? ""),
    cause: cause === NO_CAUSE ? "" : (timeline.causes[cause] ?? ""),
    pipeline: pipeline === NO_PIPELINE ? "" : (timeline.pipelines[pipeline] ?? ""),
    stage: timeline.stages[all.stage[at]!] ?? "",
    step: all.step[at]!,
    order: all.order[at]!,
  };
}

/** A field of the table. A name that a spreadsheet would take for a formula is text. */
function cell(value: string | number): string {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return `"${text.replaceAll('"', '""')}"`;
}

function save(blob: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

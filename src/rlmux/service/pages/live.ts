// News from the service: one stream for all tabs of a browser.
//
//   service ──EventSource──▶ the tab that holds the lock ──BroadcastChannel──▶ every tab ──▶ listen(...)
//   every tab ──which lanes it shows──▶ the tab that holds the lock, which opens the stream anew when that is news to it
//
// When that tab closes, the lock goes to another, which opens a stream of its own and tells every tab to read again.
// A browser without Web Locks (a page that is not on this machine, without TLS) opens a stream in each tab.
import { useEffect, useState } from "preact/hooks";

/** Something that changed. The key is the event and its lane: `pipeline:demo`; `reset`: read everything again. */
export interface Message {
  key: string;
  data: Record<string, unknown>;
  /** This tab changed it, and reads it again at once. */
  isOwn?: boolean;
}

export interface Pulse {
  /** `connecting` until the first word; `lost` while there is no stream. */
  state: "connecting" | "live" | "lost";
  /** When the service was last heard, by this browser's clock in ms. */
  heard_ms: number;
}

type Report = { message?: Message; pulse: Pulse };
type Word = { report: Report } | { shows: string } | { who: true };

const EVENTS = ["lane", "devices", "pipeline", "step", "timeline", "reset"];
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("rlmux-live") : null;
const listeners = new Set<(message: Message) => void>();
const watchers = new Set<(pulse: Pulse) => void>();
let pulse: Pulse = { state: "connecting", heard_ms: 0 };
let isStarted = false;
let isLeader = false;
let stream: EventSource | null = null;
let shown = "";
const lanes = new Set<string>();

export function listen(listener: (message: Message) => void): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

/** Have this tab read again what it has just changed, before the stream says so. */
export function announce(key: string): void {
  for (const listener of listeners) listener({ key, data: {}, isOwn: true });
}

export function usePulse(): Pulse {
  const [now, setNow] = useState(pulse);
  useEffect(() => {
    watchers.add(setNow);
    setNow(pulse);
    return () => void watchers.delete(setNow);
  }, []);
  return now;
}

/** Follow a lane from now on; safe to call again. */
export function follow(lane: string): void {
  shown = lane;
  if (!isStarted) start();
  channel?.postMessage({ shows: lane } satisfies Word);
  if (isLeader) add(lane);
}

function start(): void {
  isStarted = true;
  if (channel) channel.onmessage = (event: MessageEvent<Word>) => hear(event.data);
  const lead = () => {
    isLeader = true;
    lanes.add(shown);
    open();
    channel?.postMessage({ who: true } satisfies Word);
    return new Promise<never>(() => undefined); // held until the tab is gone
  };
  if (navigator.locks && channel) void navigator.locks.request("rlmux-live", lead);
  else void lead();
}

function hear(word: Word): void {
  if ("report" in word) take(word.report);
  else if ("who" in word) channel?.postMessage({ shows: shown } satisfies Word);
  else if (isLeader) {
    add(word.shows);
    channel?.postMessage({ report: { pulse } } satisfies Word); // a tab that has just opened learns how things are
  }
}

function add(lane: string): void {
  if (lanes.has(lane)) return;
  lanes.add(lane);
  open();
}

function open(): void {
  stream?.close();
  const topics = [...lanes].map(encodeURIComponent).flatMap((lane) => [`pipelines:${lane}`, `timeline:${lane}`]);
  const now = new EventSource(`/api/v1/stream?topics=${encodeURIComponent(["lanes", ...topics].join(","))}`);
  let wasLost = pulse.heard_ms > 0;
  stream = now;
  now.onopen = () => {
    tell({ pulse: { state: "live", heard_ms: Date.now() }, ...(wasLost && { message: { key: "reset", data: {} } }) });
    wasLost = false;
  };
  now.onerror = () => {
    wasLost = true;
    const isRefused = now.readyState === EventSource.CLOSED; // otherwise it tries again by itself
    // A stream does not say why it is refused; a read does, and leads to the login where the session has ended.
    tell({ pulse: { ...pulse, state: "lost" }, ...(isRefused && { message: { key: "reset", data: {} } }) });
    if (isRefused) again();
  };
  for (const name of EVENTS) now.addEventListener(name, (event) => tell(reportOf(name, event)));
  now.addEventListener("hello", () => tell({ pulse: { state: "live", heard_ms: Date.now() } }));
  now.addEventListener("bye", () => {
    now.close();
    tell({ pulse: { ...pulse, state: "lost" } });
    again();
  });
}

/** Not all browsers at the same moment. */
function again(): void {
  const before = stream;
  setTimeout(() => before === stream && open(), 1000 + Math.random() * 2000);
}

function reportOf(name: string, event: MessageEvent<string>): Report {
  const data = JSON.parse(event.data) as Record<string, unknown>;
  const key = name === "reset" ? name : `${name}:${data.lane ?? data.name}`;
  return { message: { key, data }, pulse: { state: "live", heard_ms: Date.now() } };
}

function tell(report: Report): void {
  channel?.postMessage({ report } satisfies Word);
  take(report);
}

function take(report: Report): void {
  pulse = report.pulse;
  for (const watcher of watchers) watcher(pulse);
  if (report.message) for (const listener of listeners) listener(report.message);
}

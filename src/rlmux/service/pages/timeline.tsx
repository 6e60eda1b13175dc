// Timeline, the picture that people leave open: what each device did, every second with a name.
//
// The view is in the URL: `t0` and `t1` in seconds of the run, `q` the filter, `rows=project` for a row a project, `follow` to
// stay at the end of a live run.
import { useEffect, useRef, useState } from "preact/hooks";
import { get, useData } from "./api";
import { type Paint, onTheme, paintOf } from "./colours";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { of, useShown } from "./lane";
import { Legend } from "./parts";
import { amend, usePlace } from "./place";
import type { Gap, Metrics } from "./shapes";
import { GapTable, MeasureTable, Reading } from "./timeline/panels";
import { Board } from "./timeline/board";
import type { Curve } from "./timeline/curves";
import { savePicture, saveTable, saveTrace } from "./timeline/exports";
import type { Span } from "./timeline/feed";
import type { Hit } from "./timeline/hit";
import { type Timeline, addressOf, readTimeline } from "./timeline/lives";
import { listenToPointer, shift, zoom } from "./timeline/input";
import type { Named } from "./timeline/rows";

const URL_PAUSE_MS = 250;

export function TimelinePage() {
  const { lane } = useShown();
  const timeline = useData<Timeline>(addressOf(lane.name), [`timeline:${lane.name}`, `lane:${lane.name}`], readTimeline);
  if (!timeline.value) return <Trouble error={timeline.error} />;
  if (timeline.value.end_s <= timeline.value.start_s) return <Nothing />;
  return <View key={lane.name} timeline={timeline.value} />;
}

function Nothing() {
  return (
    <>
      <div class="heading">
        <h1>Timeline</h1>
      </div>
      <p class="empty">Nothing has run yet. The first order of a device appears here by itself.</p>
    </>
  );
}

function View({ timeline }: { timeline: Timeline }) {
  const { lane } = useShown();
  const { query } = usePlace();
  const filter = query.get("q") ?? "";
  const isByProject = query.get("rows") === "project";
  const follows = query.get("follow") === "1" && !timeline.is_over;
  const canvas = useRef<HTMLCanvasElement>(null);
  const [board, setBoard] = useState<Board | null>(null);
  const [hover, setHover] = useState<{ hit: Hit | null; at_s: number | null }>({ hit: null, at_s: null });
  const [measured, setMeasured] = useState<Span | null>(null);
  const [named, setNamed] = useState<Named>({ pipelines: [], more: 0 });
  const [gap, setGap] = useState<Gap | null>(null);
  const [trouble, setTrouble] = useState<Error | null>(null);

  useEffect(() => {
    if (!canvas.current) return;
    const remember = rememberSpan(() => made.timeline);
    const made = new Board(canvas.current, timeline, spanOf(query, timeline), {
      onSpan: remember,
      onNamed: setNamed,
      onHover: (hit, at_s) => setHover({ hit, at_s }),
      onTrouble: setTrouble,
    });
    const ask = (x: number, y: number) => void gapAt(made, x, y).then(setGap, setTrouble);
    const stops = [
      listenToPointer(canvas.current, made, { onMeasured: () => setMeasured(made.measured), onClick: ask }),
      onTheme(() => made.retheme()),
      onSize(canvas.current, () => made.resize()),
      () => made.close(),
    ];
    setBoard(made);
    return () => {
      for (const stop of stops) stop();
    };
  }, []);
  useEffect(() => board?.setClock(lane.clock), [board, JSON.stringify(lane.clock)]);
  useEffect(() => board?.setFilter(filter), [board, filter]);
  useEffect(() => board?.setGrouping(isByProject), [board, isByProject]);
  useEffect(() => {
    if (!board) return;
    board.update(timeline);
    const wide_s = board.span.t1 - board.span.t0;
    if (!query.has("t0") && !follows) board.setSpan(wholeOf(timeline));
    else if (follows) board.setSpan({ t0: timeline.end_s - wide_s, t1: timeline.end_s });
  }, [board, timeline, follows]);
  useCurves(board, timeline, named);
  const fit = () => board?.setSpan(wholeOf(timeline));
  const turnFollow = () => amend({ follow: follows ? null : "1" });
  useKeys([
    { keys: "f", does: "fit the whole run", run: fit },
    { keys: "l", does: "follow a live run", run: turnFollow },
    { keys: "ArrowLeft", does: "earlier", run: () => board && shift(board, -0.2) },
    { keys: "ArrowRight", does: "later", run: () => board && shift(board, 0.2) },
    { keys: "+", does: "zoom in", run: () => board && zoom(board, 0.6) },
    { keys: "-", does: "zoom out", run: () => board && zoom(board, 1 / 0.6) },
    { keys: "Escape", does: "end measuring", run: () => (board?.setMeasured(null), setMeasured(null), setGap(null)) },
  ]);
  const paints = new Set<Paint>(timeline.causes.filter((cause) => cause !== "compute" && cause !== "tail").map(paintOf));
  return (
    <>
      <div class="heading">
        <h1>Timeline</h1>
        <span class="muted small">drag to pan, wheel to zoom, shift + drag to measure, click for what happened there</span>
      </div>
      <div class="toolbar">
        <input data-search type="search" placeholder="pipeline, or device:name   /" aria-label="filter" value={filter} onInput={(event) => amend({ q: event.currentTarget.value || null })} />
        <label class="muted small">
          rows:{" "}
          <select value={isByProject ? "project" : "pipeline"} onChange={(event) => amend({ rows: event.currentTarget.value === "project" ? "project" : null })}>
            <option value="pipeline">by pipeline</option>
            <option value="project">by project</option>
          </select>
        </label>
        <button onClick={fit}>Whole run</button>
        <button onClick={() => board && zoom(board, 0.6)} aria-label="zoom in">+</button>
        <button onClick={() => board && zoom(board, 1 / 0.6)} aria-label="zoom out">−</button>
        {!timeline.is_over && (
          <button aria-pressed={follows} onClick={turnFollow}>
            Follow
          </button>
        )}
        <span class="muted small">save the view as</span>
        <button onClick={() => board && void saveTable(timeline, board.span).catch(setTrouble)}>CSV</button>
        <button onClick={() => canvas.current && void savePicture(timeline, canvas.current)}>PNG</button>
        <button onClick={() => board && void saveTrace(timeline, board.span).catch(setTrouble)} title="a trace for ui.perfetto.dev">
          Perfetto
        </button>
      </div>
      <Trouble error={trouble} />
      <div class="board">
        <canvas ref={canvas} role="img" aria-label={`timeline of ${timeline.devices.length} devices and ${timeline.pipelines.length} pipelines`} />
      </div>
      <Reading hit={hover.hit} at_s={hover.at_s} />
      <Legend names={named.pipelines.map((place) => timeline.pipelines[place] ?? "")} more={named.more} paints={paints} />
      {measured && measured.t1 > measured.t0 && <MeasureTable lane={timeline.lane} span={measured} />}
      {gap && <GapTable gap={gap} />}
    </>
  );
}

/** The view that the URL asks for: all of it without one. */
function spanOf(query: URLSearchParams, timeline: Timeline): Span {
  const [t0, t1] = [query.get("t0"), query.get("t1")].map((text) => (text === null ? Number.NaN : Number(text)));
  const isGood = t0 !== undefined && t1 !== undefined && Number.isFinite(t0) && Number.isFinite(t1) && t1 > t0;
  return isGood ? { t0, t1 } : wholeOf(timeline);
}

function wholeOf(timeline: Timeline): Span {
  return { t0: timeline.start_s, t1: timeline.end_s };
}

/** Writes the view into the URL, not at every frame. All of the run is no view of its own: it goes on with a live one. */
function rememberSpan(timeline: () => Timeline): (span: Span) => void {
  let timer = 0;
  return ({ t0, t1 }) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const whole = wholeOf(timeline());
      const isWhole = t0 <= whole.t0 && t1 >= whole.t1;
      if (location.pathname === "/timeline") amend(isWhole ? { t0: null, t1: null } : { t0: t0.toFixed(4), t1: t1.toFixed(4) });
    }, URL_PAUSE_MS);
  };
}

function onSize(canvas: HTMLCanvasElement, change: () => void): () => void {
  const observer = new ResizeObserver(change);
  if (canvas.parentElement) observer.observe(canvas.parentElement);
  return () => observer.disconnect();
}

async function gapAt(board: Board, x: number, y: number): Promise<Gap | null> {
  const hit = board.hit(x, y);
  if (!hit) return null;
  return get<Gap>(`/timeline/${of(board.timeline.lane)}/gap?device=${encodeURIComponent(hit.device)}&t=${hit.at_s}`);
}

/** Rewards of the pipelines in view. Those of a pipeline that goes on are read again as the log grows. */
function useCurves(board: Board | null, timeline: Timeline, { pipelines }: Named): void {
  const known = useRef(new Map<string, Curve>());
  const wanted = pipelines.filter((place) => timeline.lives[place]?.has_rewards);
  const keys = wanted.map((place) => `${place} ${timeline.lives[place]?.ended_s ?? Math.floor(timeline.seq / 50)}`);
  useEffect(() => {
    if (!board) return;
    let isOn = true;
    const read = async (place: number, key: string) => {
      const curve = known.current.get(key) ?? (await curveOf(timeline, place));
      known.current.set(key, curve);
      return curve;
    };
    void Promise.all(wanted.map((place, at) => read(place, keys[at] ?? ""))).then(
      (curves) => {
        if (!isOn) return;
        board.curves = curves;
        board.invalidate();
      },
      () => undefined, // the rows are worth more than the curves below them
    );
    return () => void (isOn = false);
  }, [board, keys.join()]);
}

async function curveOf(timeline: Timeline, pipeline: number): Promise<Curve> {
  const path = `/pipelines/${of(timeline.lane, timeline.pipelines[pipeline] ?? "")}/metrics`;
  const { series } = await get<Metrics>(`${path}?names=reward_mean&x=time_s&points=1000`);
  const { x, y } = series.reward_mean ?? { x: [], y: [] };
  return { pipeline, points: x.flatMap((at_s, index): [number, number][] => (at_s != null && y[index] != null ? [[at_s, y[index]]] : [])) };
}

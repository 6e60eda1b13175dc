// Two to twenty pipelines side by side, of one lane or of several: what differs in their files, their figures, their curves
// on one axis. Runs that differ in their seed alone are one curve: their mean, in a band from the lowest to the highest.
//
//   /compare?of=demo/sort,demo/tools     `a` and `b` name the first two in links to one pipeline's comparison
import { get, useData } from "./api";
import { type Curve, type Run, Constants, More, Overlay, RunKey, constantOf } from "./charts";
import { NUM_COLOURS } from "./colours";
import { Trouble } from "./frame";
import { useShown, of } from "./lane";
import { areFlat, flatLast } from "./noise";
import { address, amend, usePlace } from "./place";
import { promiseWord } from "./promises";
import type { Page } from "./kinds";
import type { Compared, ComparedPipeline, Metrics, Pipeline } from "./shapes";
import { Table, type Column } from "./table";
import { NONE, count, firstMetrics, percent, reward, seconds, times } from "./words";

export const MAX_COMPARED = 20;
const DASHES: readonly number[][] = [[], [5, 3], [2, 2], [9, 3, 2, 3], [12, 4]];

type Look = Omit<Run, "curve">;

export function Compare() {
  const { query } = usePlace();
  const { lanes } = useShown();
  const changes = lanes.map((lane) => `pipeline:${lane.name}`);
  const rows = useData<Page<Pipeline>>("/pipelines?limit=500&sort=active", changes);
  const names = [query.get("a"), query.get("b"), ...(query.get("of") ?? "").split(",")].filter((name): name is string => !!name).slice(0, MAX_COMPARED);
  const choose = (chosen: string[]) => amend({ a: null, b: null, of: chosen.join(",") || null });
  const others = (rows.value?.items ?? []).map((row) => of(row.lane, row.name)).filter((name) => !names.includes(name));
  const compared = useData<Compared>(names.length > 1 ? `/compare?${names.map((name) => `of=${encodeURIComponent(name)}`).join("&")}` : null, changes);
  return (
    <>
      <div class="heading">
        <h1>Compare</h1>
      </div>
      <div class="toolbar">
        {names.map((name) => (
          <button title="take it out" aria-label={`take ${shown(name)} out`} onClick={() => choose(names.filter((each) => each !== name))}>
            {shown(name)} ×
          </button>
        ))}
        {names.length < MAX_COMPARED && (
          <select aria-label="add a pipeline" value="" onChange={(event) => choose([...names, event.currentTarget.value])}>
            <option value="">add a pipeline</option>
            {others.map((name) => (
              <option value={name}>{shown(name)}</option>
            ))}
          </select>
        )}
      </div>
      <Trouble error={rows.error ?? compared.error} />
      {names.length < 2 && <p class="empty">Choose 2 to {MAX_COMPARED} pipelines, here or in the <a href={address("/pipelines")}>list of pipelines</a>: their figures, the keys of their files that differ, and their curves on one axis.</p>}
      {compared.value && <Sides compared={compared.value} names={names} />}
    </>
  );
}

function Sides({ compared, names }: { compared: Compared; names: string[] }) {
  const { identity, items } = compared;
  const looks = looksOf(items, names);
  return (
    <>
      {identity && (
        <p class={`banner ${identity.is_same_plan && identity.first_other !== null ? "" : "soft"}`} role="status">
          {identity.says}
          {identity.first_other !== null &&
            names.map((name) => (
              <>
                {" · "}
                <a href={address(`/pipelines/${name}`, { tab: "samples", step: String(identity.first_other) })}>samples of {shown(name)}</a>
              </>
            ))}
        </p>
      )}
      <Figures compared={compared} looks={looks} />
      <Curves compared={compared} looks={looks} names={names} />
    </>
  );
}

function shown(name: string): string {
  return name.split("/").map(decodeURIComponent).join(" / ");
}

/** Each pipeline's colour is that of all pages; dashes tell apart what has one colour. */
function looksOf(items: readonly ComparedPipeline[], names: readonly string[]): Look[] {
  const taken = new Set<string>();
  return items.map((row, at) => {
    const colour = row.place % NUM_COLOURS;
    const free = DASHES.map((_, next) => (at + next) % DASHES.length).find((dash) => !taken.has(`${colour} ${dash}`)) ?? at % DASHES.length;
    taken.add(`${colour} ${free}`);
    return { name: shown(names[at] ?? row.name), colour, dash: DASHES[free] ?? [] };
  });
}

function Figures({ compared: { items, differs }, looks }: { compared: Compared; looks: Look[] }) {
  const lines: [string, (row: Pipeline) => string][] = [
    ["state", (row) => row.status],
    ["steps", (row) => count(row.step)],
    ["reward, first", (row) => reward(row.reward_first)],
    ["reward, last", (row) => reward(row.reward_last)],
    ["a step takes", (row) => seconds(row.step_s_mean)],
    ["slowdown", (row) => times(row.step_slowdown)],
    ["tokens", (row) => count(row.tokens)],
    ["weights, shared or alone", (row) => promiseWord(row.promise)],
  ];
  const [first, second] = items;
  const change = (before: number | null | undefined, after: number | null | undefined) => (before && after != null ? percent(after / before - 1) : "");
  const changes: Record<string, string> = { "a step takes": change(first?.step_s_mean, second?.step_s_mean), tokens: change(first?.tokens, second?.tokens) };
  const rows: Side[] = [
    ...lines.map(([title, read]) => ({ title, values: items.map(read), change: changes[title] ?? "", isKey: false })),
    ...Object.entries(differs).map(([title, values]) => ({ title, values: values.map((value) => (value === null ? NONE : String(value))), change: "", isKey: true })),
  ];
  const columns: Column<Side>[] = [
    { id: "what", title: "", paint: (row) => (row.isKey ? "mono" : ""), cell: (row) => row.title },
    ...looks.map((look, place): Column<Side> => ({ id: `of${place}`, title: <LookName look={look} />, kind: "number", cell: (row) => row.values[place] })),
    ...(items.length === 2 ? [{ id: "change", title: "second against first", kind: "number muted", cell: (row: Side) => row.change }] : []),
  ];
  return (
    <>
      <Table name="compared" label="figures, and what differs in their files" class="compared" columns={columns} rows={rows} idOf={(row) => `${row.isKey} ${row.title}`} rowClass={(row) => (row.isKey ? "differs" : "")} />
      {Object.keys(differs).length === 0 && <p class="muted small">Nothing differs in what their files say of them.</p>}
    </>
  );
}

interface Side {
  title: string;
  values: string[];
  /** Of the second against the first. */
  change: string;
  /** Whether it is a key of their files that differs. */
  isKey: boolean;
}

function LookName({ look }: { look: Look }) {
  return (
    <>
      <i class={`dot c${look.colour}`} />
      {look.name}
    </>
  );
}

function Curves({ compared, looks, names }: { compared: Compared; looks: Look[]; names: string[] }) {
  const { query } = usePlace();
  const every = useData<Metrics[]>(names.map((name) => `/pipelines/${name}/metrics?points=800`).join(" "), [], (paths) => Promise.all(paths.split(" ").map((path) => get<Metrics>(path))));
  if (!every.value || every.value.length !== compared.items.length) return <Trouble error={every.error} />;
  const isEach = query.get("each") === "1";
  const hasSeeds = compared.groups.some((group) => group.length > 1);
  const groups = isEach ? compared.items.map((_, at) => [at]) : compared.groups;
  const looksOfGroups = groups.map(([at, ...more]) => ({ ...looks[at ?? 0]!, name: `${looks[at ?? 0]!.name}${more.length ? ` and ${more.length} more, mean` : ""}` }));
  const metrics = [...new Set(every.value.flatMap((each) => each.names))];
  const charts = metrics.map((metric) => {
    const runs = groups.flatMap((group, at) => {
      const curves = group.flatMap((place) => every.value?.[place]?.series[metric] ?? []);
      return curves.length > 0 ? [{ ...looksOfGroups[at]!, curve: merged(curves) }] : [];
    });
    return { metric, runs, constant: constantOfAll(runs) };
  });
  if (charts.every(({ runs }) => runs.length < 2)) return <p class="empty">They have no metric in common.</p>;
  const [first, others] = firstMetrics(charts.filter(({ constant }) => constant === null).map(({ metric }) => metric));
  const runsOf = (metric: string) => charts.find((chart) => chart.metric === metric)?.runs ?? [];
  const isFlat = (metric: string) => areFlat(runsOf(metric).map(({ curve }) => curve));
  const overlay = (metric: string) => <Overlay key={metric} title={metric} runs={runsOf(metric)} />;
  return (
    <>
      {hasSeeds && (
        <label class="small">
          <input type="checkbox" checked={isEach} onChange={() => amend({ each: isEach ? null : "1" })} /> each seed on its own
        </label>
      )}
      <RunKey runs={looksOfGroups} />
      <div class="charts">{flatLast(first, isFlat).map(overlay)}</div>
      <More count={others.length}>
        <div class="charts">{flatLast(others, isFlat).map(overlay)}</div>
      </More>
      <Constants values={charts.map(({ metric, constant }) => [metric, constant])} />
    </>
  );
}

/** One curve as it is; of several, the mean at each step, with the lowest and the highest. */
function merged(curves: readonly Curve[]): Curve {
  if (curves.length === 1 && curves[0]) return { x: curves[0].x, y: curves[0].y };
  const values = new Map<number, number[]>();
  for (const { x, y } of curves) x.forEach((at, index) => at !== null && y[index] != null && values.set(at, [...(values.get(at) ?? []), y[index]!]));
  const steps = [...values].sort(([a], [b]) => a - b);
  return {
    x: steps.map(([at]) => at),
    y: steps.map(([, its]) => its.reduce((sum, each) => sum + each, 0) / its.length),
    min: steps.map(([, its]) => Math.min(...its)),
    max: steps.map(([, its]) => Math.max(...its)),
  };
}

/** What all are at every step; null where one changes or they differ. */
function constantOfAll(runs: readonly Run[]): number | null {
  const [first, ...others] = runs.map(({ curve }) => constantOf(curve));
  return first !== undefined && others.every((each) => each === first) ? first : null;
}

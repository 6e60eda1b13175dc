// One pipeline: its figures, curves, where its time went, steps, log and file, as tabs.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { get, useData } from "./api";
import { CancelButton, RemoveButton, RetryButton, useActs } from "./acts";
import { Chart, Constants, More, constantOf } from "./charts";
import { paintOf, shadeOf } from "./colours";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { colourOf, of, useShown } from "./lane";
import { Log } from "./log";
import { Dot, Labels, Term, Tiles, When } from "./parts";
import { address, amend, go, usePlace } from "./place";
import type { Page } from "./kinds";
import type { Detail, File, Metrics, Step, Tries } from "./shapes";
import { areFlat, flatLast } from "./noise";
import { Samples } from "./samples";
import { ColumnMenu, Table, type Column } from "./table";
import { hours, quotaInWords, shareInWords, useUsage } from "./shares";
import { Waits } from "./waits";
import { draft } from "./draft";
import { promiseTitle, promiseWord } from "./promises";
import { Causes } from "./causes";
import { Weights } from "./weights";
import { TERMS, count, firstMetrics, percent, removedInWords, reward, seconds, stageName, times, tryInWords } from "./words";

const TABS = [
  ["curves", "Curves"],
  ["time", "Where time went"],
  ["steps", "Steps"],
  ["log", "Log"],
  ["weights", "Weights"],
  ["file", "File"],
  ["samples", "Samples"],
] as const;

/** Metrics in the order a reader looks for them; what is not listed comes last. */
const SECTIONS: readonly (readonly [string, RegExp])[] = [
  ["Reward", /^reward/],
  ["Exploration", /^(entropy|kl|uniform_group)/],
  ["Update", /^(loss|grad|clip|learning_rate|num_clamped|logprob_gap|stale)/],
  ["Lengths", /^(response_len|turns|cut|tokens|trajectories)/],
  ["Programs and environments that failed or met a limit", /^outcomes/],
  ["Other", /./],
];

export function Pipeline({ lane, name }: { lane: string; name: string }) {
  const { query } = usePlace();
  const { lane: shown, pipelines } = useShown();
  const path = `/pipelines/${of(lane, name)}`;
  const detail = useData<Detail>(path, [`pipeline:${lane}`]);
  const tab = query.get("tab") ?? "curves";
  useKeys(TABS.map(([key, title], index) => ({ keys: String(index + 1), does: title, run: () => amend({ tab: key }) })));
  const acts = useActs(lane);
  if (!detail.value) return detail.error ? <NotShown name={name} error={detail.error} /> : null;
  const doesWait = shown.is_going_on && detail.value.status === "waiting";
  const isOver = ["finished", "failed", "cancelled", "refused"].includes(detail.value.status);
  const isRemoved = detail.value.removed?.some((each) => each.parts === "all");
  return (
    <>
      <div class="heading">
        <h1>
          <Dot name={name} pipelines={pipelines} />
          {name}
        </h1>
        <span class={`state ${detail.value.status}`}>{detail.value.doing || detail.value.status}</span>
        <span class="muted small">lane {lane}</span>
        <Labels labels={detail.value.labels} />
        <a class="small" href={address("/timeline", { q: name })}>
          on the timeline
        </a>
        <a class="small" href={address("/compare", { a: of(lane, name) })}>
          compare
        </a>
        <CloneLink path={path} name={name} />
        {shown.is_going_on && detail.value.status === "running" && <button onClick={() => acts.tell(name, "park")}>Park</button>}
        {doesWait && detail.value.reason.includes("parked") && <button onClick={() => acts.tell(name, "unpark")}>Unpark</button>}
        {shown.is_going_on && ["running", "waiting"].includes(detail.value.status) && <CancelButton name={name} tell={acts.tell} />}
        {shown.is_going_on && detail.value.status === "failed" && <RetryButton name={name} tell={acts.tell} />}
        {isOver && !isRemoved && <RemoveButton lane={lane} name={name} tell={acts.tell} />}
      </div>
      {detail.value.reason && !doesWait && <p class="banner">{detail.value.reason}</p>}
      <Trouble error={detail.error ?? acts.error} />
      {detail.value.note && <p class="note">{detail.value.note}</p>}
      {acts.said && <p class="banner soft">{acts.said}</p>}
      {detail.value.tries && <TriesOf tries={detail.value.tries} />}
      {detail.value.removed?.map((each) => <p class="small muted">{removedInWords(each)}</p>)}
      {doesWait && <Waits lane={lane} name={name} />}
      <Figures detail={detail.value} />
      {(detail.value.project || detail.value.user) && <Account lane={lane} detail={detail.value} />}
      <div class="tabs" role="navigation" aria-label="parts">
        {TABS.map(([key, title]) => (
          <a href={address(location.pathname, { tab: key })} {...(key === tab ? { "aria-current": "page" as const } : {})}>
            {title}
          </a>
        ))}
      </div>
      {tab === "curves" && <Curves path={path} lane={lane} colour={colourOf(pipelines, name)} />}
      {tab === "time" && <Causes path={path} lane={lane} name={name} />}
      {tab === "time" && <Times detail={detail.value} colour={colourOf(pipelines, name)} />}
      {tab === "steps" && <Steps path={path} lane={lane} />}
      {tab === "samples" && (detail.value.has_samples ? <Samples path={path} lane={lane} /> : <p class="empty">No trajectories yet. The first scored step brings them, unless the file says <code class="mono">samples: false</code>.</p>)}
      {tab === "log" && (detail.value.has_log ? <Log path={path} isOver={detail.value.status !== "running"} /> : <p class="empty">Nothing yet: what its workers print, and tracebacks of its own code, appear here.</p>)}
      {tab === "weights" && <Weights path={path} lane={lane} name={name} />}
      {tab === "file" && <FileOf path={path} lane={lane} />}
    </>
  );
}

/** Opens the queue with this pipeline's part of its file, under another name, to be edited and submitted. */
function CloneLink({ path, name }: { path: string; name: string }) {
  const { lane } = useShown();
  if (!lane.takes_submissions) return null;
  const clone = async () => {
    const file = await get<File>(`${path}/file?short=true`);
    draft(file.text.replace(/^( *-? *name: ).*$/m, `$1${name}-2`), `${name}-2.yaml`);
    go(address("/queue"));
  };
  return <button onClick={() => void clone()}>Clone</button>;
}

/** Which try it is in, and how those before ended. */
function TriesOf({ tries }: { tries: Tries }) {
  return (
    <details class="small">
      <summary>
        {tryInWords(tries)}, after: {tries.failures.at(-1)?.reason || "a failure"}
      </summary>
      <p class="muted">{TERMS.try}</p>
      <ol>
        {tries.failures.map((failure) => (
          <li>
            <When at_s={failure.at_s} />: {failure.reason || "a failure"} <span class="muted">({failure.cause.replaceAll("_", " ")})</span>
          </li>
        ))}
      </ol>
    </details>
  );
}

function FileOf({ path, lane }: { path: string; lane: string }) {
  const isWhole = usePlace().query.get("defaults") === "1";
  const file = useData<File>(`${path}/file${isWhole ? "" : "?short=true"}`, [`lane:${lane}`]);
  if (!file.value) return <Trouble error={file.error} />;
  return (
    <>
      <p class="muted small">
        its part of {file.value.source} · <label><input type="checkbox" checked={isWhole} onChange={() => amend({ defaults: isWhole ? null : "1" })} /> with every default value</label>
      </p>
      <pre class="text">{file.value.text}</pre>
    </>
  );
}

function NotShown({ name, error }: { name: string; error: Error }) {
  return (
    <>
      <div class="heading">
        <h1>{name}</h1>
        <a class="small" href={address("/pipelines")}>
          all pipelines
        </a>
      </div>
      <Trouble error={error} />
    </>
  );
}

function Figures({ detail }: { detail: Detail }) {
  return (
    <Tiles
      tiles={[
        ["step", <>{count(detail.step)}{detail.num_steps !== null && <small>of {count(detail.num_steps)}</small>}</>],
        ["reward", <>{reward(detail.reward_last)}<small>from {reward(detail.reward_first)}</small></>],
        ["a step takes", seconds(detail.step_s_mean)],
        ["slowdown", <><a href={address(location.pathname, { tab: "time" })} title="why">{times(detail.step_slowdown)}</a>{detail.slo_slowdown !== null && <small><Term word="accepts">accepts</Term> {times(detail.slo_slowdown)}</small>}</>, "slowdown"],
        ...boundTiles(detail),
        ["tokens", count(detail.tokens)],
        ["promise: shared or alone", <span title={promiseTitle(detail.promise)}>{promiseWord(detail.promise)}</span>, "promise"],
        ["weights", <span class="mono" title={detail.weights_sha256 ?? ""}>{detail.weights_sha256?.slice(0, 12) ?? "–"}</span>],
      ]}
    />
  );
}

/** The stated probability of its SLO, and the bounds on the mean of its coming steps beside the estimate. */
function boundTiles({ slo_probability, bound, estimate }: Detail): [string, ComponentChildren][] {
  if (bound === null) return [];
  const stated = slo_probability === 1 ? "alone" : slo_probability === null ? "–" : `${+(100 * slo_probability).toFixed(4)} %`;
  return [
    ["keeps its SLO", stated],
    ["mean rollout", <>≤ {seconds(bound.rollout_s)}{estimate && <small>estimate {seconds(estimate.rollout_s)}</small>}</>],
    ["mean training", <>≤ {seconds(bound.train_s)}{estimate && <small>estimate {seconds(estimate.train_s)}</small>}</>],
  ];
}

/** Who pays for it, and how that one stands. */
function Account({ lane, detail }: { lane: string; detail: Detail }) {
  const usage = useUsage(lane);
  const row = usage.value?.accounts.find((one) => one.project === detail.project && one.user === detail.user);
  const charged_h = Object.values(row?.device_hours ?? {}).reduce((sum, each) => sum + each, 0);
  const quota = row ? quotaInWords(row.quota) : "–";
  return (
    <p class="small">
      charged to <a href={address("/shares")}>{[detail.project, detail.user].filter(Boolean).join(" / ")}</a>
      {row && (
        <>
          : {hours(charged_h)} of devices for all of its pipelines; {shareInWords(row)}
          {quota !== "–" && `; quota ${quota}`}
        </>
      )}
    </p>
  );
}

function Curves({ path, lane, colour }: { path: string; lane: string; colour: number }) {
  const { query } = usePlace();
  const x = query.get("x") === "time_s" ? "time_s" : "step";
  const smoothing = Number(query.get("smooth") ?? "0") || 0;
  const metrics = useData<Metrics>(`${path}/metrics?x=${x}&points=800`, [`pipeline:${lane}`]);
  if (!metrics.value) return <Trouble error={metrics.error} />;
  const { names, series } = metrics.value;
  if (names.length === 0) return <p class="empty">No step has ended yet.</p>;
  const [first, others] = firstMetrics(names.filter((metric) => series[metric] && constantOf(series[metric]) === null));
  const isFlat = (metric: string) => series[metric] !== undefined && areFlat([series[metric]]);
  const chart = (metric: string) => {
    const curve = series[metric];
    return curve && <Chart key={metric} title={metric} curve={curve} colour={colour} unit={x === "step" ? "step" : "s"} smoothing={smoothing} cursor={path} />;
  };
  return (
    <>
      <div class="toolbar">
        <label>
          over{" "}
          <select value={x} onChange={(event) => amend({ x: event.currentTarget.value })}>
            <option value="step">steps</option>
            <option value="time_s">time</option>
          </select>
        </label>
        <label>
          averaged over{" "}
          <select value={smoothing} onChange={(event) => amend({ smooth: event.currentTarget.value })}>
            {[0, 5, 10, 25, 50].map((span) => (
              <option value={span}>{span === 0 ? "nothing" : `${span} steps`}</option>
            ))}
          </select>
        </label>
        {metrics.value.steps > 800 && <span class="muted small">each point is several of {count(metrics.value.steps)} steps: mean, with lowest and highest</span>}
      </div>
      <div class="charts">{flatLast(first, isFlat).map(chart)}</div>
      <More count={others.length}>
        {sectioned(others).map(([title, members]) => (
          <section key={title}>
            <h2>{title}</h2>
            <div class="charts">{flatLast(members, isFlat).map(chart)}</div>
          </section>
        ))}
      </More>
      <Constants values={names.map((metric) => [metric, series[metric] ? constantOf(series[metric]) : null])} />
    </>
  );
}

function sectioned(names: readonly string[]): [string, string[]][] {
  const rest = new Set(names);
  return SECTIONS.map(([title, pattern]): [string, string[]] => {
    const members = [...rest].filter((name) => pattern.test(name));
    for (const name of members) rest.delete(name);
    return [title, members];
  }).filter(([, members]) => members.length > 0);
}

function Times({ detail, colour }: { detail: Detail; colour: number }) {
  const stages = Object.entries(detail.seconds).sort(([, a], [, b]) => b - a);
  const waits = [...detail.waits].sort((a, b) => b.seconds - a.seconds);
  const largest_s = Math.max(1e-9, ...stages.map(([, spent_s]) => spent_s), ...waits.map((wait) => wait.seconds));
  const all_s = stages.reduce((sum, [, spent_s]) => sum + spent_s, 0);
  return (
    <>
      <h2>
        Computing <small>{seconds(all_s)} of its steps, by stage</small>
      </h2>
      <Bars rows={stages.map(([stage, spent_s]) => ({ name: stageName(stage), seconds: spent_s, share: spent_s / all_s, paint: `c${colour}`, shade: shadeOf(stage) }))} largest_s={largest_s} />
      <h2>
        Devices that waited for it <small>device-seconds in which they did nothing</small>
      </h2>
      {waits.length === 0 && <p class="empty">None did.</p>}
      <Bars rows={waits.map((wait) => ({ name: wait.label, seconds: wait.seconds, share: null, paint: `f-${paintOf(wait.cause)}`, shade: 1 }))} largest_s={largest_s} />
    </>
  );
}

function Bars({ rows, largest_s }: { rows: { name: string; seconds: number; share: number | null; paint: string; shade: number }[]; largest_s: number }) {
  return (
    <table class="bars">
      <tbody>
        {rows.map((row) => (
          <tr key={row.name}>
            <td class="name">{row.name}</td>
            <td class="number">{seconds(row.seconds)}</td>
            <td class="number muted">{row.share === null ? "" : percent(row.share)}</td>
            <td class="wide">
              <i class={`bar ${row.paint}`} style={{ width: `${(100 * row.seconds) / largest_s}%`, opacity: row.shade }} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** What a log says of a step's weights: a checksum of every step, SHA-256 of those with a checkpoint. */
function sums(step: Step): string {
  const found = [["checksum", step.weights_checksum], ["SHA-256", step.weights_sha256]];
  return found.flatMap(([name, sum]) => (sum ? [`${name} ${sum}`] : [])).join(", ");
}

const DELIVERY = "The weights that sampled the step: their version, their checksum against the trainer's, and the largest log-prob gap.";

function stepColumns(stages: readonly string[]): readonly Column<Step>[] {
  return [
    { id: "step", title: "step", kind: "number", value: (step) => step.step, cell: (step) => step.step },
    {
      id: "ended",
      title: "ended",
      kind: "number",
      value: (step) => step.end_s,
      cell: (step) => (
        <a href={address("/timeline", { t0: String(Math.max(0, step.end_s - step.seconds)), t1: String(step.end_s) })}>
          <When at_s={step.end_s} />
        </a>
      ),
    },
    { id: "took", title: "took", kind: "number", value: (step) => step.seconds, cell: (step) => seconds(step.seconds) },
    { id: "slowdown", title: "slowdown", kind: "number", about: TERMS.slowdown, value: (step) => step.slowdown, cell: (step) => times(step.slowdown) },
    { id: "reward", title: "reward", kind: "number", value: (step) => step.metrics.reward_mean, cell: (step) => reward(step.metrics.reward_mean) },
    ...stages.map((stage): Column<Step> => ({ id: stage, title: stageName(stage), kind: "number", value: (step) => step.stages[stage], cell: (step) => seconds(step.stages[stage]) })),
    { id: "weights", title: "weights", kind: "mono", tip: sums, cell: (step) => (step.weights_checksum ?? step.weights_sha256)?.slice(0, 12) },
    {
      id: "delivery",
      title: "delivery",
      kind: "number",
      about: DELIVERY,
      value: (step) => step.delivery?.text,
      paint: (step) => (step.delivery && !step.delivery.is_ok ? "bad" : ""),
      tip: (step) => step.delivery?.says,
      cell: (step) => step.delivery?.text ?? "-",
    },
  ];
}

/** The head over the columns of stages. */
function overStages(columns: readonly Column<Step>[], stages: readonly string[]) {
  const [first, many] = [columns.findIndex((column) => stages.includes(column.id)), columns.filter((column) => stages.includes(column.id)).length];
  if (many === 0) return null;
  return (
    <tr>
      {first > 0 && <td colSpan={first} />}
      <th class="number over" colSpan={many} scope="colgroup">
        time by stage
      </th>
      {columns.length > first + many && <td colSpan={columns.length - first - many} />}
    </tr>
  );
}

function Steps({ path, lane }: { path: string; lane: string }) {
  const first = useData<Page<Step>>(`${path}/steps?limit=1000`, [`pipeline:${lane}`]);
  const [further, setFurther] = useState<Step[]>([]);
  const [next, setNext] = useState<string | null | undefined>(undefined);
  if (!first.value) return <Trouble error={first.error} />;
  const cursor = next === undefined ? first.value.next : next;
  const steps = [...first.value.items, ...further];
  const stages = [...new Set(steps.flatMap((step) => Object.keys(step.stages)))];
  const more = async () => {
    const page = await get<Page<Step>>(`${path}/steps?limit=1000&cursor=${encodeURIComponent(cursor ?? "")}`);
    setFurther([...further, ...page.items]);
    setNext(page.next);
  };
  const columns = stepColumns(stages);
  return (
    <>
      <div class="toolbar">
        <ColumnMenu name="steps" columns={columns} />
        {cursor && <button onClick={more}>Later steps</button>}
      </div>
      <Table name="steps" label="steps" columns={columns} rows={steps.reverse()} idOf={(step) => String(step.step)} over={(shown) => overStages(shown, stages)} />
    </>
  );
}

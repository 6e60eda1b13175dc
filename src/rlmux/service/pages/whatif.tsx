// What if: a question about what is left of the lane's run, answered by simulation; the run itself is not touched.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { post, useData } from "./api";
import { Trouble } from "./frame";
import { of, useShown } from "./lane";
import { Dot } from "./parts";
import type { Answer, PipelineRange, Prediction, Score } from "./shapes";
import { Table, type Column } from "./table";
import { NONE, figure, percent, seconds, times } from "./words";

interface Question {
  add: string;
  like: string;
  remove: string;
  policy: string;
  set: string;
  file: string;
}
const NOTHING: Question = { add: "", like: "", remove: "", policy: "", set: "", file: "" };

type Show = (value: number | null | undefined) => string;
type FigureKey = "makespan_s" | "mean_step_slowdown" | "max_step_slowdown" | "mean_queue_s" | "slo_attainment" | "cost_usd" | "cost_usd_per_hour";
const FIGURES: readonly (readonly [string, FigureKey, Show])[] = [
  ["all ended in", "makespan_s", seconds],
  ["slowdown, mean", "mean_step_slowdown", times],
  ["slowdown, largest", "max_step_slowdown", times],
  ["queued, mean", "mean_queue_s", seconds],
  ["SLOs kept", "slo_attainment", percent],
  ["dollars", "cost_usd", figure],
  ["dollars an hour", "cost_usd_per_hour", figure],
];

export function WhatIf() {
  const { lane, pipelines } = useShown();
  const [question, setQuestion] = useState<Question>(NOTHING);
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const [isAsking, setAsking] = useState(false);
  const path = `/lanes/${of(lane.name)}/whatif`;
  const score = useData<Score>(path, [`lane:${lane.name}`]);
  const change = (part: Partial<Question>) => setQuestion({ ...question, ...part });
  const ask = async (event: Event) => {
    event.preventDefault();
    setAsking(true);
    setError(null);
    try {
      setAnswer(await post<Answer>(path, bodyOf(question)));
    } catch (caught) {
      setError(caught as Error);
    }
    setAsking(false);
  };
  return (
    <>
      <div class="heading">
        <h1>What if</h1>
        <span class="muted small">what is left of {lane.name}, simulated as it is and with a change; nothing of the run changes</span>
      </div>
      <form onSubmit={ask}>
        <div class="toolbar">
          <label>
            add <input class="narrow" type="number" min="1" aria-label="how many more" value={question.add} onInput={(event) => change({ add: event.currentTarget.value })} /> like{" "}
            <Choice label="like" value={question.like} among={pipelines} none="" choose={(like) => change({ like })} />
          </label>
          <label>
            without <Choice label="without" value={question.remove} among={pipelines} none="" choose={(remove) => change({ remove })} />
          </label>
          <label>
            policy <Choice label="policy" value={question.policy} among={score.value?.policies ?? []} none={lane.policy ?? ""} choose={(policy) => change({ policy })} />
          </label>
          <input class="cluster" aria-label="cluster" placeholder="cluster.pools.rollout.devices=2" value={question.set} onInput={(event) => change({ set: event.currentTarget.value })} />
          <button disabled={isAsking || !Object.keys(bodyOf(question)).length}>{isAsking ? "Simulating …" : "Ask"}</button>
        </div>
        <details>
          <summary class="small muted">add the pipelines of a file</summary>
          <textarea class="mono" rows={10} aria-label="file" placeholder="pipelines: [{name: more, task: sort, steps: 100}]" value={question.file} onInput={(event) => change({ file: event.currentTarget.value })} />
        </details>
      </form>
      <Trouble error={error ?? score.error} />
      {!answer && !isAsking && (
        <p class="empty">
          Add pipelines, take one out, change the policy or the cluster: the answer stands here in seconds, with and without the change. A finished run has nothing left to simulate.
        </p>
      )}
      {answer && <Answered answer={answer} pipelines={pipelines} />}
      {score.value && <p class="muted small">{scored(score.value)}</p>}
    </>
  );
}

function bodyOf(question: Question): Record<string, unknown> {
  const { add, like, remove, policy, set, file } = question;
  return {
    ...(add && { add: Number(add) }),
    ...(like && { like }),
    ...(remove && { remove: [remove] }),
    ...(policy && { policy }),
    ...(set.trim() && { set: set.trim().split(/\s+/) }),
    ...(file.trim() && { file }),
  };
}

function scored(score: Score): string {
  if (!score.num_scored) return "No earlier prediction of this lane has come true yet.";
  return `Earlier predictions of this lane, of pipelines that have ended since: median error ${percent(score.median_error)}, worst ${percent(score.worst_error)}; ${percent(score.within_range)} ended within their range (n = ${score.num_scored}).`;
}

function Choice({ label, value, among, none, choose }: { label: string; value: string; among: readonly string[]; none: string; choose: (value: string) => void }) {
  return (
    <select aria-label={label} value={value} onChange={(event) => choose(event.currentTarget.value)}>
      <option value="">{none}</option>
      {among.map((each) => (
        <option value={each}>{each}</option>
      ))}
    </select>
  );
}

function Answered({ answer, pipelines }: { answer: Answer; pipelines: readonly string[] }) {
  const { now, then, change } = answer;
  const names = [...new Set([...Object.keys(now.pipelines), ...Object.keys(then.pipelines)])];
  const longest_s = Math.max(1e-9, ...[now, then].flatMap((side) => Object.values(side.pipelines).map((one) => one.high.ends_s ?? 0)));
  const rows: Line[] = [
    ...FIGURES.filter(([, key]) => now.high[key] || then.high[key]).map(([title, key, show]) => ({
      id: key,
      title,
      now: range(now.low[key], now.high[key], show),
      then: range(then.low[key], then.high[key], show),
      change: range(change.low[key], change.high[key], signed(show)),
    })),
    ...names.map((name) => pipelineLine({ name, now: now.pipelines[name], then: then.pipelines[name], change: change.pipelines[name], longest_s, isHere: pipelines.includes(name) })),
  ];
  return (
    <>
      <h2>
        {answer.about} <small>now under {now.policy}, then under {then.policy}; a range is from quick to slow steps</small>
      </h2>
      <Table name="answer" label="now, and with the change" class="whatif" columns={COLUMNS} rows={rows} idOf={(row) => row.id} />
      {answer.notes.map((note) => (
        <p class="muted small">{note}</p>
      ))}
      <p class="small">
        The same question in a terminal: <code class="mono">{answer.command}</code>
      </p>
    </>
  );
}

/** A line of the answer: a figure of the whole run, or a pipeline's end. */
interface Line {
  id: string;
  title: ComponentChildren;
  tip?: string | undefined;
  now: string;
  then: string;
  change: string;
  bars?: ComponentChildren;
}

const COLUMNS: readonly Column<Line>[] = [
  { id: "what", title: "", tip: (row) => row.tip, cell: (row) => row.title },
  { id: "now", title: "now", kind: "number", cell: (row) => row.now },
  { id: "then", title: "then", kind: "number", cell: (row) => row.then },
  { id: "change", title: "change", kind: "number", cell: (row) => row.change },
  { id: "ends", title: "ends: now above, then below", kind: "wide", cell: (row) => row.bars },
];

interface Sides {
  name: string;
  now: Prediction | undefined;
  then: Prediction | undefined;
  change: PipelineRange | undefined;
  longest_s: number;
  isHere: boolean;
}

function pipelineLine({ name, now, then, change, longest_s, isHere }: Sides): Line {
  return {
    id: `pipeline ${name}`,
    tip: then?.refused ?? undefined,
    title: <PipelineTitle name={name} now={now} then={then} isHere={isHere} />,
    now: range(now?.low.ends_s, now?.high.ends_s, seconds),
    then: range(then?.low.ends_s, then?.high.ends_s, seconds),
    change: range(change?.low.ends_s, change?.high.ends_s, signed(seconds)),
    bars: [now, then].map((side, place) => {
      const [low_s, high_s] = [side?.low.ends_s ?? 0, side?.high.ends_s ?? 0];
      const [marginLeft, width] = [low_s, high_s - low_s].map((value_s) => `${(100 * value_s) / longest_s}%`);
      return <i class="bar f-busy" style={{ marginLeft, width, height: "6px", marginBottom: "2px", opacity: place === 0 ? 0.5 : 1 }} />;
    }),
  };
}

function PipelineTitle({ name, now, then, isHere }: Pick<Sides, "name" | "now" | "then" | "isHere">) {
  const { pipelines } = useShown();
  const what = then?.refused ? "refused" : !now ? "new" : !then ? "gone" : "";
  const isBad = what === "refused" || then?.keeps_slo === false;
  return (
    <>
      {isHere && <Dot name={name} pipelines={pipelines} />}
      <b>{name}</b> <span class={isBad ? "bad" : "muted"}>{[what, then?.keeps_slo === false && "misses its SLO"].filter(Boolean).join(", ")}</span>
    </>
  );
}

/** Both ends in words; one where they read the same. */
function range(low: number | null | undefined, high: number | null | undefined, show: Show): string {
  const [from, to] = [show(low), show(high)];
  return from === to ? from : `${from} to ${to}`;
}

function signed(show: Show): Show {
  return (value) => (value == null ? NONE : value < 0 ? `−${show(-value)}` : `+${show(value)}`);
}

// The queue: a file is checked and submitted here, and each pipeline that waits says its place, why, and what would start it.
//
//   paste, choose or drop a file ──dry run──▶ what is wrong, with its line ──submit──▶ the queue below
import { useEffect, useState } from "preact/hooks";
import { useData } from "./api";
import { CancelButton, useActs, type Acts } from "./acts";
import { Draft } from "./draft";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { of, useShown } from "./lane";
import { announce } from "./live";
import { PipelineName, Term } from "./parts";
import { address, go } from "./place";
import { clockTime } from "./clock";
import type { Page } from "./kinds";
import type { Queue, Submitted, Waiting } from "./shapes";
import { WouldStart, tokenInWords } from "./waits";
import { Table, type Column } from "./table";
import { count, seconds } from "./words";

const AGAIN_MS = 5000;

export function QueuePage() {
  const { lane } = useShown();
  return (
    <>
      <div class="heading">
        <h1>Queue</h1>
        <span class="muted small">what waits in lane {lane.name}, in the order in which it is offered room</span>
      </div>
      {lane.takes_submissions ? (
        <Draft lane={lane.name} />
      ) : (
        <p class="muted small">
          Files are submitted to this run with <code class="mono">rlmux submit FILE --to {lane.name}</code>; from here, to the lanes of a service.
        </p>
      )}
      {lane.is_going_on ? <Waits lane={lane.name} /> : <p class="empty">Nothing runs in lane {lane.name} now: nothing waits.</p>}
      {lane.takes_submissions && <Lately lane={lane.name} />}
    </>
  );
}

function Waits({ lane }: { lane: string }) {
  const queue = useData<Queue>(`/lanes/${of(lane)}/queue`, [`queue:${lane}`, `pipeline:${lane}`, `lane:${lane}`]);
  const acts = useActs(lane);
  const [chosen, setChosen] = useState<string | null>(null);
  const items = queue.value?.items ?? [];
  const one = items.find((each) => each.pipeline === chosen);
  const columns = waitingColumns({ lane, now_s: queue.value?.now_s ?? 0, chosen, choose: setChosen, acts });
  useEffect(() => {
    const timer = setInterval(() => announce(`queue:${lane}`), AGAIN_MS);
    return () => clearInterval(timer);
  }, [lane]);
  useKeys([
    { keys: "h", does: "hold the row, or release it", run: () => one && acts.tell(one.pipeline, one.token === "held" ? "release" : "hold") },
    { keys: "r", does: "rank of the row", run: () => document.querySelector<HTMLInputElement>("tr.chosen input")?.focus() },
    { keys: "x", does: "cancel the row", run: () => document.querySelector<HTMLButtonElement>("tr.chosen .acts button:last-child")?.click() },
  ]);
  return (
    <>
      <h2>
        Waiting <small>{queue.value && `${count(items.length)} now${queue.value.upcoming.length ? `, ${count(queue.value.upcoming.length)} to come` : ""}`}</small>
      </h2>
      <Trouble error={queue.error ?? acts.error} />
      {acts.said && (
        <p class="banner soft" role="status">
          {acts.said}
        </p>
      )}
      {queue.value && items.length === 0 && <p class="muted">Nothing waits.</p>}
      {items.length > 0 && (
        <Table
          label="waiting"
          class="queue"
          columns={columns}
          rows={items}
          idOf={(each) => each.pipeline}
          chosen={chosen}
          onChosen={setChosen}
          onRow={(each) => setChosen(each.pipeline)}
          open={(each) => go(address(`/pipelines/${of(lane, each.pipeline)}`))}
        />
      )}
      {(queue.value?.upcoming ?? []).map((each) => (
        <p class="muted small">
          {each.pipeline} comes in {seconds(Math.max(0, each.at_s - (queue.value?.now_s ?? 0)))} <CancelButton name={each.pipeline} tell={acts.tell} />
        </p>
      ))}
    </>
  );
}

interface Shown {
  lane: string;
  now_s: number;
  chosen: string | null;
  choose: (name: string) => void;
  acts: Acts;
}

function waitingColumns({ lane, now_s, chosen, choose, acts }: Shown): readonly Column<Waiting>[] {
  return [
    { id: "place", title: "place", kind: "number", value: (each) => each.position || null, cell: (each) => each.position || "–" },
    { id: "name", title: "name", value: (each) => each.pipeline, cell: (each) => <PipelineName name={each.pipeline} /> },
    {
      id: "because",
      title: "waits because",
      kind: "wide",
      value: (each) => tokenInWords(each.token ?? ""),
      cell: (each) => (
        <>
          <b>{each.token === "held" || each.token === "filler" ? <Term word={each.token}>{tokenInWords(each.token)}</Term> : tokenInWords(each.token ?? "")}</b>
          {each.reason && <div class="why">{each.reason}</div>}
          {each.pipeline === chosen ? (
            <WouldStart lane={lane} name={each.pipeline} />
          ) : (
            <button class="link small" onClick={() => choose(each.pipeline)}>
              what would start it now?
            </button>
          )}
        </>
      ),
    },
    { id: "waited", title: "for", kind: "number", value: (each) => each.waited_s, cell: (each) => seconds(each.waited_s) },
    { id: "starts", title: "starts", cell: (each) => startInWords(each, now_s) },
    { id: "acts", title: "", cell: (each) => <RowActs waiting={each} acts={acts} /> },
  ];
}

function startInWords({ pipeline, first, starts_s, token }: Waiting, now_s: number): string {
  if (first === pipeline) return starts_s == null ? "" : `in about ${seconds(Math.max(0, starts_s - now_s))}`;
  return first && token !== "held" ? `after ${first}` : "";
}

function RowActs({ waiting: { pipeline, token }, acts }: { waiting: Waiting; acts: Acts }) {
  const isHeld = token === "held";
  const rank = (event: Event) => {
    const field = event.currentTarget as HTMLInputElement;
    if (field.value !== "" && Number.isInteger(Number(field.value))) acts.tell(pipeline, "rank", { rank: Number(field.value) });
    field.value = "";
  };
  return (
    <span class="acts">
      <button onClick={() => acts.tell(pipeline, isHeld ? "release" : "hold")}>{isHeld ? "Release" : "Hold"}</button>
      <input type="number" step="1" placeholder="rank" aria-label={`rank of ${pipeline}`} title="lower ones of one user are offered room first" onChange={rank} />
      <CancelButton name={pipeline} tell={acts.tell} />
    </span>
  );
}

const SUBMITTED: readonly Column<Submitted>[] = [
  { id: "when", title: "when", kind: "nowrap", value: (one) => one.created, tip: (one) => one.created, cell: (one) => clockTime(new Date(one.created)) },
  { id: "file", title: "file", value: (one) => one.source, cell: (one) => one.source },
  { id: "pipelines", title: "pipelines", value: (one) => one.pipelines.length, cell: (one) => one.pipelines.map((each) => each.pipeline).join(", ") },
  {
    id: "state",
    title: "state",
    value: (one) => one.state,
    paint: (one) => `state ${one.state}`,
    cell: (one) => (
      <>
        {one.state}
        {one.reason && <div class="why">{one.reason}</div>}
      </>
    ),
  },
];

/** What was submitted to the lane, newest first. */
function Lately({ lane }: { lane: string }) {
  const all = useData<Page<Submitted>>("/submissions?limit=50", [`queue:${lane}`, `pipeline:${lane}`]);
  const items = (all.value?.items ?? []).filter((one) => one.lane === lane).slice(0, 12);
  if (items.length === 0) return <Trouble error={all.error} />;
  return (
    <>
      <h2>Submitted lately</h2>
      <Table name="lately" label="submitted lately" class="lately" columns={SUBMITTED} rows={items} idOf={(one) => one.id} />
    </>
  );
}

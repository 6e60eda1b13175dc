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
import { PipelineName } from "./parts";
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
  const at = items.findIndex((one) => one.pipeline === chosen);
  const one = items[at];
  const choose = (place: number) => setChosen(items[Math.max(0, Math.min(items.length - 1, place))]?.pipeline ?? null);
  useEffect(() => {
    const timer = setInterval(() => announce(`queue:${lane}`), AGAIN_MS);
    return () => clearInterval(timer);
  }, [lane]);
  useKeys([
    { keys: "j", does: "next row", run: () => choose(at + 1) },
    { keys: "k", does: "row before", run: () => choose(at < 0 ? 0 : at - 1) },
    { keys: "h", does: "hold the row, or release it", run: () => one && acts.tell(one.pipeline, one.token === "held" ? "release" : "hold") },
    { keys: "r", does: "rank of the row", run: () => document.querySelector<HTMLInputElement>("tr.chosen input")?.focus() },
    { keys: "x", does: "cancel the row", run: () => document.querySelector<HTMLButtonElement>("tr.chosen .acts button:last-child")?.click() },
    { keys: "Enter", does: "open the row", run: () => one && go(address(`/pipelines/${of(lane, one.pipeline)}`)) },
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
        <div class="scroll">
          <table class="queue">
            <thead>
              <tr>
                <th class="number">place</th>
                <th>name</th>
                <th>waits because</th>
                <th class="number">for</th>
                <th>starts</th>
                <th />
              </tr>
            </thead>
            <tbody>
              {items.map((each) => (
                <Row key={each.pipeline} lane={lane} waiting={each} isChosen={each.pipeline === chosen} choose={() => setChosen(each.pipeline)} now_s={queue.value?.now_s ?? 0} acts={acts} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {(queue.value?.upcoming ?? []).map((each) => (
        <p class="muted small">
          {each.pipeline} comes in {seconds(Math.max(0, each.at_s - (queue.value?.now_s ?? 0)))} <CancelButton name={each.pipeline} tell={acts.tell} />
        </p>
      ))}
    </>
  );
}

function Row({ lane, waiting, isChosen, choose, now_s, acts }: { lane: string; waiting: Waiting; isChosen: boolean; choose: () => void; now_s: number; acts: Acts }) {
  const name = waiting.pipeline;
  const isHeld = waiting.token === "held";
  const rank = (event: Event) => {
    const field = event.currentTarget as HTMLInputElement;
    if (field.value !== "" && Number.isInteger(Number(field.value))) acts.tell(name, "rank", { rank: Number(field.value) });
    field.value = "";
  };
  return (
    <tr class={isChosen ? "chosen" : ""} onClick={choose} {...(isChosen ? { "aria-selected": true } : {})}>
      <td class="number">{waiting.position || "–"}</td>
      <td>
        <PipelineName name={name} />
      </td>
      <td class="wide">
        <b>{tokenInWords(waiting.token ?? "")}</b>
        {waiting.reason && <div class="why">{waiting.reason}</div>}
        {isChosen ? (
          <WouldStart lane={lane} name={name} />
        ) : (
          <button class="link small" onClick={choose}>
            what would start it now?
          </button>
        )}
      </td>
      <td class="number">{seconds(waiting.waited_s)}</td>
      <td>{waiting.first === name && waiting.starts_s != null ? `in about ${seconds(Math.max(0, waiting.starts_s - now_s))}` : waiting.first && waiting.first !== name && !isHeld ? `after ${waiting.first}` : ""}</td>
      <td>
        <span class="acts">
          <button onClick={() => acts.tell(name, isHeld ? "release" : "hold")}>{isHeld ? "Release" : "Hold"}</button>
          <input type="number" step="1" placeholder="rank" aria-label={`rank of ${name}`} title="lower ones of one user are offered room first" onChange={rank} />
          <CancelButton name={name} tell={acts.tell} />
        </span>
      </td>
    </tr>
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

// Pipelines: list and queue in one. Sorting and filtering are the server's, in pages of 100; the state is in the URL.
import { useState } from "preact/hooks";
import { post, useData, useFurther } from "./api";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { MAX_COMPARED } from "./compare";
import { colourOf, of, useShown } from "./lane";
import { announce } from "./live";
import { RetryButton, useActs, type Acts } from "./acts";
import { Labels, PipelineName, Spark } from "./parts";
import { address, amend, go, usePlace } from "./place";
import { promiseTitle, promiseWord } from "./promises";
import type { Page } from "./kinds";
import type { Detail, LabelsSet, Pipeline } from "./shapes";
import { count, reward, seconds, times, tryInWords } from "./words";

const STATUSES = ["running", "waiting", "finished", "failed", "cancelled", "refused", "stopped"];
const COLUMNS: readonly (readonly [string, string, string])[] = [
  ["name", "name", ""],
  ["status", "state", ""],
  ["step", "step", "number"],
  ["reward_last", "reward", ""],
  ["step_slowdown", "slower than alone", "number"],
  ["", "step takes", "number"],
  ["", "tokens", "number"],
  ["", "weights, shared or alone", ""],
  ["", "left", "number"],
];

export function Pipelines() {
  const { lane, pipelines } = useShown();
  const { query } = usePlace();
  const [status, name, sort] = [query.get("status") ?? "", query.get("name") ?? "", query.get("sort") ?? ""];
  const filters = new URLSearchParams({ lane: lane.name, limit: "100", ...(status && { status }), ...(name && { name }), ...(sort && { sort }) });
  const first = useData<Page<Pipeline>>(`/pipelines?${filters}`, [`pipeline:${lane.name}`]);
  const { rows, more } = useFurther<Pipeline>("/pipelines", first.value, filters.toString());
  const acts = useActs(lane.name);
  const [chosen, setChosen] = useState(-1);
  const [marked, setMarked] = useState<readonly string[]>([]);
  const mark = (name: string) => setMarked(marked.includes(name) ? marked.filter((each) => each !== name) : [...marked, name]);
  const open = (row: Pipeline | undefined) => row && go(address(`/pipelines/${of(row.lane, row.name)}`));
  useKeys([
    { keys: "j", does: "next row", run: () => setChosen((at) => Math.min(rows.length - 1, at + 1)) },
    { keys: "k", does: "row before", run: () => setChosen((at) => Math.max(0, at - 1)) },
    { keys: "Enter", does: "open the row", run: () => open(rows[chosen]) },
  ]);
  return (
    <>
      <div class="heading">
        <h1>Pipelines</h1>
        <span class="muted small">
          {Object.entries(lane.pipelines).filter(([, many]) => many).map(([state, many]) => `${many} ${state}`).join(" · ")}
        </span>
      </div>
      <div class="toolbar">
        <input data-search type="search" placeholder="part of a name   /" aria-label="part of a name" value={name} onInput={(event) => amend({ name: event.currentTarget.value || null })} />
        <select aria-label="state" value={status} onChange={(event) => amend({ status: event.currentTarget.value || null })}>
          <option value="">every state</option>
          {STATUSES.map((each) => (
            <option value={each}>{each}</option>
          ))}
        </select>
        {marked.length > 1 && <a href={address("/compare", { of: marked.join(",") })}>compare {marked.length}</a>}
      </div>
      <Trouble error={first.error ?? acts.error} />
      {acts.said && <p class="banner soft">{acts.said}</p>}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              {COLUMNS.map(([key, title, kind]) => (
                <th class={kind} {...(key ? { "aria-sort": sortOf(key, sort) } : {})}>
                  {key ? <Sorter column={key} title={title} sort={sort} /> : title}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row, index) => (
              <ListRow key={row.name} row={row} isChosen={index === chosen} colour={colourOf(pipelines, row.name)} isMarked={marked.includes(of(row.lane, row.name))} isGoingOn={lane.is_going_on} tell={acts.tell} mark={marked.length < MAX_COMPARED || marked.includes(of(row.lane, row.name)) ? mark : null} />
            ))}
          </tbody>
        </table>
      </div>
      {first.value && rows.length === 0 && <p class="empty">No pipeline matches.</p>}
      {more && <button onClick={more}>More</button>}
    </>
  );
}

function sortOf(key: string, sort: string): "ascending" | "descending" | "none" {
  return sort === key ? "ascending" : sort === `-${key}` ? "descending" : "none";
}

function Sorter({ column, title, sort }: { column: string; title: string; sort: string }) {
  const order = sortOf(column, sort);
  const next = order === "none" ? column : order === "ascending" ? `-${column}` : null;
  return (
    <a class="sorter" role="button" tabIndex={0} onClick={() => amend({ sort: next })} onKeyDown={(event) => event.key === "Enter" && (event.stopPropagation(), amend({ sort: next }))}>
      {title}
      {order === "ascending" ? " ↑" : order === "descending" ? " ↓" : ""}
    </a>
  );
}

interface RowProps {
  row: Pipeline;
  isChosen: boolean;
  colour: number;
  /** Whether it is among those to compare. */
  isMarked: boolean;
  /** Null where no more can be compared. */
  mark: ((name: string) => void) | null;
  /** Whether a process carries its lane on. */
  isGoingOn: boolean;
  tell: Acts["tell"];
}

function ListRow({ row, isChosen, colour, isMarked, mark, isGoingOn, tell }: RowProps) {
  const [isEdited, setEdited] = useState(false);
  if (isEdited) return <LabelsForm row={row} close={() => setEdited(false)} />;
  return (
    <tr class={isChosen ? "chosen" : ""}>
      <td>
        <div class="line">
          <input type="checkbox" title="compare" aria-label={`compare ${row.name}`} checked={isMarked} disabled={mark === null} onChange={() => mark?.(of(row.lane, row.name))} />
          <PipelineName name={row.name} />
          <button class="link edit" title="labels and note" aria-label={`labels and note of ${row.name}`} onClick={() => setEdited(true)} />
        </div>
        <Labels labels={row.labels} />
      </td>
      <td class={`state ${row.status}`} title={row.reason}>
        {row.status}
        {row.doing && <span class="muted"> · {row.doing}</span>}
        {row.tries && <span class="muted"> · {tryInWords(row.tries)}</span>}
        {isGoingOn && row.status === "failed" && (
          <>
            {" "}
            <RetryButton name={row.name} tell={tell} />
          </>
        )}
        {row.reason && <div class="why">{row.reason}</div>}
      </td>
      <td class="number">
        {count(row.step)}
        {row.num_steps !== null && <span class="muted">/{count(row.num_steps)}</span>}
      </td>
      <td>
        <span class="reward">
          {reward(row.reward_first)} <Spark values={row.rewards} colour={colour} /> <b>{reward(row.reward_last)}</b>
        </span>
      </td>
      <td class={`number ${row.keeps_slo === false ? "bad" : ""}`}>
        {times(row.step_slowdown)}
        {row.slo_slowdown !== null && <span class="muted"> ≤ {times(row.slo_slowdown)}</span>}
      </td>
      <td class="number">{seconds(row.step_s_mean)}</td>
      <td class="number">{count(row.tokens)}</td>
      <td title={promiseTitle(row.promise)}>{promiseWord(row.promise)}</td>
      <td class="number">{row.status === "running" || row.status === "waiting" ? seconds(row.eta_s) : ""}</td>
    </tr>
  );
}

/** In place of a pipeline's row: its labels, with commas between them, and its note. */
function LabelsForm({ row, close }: { row: Pipeline; close: () => void }) {
  const path = `/pipelines/${of(row.lane, row.name)}`;
  const detail = useData<Detail>(path);
  const [error, setError] = useState<Error | null>(null);
  const save = async (event: SubmitEvent) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget as HTMLFormElement);
    const labels = String(form.get("labels")).split(",").map((label) => label.trim().replace(/\s+/g, " "));
    try {
      await post<LabelsSet>(`${path}/labels`, { labels: labels.filter((label) => label !== ""), note: form.get("note") });
      announce(`pipeline:${row.lane}`);
      close();
    } catch (caught) {
      setError(caught as Error);
    }
  };
  return (
    <tr>
      <td colSpan={COLUMNS.length}>
        <Trouble error={detail.error ?? error} />
        {detail.value && (
          <form class="labelling" onSubmit={(event) => void save(event)}>
            <b>{row.name}</b>
            <input name="labels" aria-label="labels" placeholder="labels, with commas between them" defaultValue={detail.value.labels?.join(", ")} ref={(input) => input?.focus()} />
            <textarea name="note" aria-label="note" placeholder="note" rows={3} maxLength={10_000} defaultValue={detail.value.note} />
            <span>
              <button type="submit">Save</button>{" "}
              <button type="button" onClick={close}>
                Close
              </button>
            </span>
          </form>
        )}
      </td>
    </tr>
  );
}

// Pipelines: list and queue in one. Sorting and filtering are the server's, in pages of 100; the state is in the URL.
import { useState } from "preact/hooks";
import { post, useData, useFurther } from "./api";
import { Trouble } from "./frame";
import { MAX_COMPARED } from "./compare";
import { GroupSums, NO_VALUE } from "./groups";
import { colourOf, of, useShown } from "./lane";
import { announce } from "./live";
import { RetryButton, useActs, type Acts } from "./acts";
import { Labels, PipelineName, Spark, StepOf, When } from "./parts";
import { address, amend, go, usePlace } from "./place";
import { promiseTitle, promiseWord } from "./promises";
import type { Detail, FilterValue, LabelsSet, Pipeline, Pipelines as Listed } from "./shapes";
import { ColumnMenu, Table, type Column } from "./table";
import { TERMS, count, reward, seconds, times, tryInWords } from "./words";

/** Filters with a menu of their values, as the server counts them: key, words before the values. */
const MENUS: readonly (readonly [string, string])[] = [
  ["status", "state"],
  ["project", "project"],
  ["user", "user"],
  ["label", "label"],
  ["task", "task"],
];
const DATES: readonly (readonly [string, string])[] = [
  ["since", "submitted from"],
  ["until", "to"],
];
const FILTERS = ["name", ...MENUS.map(([key]) => key), ...DATES.map(([key]) => key)];
const GROUPS = ["project", "user", "label", "task", "status", "day"];

export function Pipelines() {
  const { lane } = useShown();
  const { query } = usePlace();
  const by = query.get("group") ?? "";
  const filters = new URLSearchParams({ lane: lane.name });
  for (const key of FILTERS) if (query.get(key)) filters.set(key, query.get(key) ?? "");
  filters.sort();
  const list = new URLSearchParams(filters);
  list.set("sort", query.get("sort") || "active");
  if (query.get("removed")) list.set("removed", "true");
  list.set("limit", by ? "1" : "100");
  const first = useData<Listed>(`/pipelines?${list}&facets=true`, [`pipeline:${lane.name}`]);
  const acts = useActs(lane.name);
  const [marked, setMarked] = useState<readonly string[]>([]);
  const mark = (name: string) => setMarked(marked.includes(name) ? marked.filter((each) => each !== name) : [...marked, name]);
  const columns = useColumns({ marked, mark, tell: acts.tell });
  const isFiltered = FILTERS.some((key) => query.get(key));
  return (
    <>
      <div class="heading">
        <h1>Pipelines</h1>
        <span class="muted small">
          {Object.entries(lane.pipelines).filter(([, many]) => many).map(([state, many]) => `${many} ${state}`).join(" · ")}
        </span>
      </div>
      <div class="toolbar">
        <input data-search type="search" placeholder="part of a name   /" aria-label="part of a name" value={query.get("name") ?? ""} onInput={(event) => amend({ name: event.currentTarget.value || null })} />
        {MENUS.map(([key, words]) => (
          <FilterMenu key={key} name={key} words={words} chosen={query.get(key) ?? ""} values={first.value?.facets?.[key] ?? []} />
        ))}
        <span class="dates" title="dates in UTC">
          {DATES.map(([key, words]) => (
            <label key={key} class="small">
              {words} <input type="date" aria-label={`${words}, UTC`} value={(query.get(key) ?? "").slice(0, 10)} onChange={(event) => amend({ [key]: event.currentTarget.value || null })} />
            </label>
          ))}
        </span>
        <select aria-label="groups" value={by} onChange={(event) => amend({ group: event.currentTarget.value || null })}>
          <option value="">no groups</option>
          {GROUPS.map((each) => (
            <option value={each}>by {each === "status" ? "state" : each}</option>
          ))}
        </select>
        {!by && <ColumnMenu columns={columns} />}
        {!by && (first.value?.num_removed || query.get("removed")) && (
          <label class="small">
            <input type="checkbox" checked={!!query.get("removed")} onChange={() => amend({ removed: query.get("removed") ? null : "1" })} /> removed ones too
            {first.value?.num_removed ? ` (${count(first.value.num_removed)})` : ""}
          </label>
        )}
        {isFiltered && <ClearFilters />}
        {marked.length > 1 && <a href={address("/compare", { of: marked.join(",") })}>compare {marked.length}</a>}
        {isFiltered && first.value && <span class="muted small">{count(first.value.total)} of {count(Object.values(lane.pipelines).reduce((sum, many) => sum + many, 0))}</span>}
      </div>
      <Trouble error={first.error ?? acts.error} />
      {acts.said && <p class="banner soft">{acts.said}</p>}
      {by ? <GroupSums by={by} filters={filters.toString()} /> : <List first={first.value} filters={list.toString()} columns={columns} isFiltered={isFiltered} />}
    </>
  );
}

function ClearFilters() {
  return <button onClick={() => amend(Object.fromEntries(FILTERS.map((key) => [key, null])))}>Clear filters</button>;
}

/** One filter's values with their counts. Missing where rows have no other value than none. */
function FilterMenu({ name, words, chosen, values }: { name: string; words: string; chosen: string; values: readonly FilterValue[] }) {
  if (!chosen && values.every(({ value }) => value === NO_VALUE)) return null;
  const isKnown = chosen === "" || values.some(({ value }) => value === chosen);
  return (
    <select aria-label={words} value={chosen} onChange={(event) => amend({ [name]: event.currentTarget.value || null })}>
      <option value="">every {words}</option>
      {!isKnown && <option value={chosen}>{chosen.split(",").map(inWords).join(" or ")}</option>}
      {values.map(({ value, pipelines }) => (
        <option key={value} value={value}>
          {inWords(value)} ({count(pipelines)})
        </option>
      ))}
    </select>
  );
}

function inWords(value: string): string {
  return value === NO_VALUE ? "none" : value;
}

function List({ first, filters, columns, isFiltered }: { first: Listed | null; filters: string; columns: readonly Column<Pipeline>[]; isFiltered: boolean }) {
  const { rows, more } = useFurther<Pipeline>("/pipelines", first, filters);
  const [edited, setEdited] = useState<string | null>(null);
  const named = columns.map((column) => (column.id === "name" ? { ...column, cell: (row: Pipeline) => <>{column.cell(row)}<EditButton row={row} edit={setEdited} /><Labels labels={row.labels} /></> } : column));
  if (!first) return null;
  return (
    <>
      <Table
        label="pipelines"
        class="pipelines"
        columns={named}
        rows={rows}
        idOf={(row) => of(row.lane, row.name)}
        isServers
        open={(row) => go(address(`/pipelines/${of(row.lane, row.name)}`))}
        instead={(row) => (edited === row.name ? <LabelsForm row={row} close={() => setEdited(null)} /> : null)}
        empty={<NoMatch isFiltered={isFiltered} />}
      />
      {more && <button onClick={more}>More</button>}
    </>
  );
}

function EditButton({ row, edit }: { row: Pipeline; edit: (name: string) => void }) {
  return <button class="link edit" title="labels and note" aria-label={`labels and note of ${row.name}`} onClick={() => edit(row.name)} />;
}

/** What is filtered where nothing is left. */
function NoMatch({ isFiltered }: { isFiltered: boolean }) {
  const { query } = usePlace();
  if (!isFiltered) return <p class="empty">No pipeline yet.</p>;
  const words = [["name", "name with"], ...MENUS, ...DATES].flatMap(([key, word]) => (query.get(key ?? "") ? [`${word} ${inWords(query.get(key ?? "") ?? "")}`] : []));
  return (
    <p class="empty">
      No pipeline matches {words.join(", ")}. <ClearFilters />
    </p>
  );
}

interface Marks {
  /** Pipelines to compare, as `lane/name`. */
  marked: readonly string[];
  mark: (name: string) => void;
  tell: Acts["tell"];
}

function useColumns({ marked, mark, tell }: Marks): readonly Column<Pipeline>[] {
  const { lane, pipelines } = useShown();
  return [
    {
      id: "name",
      title: "name",
      kind: "nowrap",
      value: true,
      cell: (row) => {
        const id = of(row.lane, row.name);
        return (
          <>
            <input type="checkbox" title="compare" aria-label={`compare ${row.name}`} checked={marked.includes(id)} disabled={marked.length >= MAX_COMPARED && !marked.includes(id)} onChange={() => mark(id)} />
            <PipelineName name={row.name} />
          </>
        );
      },
    },
    { id: "status", title: "state", value: true, paint: (row) => `state ${row.status}`, tip: (row) => row.reason, cell: (row) => <State row={row} isGoingOn={lane.is_going_on} tell={tell} /> },
    {
      id: "step",
      title: "step",
      kind: "number",
      value: true,
      cell: (row) => <StepOf row={row} />,
    },
    {
      id: "reward_last",
      title: "reward",
      value: true,
      cell: (row) => (
        <span class="reward">
          {reward(row.reward_first)} <Spark values={row.rewards} colour={colourOf(pipelines, row.name)} /> <b>{reward(row.reward_last)}</b>
        </span>
      ),
    },
    {
      id: "step_slowdown",
      title: "slowdown",
      kind: "number",
      about: `${TERMS.slowdown} After ≤: ${TERMS.accepts.replace("The largest", "the largest")}`,
      value: true,
      paint: (row) => (row.keeps_slo === false ? "bad" : ""),
      cell: (row) => (
        <>
          {times(row.step_slowdown)}
          {row.slo_slowdown !== null && <span class="muted"> ≤ {times(row.slo_slowdown)}</span>}
        </>
      ),
    },
    { id: "eta_s", title: "left", kind: "number", value: true, cell: (row) => (row.status === "running" || row.status === "waiting" ? seconds(row.eta_s) : "") },
    { id: "project", title: "project", kind: "nowrap", value: true, cell: (row) => row.project },
    { id: "user", title: "user", kind: "nowrap", value: true, cell: (row) => row.user },
    { id: "submitted_s", title: "submitted", value: true, cell: (row) => <When at_s={row.submitted_s} isShort /> },
    { id: "tokens", title: "tokens", kind: "number", value: true, cell: (row) => count(row.tokens) },
    { id: "step_s_mean", title: "step takes", kind: "number", value: true, isExtra: true, cell: (row) => seconds(row.step_s_mean) },
    { id: "task", title: "task", kind: "nowrap", value: true, isExtra: true, cell: (row) => row.task },
    { id: "admitted_s", title: "admitted", value: true, isExtra: true, cell: (row) => <When at_s={row.admitted_s} isShort /> },
    { id: "ended_s", title: "ended", value: true, isExtra: true, cell: (row) => <When at_s={row.ended_s} isShort /> },
    { id: "promise", title: "promise", about: TERMS.promise, isExtra: true, tip: (row) => promiseTitle(row.promise), cell: (row) => promiseWord(row.promise) },
  ];
}

function State({ row, isGoingOn, tell }: { row: Pipeline; isGoingOn: boolean; tell: Acts["tell"] }) {
  return (
    <>
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
    </>
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
    <>
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
    </>
  );
}

// Shares: what each project and user is entitled to, has used of late and is charged for, and who is over.
//
//   share of a project   ▇▇▇▇▇▇▏▇▇       ▏ what would be fair         charges: a row each, and what they add up to
import { useEffect } from "preact/hooks";
import { useData } from "./api";
import { Trouble } from "./frame";
import { of, useShown } from "./lane";
import { announce } from "./live";
import { Tiles } from "./parts";
import type { Account, Usage } from "./shapes";
import { Table, type Column } from "./table";
import { count, figure, percent, seconds } from "./words";

const AGAIN_MS = 5000;

export function SharesPage() {
  const { lane } = useShown();
  const usage = useUsage(lane.name);
  const rows = usage.value?.accounts ?? [];
  return (
    <>
      <div class="heading">
        <h1>Shares</h1>
        <span class="muted small">
          who has used how much of lane {lane.name}, and is offered room first
          {usage.value?.at_s != null && !lane.is_going_on && `, as it was ${seconds(usage.value.at_s)} after its begin`}
        </span>
      </div>
      <Trouble error={usage.error} />
      {usage.value && rows.length === 0 && <Nothing isGoingOn={lane.is_going_on} />}
      {usage.value && rows.length > 0 && <Counted usage={usage.value} rows={rows} />}
    </>
  );
}

/** What the run says of its users, again each few seconds while it goes on. */
export function useUsage(lane: string) {
  const { lane: shown } = useShown();
  useEffect(() => {
    const timer = shown.is_going_on ? setInterval(() => announce(`usage:${lane}`), AGAIN_MS) : 0;
    return () => clearInterval(timer);
  }, [lane, shown.is_going_on]);
  return useData<Usage>(`/lanes/${of(lane)}/usage`, [`usage:${lane}`, `lane:${lane}`]);
}

function Nothing({ isGoingOn }: { isGoingOn: boolean }) {
  return (
    <p class="empty">
      Nothing is counted{isGoingOn ? "" : " in this run"}: no pipeline names a <code class="mono">user</code> or a <code class="mono">project</code>, and no shares are set. Pipelines are offered room as they
      came.
    </p>
  );
}

function Counted({ usage, rows }: { usage: Usage; rows: readonly Account[] }) {
  const projects = [...new Set(rows.map((row) => row.project))].map((name) => rows.filter((row) => row.project === name));
  const over = projects.filter(([first]) => first?.is_over_share).length;
  const hasBudget = rows.some((row) => row.quota.budget_usd != null);
  const largest = Math.max(1e-9, ...rows.map((row) => Math.max(row.share, row.fair_share)));
  return (
    <>
      <Tiles
        tiles={[
          ["projects", count(projects.length)],
          ["over their share", count(over)],
          ["running", count(sum(rows.map((row) => row.running)))],
          ["waiting", count(sum(rows.map((row) => row.waiting)))],
          ["charged, of one device", hours(sum(Object.values(usage.held_hours ?? {})))],
          ...(usage.half_life_hours != null ? [["forgotten by half in", seconds(usage.half_life_hours * 3600)] as const] : []),
        ]}
      />
      <h2>
        Projects and users <small>a share is the largest part of a pool that a project has held of late, by its weight; the mark is what would be fair; hours are of one device</small>
      </h2>
      <Table name="shares" label="projects and users" class="shares" columns={accountColumns(largest, hasBudget)} rows={projects.flatMap(membersOf)} idOf={(row) => `${row.project} ${row.user}`} />
      <Charged usage={usage} rows={rows} />
    </>
  );
}

/** A row of the page; the first of a project has what is the project's. */
type Member = Account & { isFirst: boolean };

function membersOf(rows: readonly Account[]): Member[] {
  return rows.map((row, place) => ({ ...row, isFirst: place === 0 }));
}

/** Rows stay under their project: they have no other order. */
function accountColumns(largest: number, hasBudget: boolean): readonly Column<Member>[] {
  const spent: Column<Member> = {
    id: "spent",
    title: "spent",
    kind: "number",
    paint: (row) => (isSpent(row) ? "bad" : ""),
    tip: (row) => (row.budget_begins_s == null ? undefined : `begins anew ${seconds(row.budget_begins_s)} after the run's begin`),
    cell: (row) => (row.quota.budget_usd == null ? "–" : usd(row.spent_usd ?? 0)),
  };
  return [
    { id: "project", title: "project", kind: "name", cell: (row) => (row.isFirst ? row.project || "–" : "") },
    { id: "user", title: "user", cell: (row) => row.user || "–" },
    { id: "weight", title: "weight", kind: "number", cell: (row) => (row.isFirst ? figure(row.weight) : "") },
    { id: "guarantee", title: "guarantee", kind: "number", cell: (row) => (row.isFirst ? (row.guarantee ? percent(row.guarantee) : "–") : "") },
    { id: "share", title: "share", cell: (row) => row.isFirst && <Share row={row} largest={largest} /> },
    { id: "used", title: "used of late", kind: "number", tip: (row) => byPool(row.used_hours), cell: (row) => hours(sum(Object.values(row.used_hours))) },
    { id: "today", title: "today", kind: "number", cell: (row) => (row.quota.device_hours_a_day === null ? "–" : hours(row.device_hours_today)) },
    ...(hasBudget ? [spent] : []),
    { id: "running", title: "running", kind: "number", cell: (row) => row.running },
    { id: "waiting", title: "waiting", kind: "number", cell: (row) => row.waiting },
    { id: "quota", title: "quota", kind: "limits", cell: (row) => quotaInWords(row.quota) },
  ];
}

function Share({ row, largest }: { row: Account; largest: number }) {
  const place = (part: number) => `${(100 * part) / largest}%`;
  return (
    <div class="share" title={shareInWords(row)}>
      <span class="track">
        <i class={row.is_over_share ? "over" : ""} style={{ width: place(row.share) }} />
        <b style={{ left: place(row.fair_share) }} />
      </span>
      <span class={row.is_over_share ? "bad" : ""}>
        {percent(row.share)} {row.is_over_share ? "over" : ""}
      </span>
    </div>
  );
}

/** Who pays for what: a row for each account and a column for each pool, with what it all adds up to. */
function Charged({ usage, rows }: { usage: Usage; rows: readonly Account[] }) {
  const held = usage.held_hours ?? {};
  const pools = [...new Set([...Object.keys(held), ...rows.flatMap((row) => Object.keys(row.device_hours))])].sort();
  const whole = sum(Object.values(held));
  const column = (pool: string) => sum(rows.map((row) => row.device_hours[pool] ?? 0));
  const all = sum(pools.map(column));
  const dollars = sum(rows.map((row) => row.usd ?? 0));
  const own = (row: Account) => sum(Object.values(row.device_hours));
  const columns: Column<Account>[] = [
    { id: "project", title: "project", kind: "name", value: (row) => row.project, cell: (row) => row.project || "–" },
    { id: "user", title: "user", value: (row) => row.user, cell: (row) => row.user || "–" },
    ...pools.map((pool): Column<Account> => ({ id: `pool-${pool}`, title: pool, kind: "number", value: (row) => row.device_hours[pool] ?? 0, cell: (row) => deviceSeconds(row.device_hours[pool] ?? 0) })),
    { id: "all", title: "together", kind: "number", value: own, cell: (row) => deviceSeconds(own(row)) },
    { id: "part", title: "part", kind: "number", value: own, cell: (row) => percent(all > 0 ? own(row) / all : null) },
    ...(dollars > 0 ? [{ id: "usd", title: "dollars", kind: "number", value: (row: Account) => row.usd, cell: (row: Account) => usd(row.usd ?? 0) }] : []),
  ];
  return (
    <>
      <h2>
        Who is charged <small>device-seconds of this part of the run: what computes, and of the bubbles a part each</small>
      </h2>
      <Table
        name="charged"
        label="who is charged"
        class="charged"
        columns={columns}
        rows={rows}
        idOf={(row) => `${row.project} ${row.user}`}
        foot={(shown) => (
          <>
            <Line shown={shown} name="all of them" values={{ ...Object.fromEntries(pools.map((pool) => [`pool-${pool}`, column(pool)])), all }} dollars={dollars} />
            <Line shown={shown} name="for which devices were held" values={{ ...Object.fromEntries(pools.map((pool) => [`pool-${pool}`, held[pool] ?? 0])), all: whole }} dollars={null} />
          </>
        )}
      />
      {Math.abs(all - whole) * 3600 >= 0.5 && <p class="banner">The charges do not add up to what was held: {deviceSeconds(all - whole)} device-seconds apart.</p>}
    </>
  );
}

/** A sum below: its name over the first two columns, then a value for each pool and for all. */
function Line({ shown, name, values, dollars }: { shown: readonly Column<Account>[]; name: string; values: Readonly<Record<string, number>>; dollars: number | null }) {
  const cell = (id: string) => (id === "all" ? <b>{deviceSeconds(values.all ?? 0)}</b> : id === "usd" ? dollars !== null && usd(dollars) : id in values && deviceSeconds(values[id] ?? 0));
  return (
    <tr>
      <th colSpan={2} scope="row">
        {name}
      </th>
      {shown.slice(2).map((column) => (
        <td key={column.id} class="number">
          {cell(column.id)}
        </td>
      ))}
    </tr>
  );
}

function isSpent(row: Account): boolean {
  return row.quota.budget_usd != null && (row.spent_usd ?? 0) >= row.quota.budget_usd;
}

function usd(value: number): string {
  return `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
}

/** The line of `rlmux why` on a project's share. */
export function shareInWords({ project, user, share, fair_share, is_over_share }: Pick<Account, "project" | "share" | "fair_share" | "is_over_share"> & { user?: string }): string {
  const who = project || user || "it";
  return `${who} ${is_over_share ? "is over its share" : "is within its share"}: ${percent(share)} of a pool of late, by its weight, where ${percent(fair_share)} is fair`;
}

export function quotaInWords(quota: Account["quota"]): string {
  const limits = [
    quota.max_running !== null && `${quota.max_running} at once`,
    quota.max_waiting != null && `${quota.max_waiting} waiting`,
    quota.max_devices !== null && `${quota.max_devices} devices`,
    quota.device_hours_a_day !== null && `${figure(quota.device_hours_a_day)} device-hours a day`,
    quota.max_usd_per_hour != null && `${usd(quota.max_usd_per_hour)} an hour`,
    quota.budget_usd != null && `${usd(quota.budget_usd)} for ${figure(quota.budget_days ?? 0)} days`,
  ];
  return limits.filter(Boolean).join(", ") || "–";
}

/** Hours of devices; below one, minutes and seconds. */
export function hours(value: number): string {
  return value !== 0 && Math.abs(value) < 1 ? seconds(value * 3600) : `${figure(value)} h`;
}

function deviceSeconds(value_h: number): string {
  return (value_h * 3600).toLocaleString("en-US", { maximumFractionDigits: 1, minimumFractionDigits: 1 }).replace(/^-0\.0$/, "0.0");
}

function byPool(by: Readonly<Record<string, number>>): string {
  return Object.entries(by).map(([pool, each]) => `${pool} ${hours(each)}`).join(", ");
}

function sum(values: readonly number[]): number {
  return values.reduce((all, each) => all + each, 0);
}

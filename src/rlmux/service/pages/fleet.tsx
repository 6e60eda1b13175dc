// Fleet, the first page: is the hardware working, which pipeline is in trouble, what does each device do now.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { post, useData } from "./api";
import { paintOf } from "./colours";
import { CostOverTime } from "./cost";
import { Trouble } from "./frame";
import { GroupSums } from "./groups";
import { colourOf, of, useShown } from "./lane";
import { announce } from "./live";
import { Dot, PipelineName, Spark, StepOf, Tiles, When } from "./parts";
import { address, amend, usePlace } from "./place";
import { KINDS, type Kind, type Page } from "./kinds";
import type { Alert, Charge, Device, Happening, Hardware, Lane, Pipeline } from "./shapes";
import { Table, type Column } from "./table";
import { TERMS, count, percent, reward, seconds, size, stageName, times } from "./words";

const MANY_DEVICES = 200;

export function Fleet() {
  const { lane } = useShown();
  const name = of(lane.name);
  const by = usePlace().query.get("by") ?? "";
  const devices = useData<Page<Device>>(`/lanes/${name}/devices`, [`devices:${lane.name}`, `lane:${lane.name}`]);
  const rows = useData<Page<Pipeline>>(`/pipelines?lane=${name}&sort=active&limit=100`, [`pipeline:${lane.name}`]);
  const failed = useData<Page<Pipeline>>(`/pipelines?lane=${name}&status=failed,refused&sort=-ended_s&limit=${MOST_LISTED}`, [`pipeline:${lane.name}`]);
  const alerts = useData<{ items: Alert[] }>(`/lanes/${name}/alerts`, [`lane:${lane.name}`]);
  return (
    <>
      <div class="heading">
        <h1>{lane.name}</h1>
        <span class="muted small">
          policy {lane.policy} · backend {lane.backend}
          {lane.created && ` · begun ${new Date(lane.created).toLocaleString()}`}
        </span>
      </div>
      <Figures lane={lane} />
      <Trouble error={devices.error ?? rows.error ?? failed.error} />
      <NeedsYou rows={rows.value?.items ?? []} failed={failed.value?.items ?? []} alerts={alerts.value?.items ?? []} />
      <h2>
        Where the time of all devices went <small>{seconds(lane.makespan_s)}{lane.state === "over" ? "" : " so far"}, {lane.num_devices} devices</small>
      </h2>
      <div class="toolbar">
        <select aria-label="where the time went, by" value={by} onChange={(event) => amend({ by: event.currentTarget.value || null })}>
          <option value="">by pipeline</option>
          {["project", "user", "label", "day"].map((each) => (
            <option value={each}>by {each}</option>
          ))}
        </select>
      </div>
      {by ? <GroupSums by={by} filters={`lane=${name}`} /> : <Charges charges={lane.charges} />}
      <CostOverTime />
      <h2>Devices</h2>
      {devices.value && <Devices devices={devices.value.items} isOver={!lane.is_going_on} />}
      <h2>Pipelines</h2>
      {rows.value && (rows.value.items.length ? <Brief rows={rows.value.items} /> : <NoPipeline lane={lane} />)}
      <Happenings lane={lane} />
    </>
  );
}

function NoPipeline({ lane }: { lane: Lane }) {
  if (!lane.takes_submissions) return <p class="empty">No pipeline has come to this run.</p>;
  return (
    <p class="empty">
      None yet. <code class="mono">rlmux submit FILE</code> brings the first one, or paste a file into the <a href={address("/queue")}>queue</a>.{" "}
      <code class="mono">rlmux init</code> writes a file to begin with.
    </p>
  );
}

function Figures({ lane }: { lane: Lane }) {
  const all_s = KINDS.reduce((sum, kind) => sum + lane.seconds[kind], 0);
  const share = (kind: Kind) => (all_s > 0 ? percent(lane.seconds[kind] / all_s) : percent(null));
  const states = Object.entries(lane.pipelines).filter(([, many]) => many > 0);
  return (
    <Tiles
      tiles={[
        ...KINDS.map((kind) => (kind === "bubble" ? ([kind, share(kind), "bubble"] as const) : ([kind, share(kind)] as const))),
        ["pipelines", states.length ? states.map(([state, many]) => <span key={state}>{many}<small>{state} </small></span>) : "0"],
        ["makespan", seconds(lane.makespan_s)],
        ["switches", count(lane.num_switches)],
        ...(lane.num_migrations ? [["migrations", `${count(lane.num_tail_migrations)} tails, ${count(lane.num_migrations - lane.num_tail_migrations)} shards`] as const] : []),
        ...(lane.slo_attainment !== null ? [["SLOs kept", percent(lane.slo_attainment), "accepts"] as const] : []),
        ["control overhead", percent(lane.control_overhead)],
        ...(lane.host_memory ? [["host memory", `${percent(lane.host_memory.used_bytes / lane.host_memory.bytes)} of ${size(lane.host_memory.bytes)}`] as const] : []),
      ]}
    />
  );
}

/** Say that an alert was seen: it stays until it is over. */
async function seen(lane: string, { rule, pipeline }: Alert): Promise<void> {
  await post(`/lanes/${of(lane)}/alerts`, { rule, pipeline }).catch(() => undefined);
  announce(`lane:${lane}`);
}

const MOST_FAILED = 8;
const MOST_LISTED = 50;

/** What failed since this browser's reader said that the rest was seen, as the lane's time; kept for each run. */
function useSeen(): [number, (until_s: number) => void] {
  const key = `rlmux seen ${useShown().lane.run_id}`;
  const [, redraw] = useState(0);
  return [
    Number(localStorage.getItem(key) ?? "-1"),
    (until_s) => {
      localStorage.setItem(key, String(until_s));
      redraw((at) => at + 1);
    },
  ];
}

function endOf(row: Pipeline): number {
  return row.ended_s ?? row.submitted_s ?? 0;
}

function NeedsYou({ rows, failed, alerts }: { rows: Pipeline[]; failed: Pipeline[]; alerts: Alert[] }) {
  const { lane } = useShown();
  const [seen_s, setSeen] = useSeen();
  const unseen = failed.filter((row) => endOf(row) > seen_s);
  const slow = rows.filter((row) => row.status === "running" && row.keeps_slo === false);
  const waiting = lane.pipelines.waiting ?? 0;
  // The list has the last 50 at most; the lane's own counts have all, those that were seen included.
  const numFailed = unseen.length < MOST_LISTED ? unseen.length : (lane.pipelines.failed ?? 0) + (lane.pipelines.refused ?? 0);
  if (unseen.length + slow.length + alerts.length + waiting === 0) return null;
  const rowsOf = [...alerts.map(needOfAlert), ...[...unseen.slice(0, MOST_FAILED), ...slow].map(needOf)];
  return (
    <>
      <h2>Needs you</h2>
      {rowsOf.length > 0 && <Table name="needs" label="needs you" class="needs" columns={NEEDS} rows={rowsOf} idOf={(row) => row.id} />}
      {(unseen.length > 0 || waiting > 0) && (
        <p class="toolbar small">
          {unseen.length > MOST_FAILED && <a href={address("/pipelines", { status: "failed", sort: "-ended_s" })}>{count(numFailed - MOST_FAILED)} failed before these</a>}
          {unseen.length > 0 && (
            <button class="link small" onClick={() => setSeen(Math.max(...unseen.map(endOf)))}>
              I have seen what failed
            </button>
          )}
          {waiting > 0 && <a href={address("/queue")}>{waiting === 1 ? "1 pipeline waits" : `${count(waiting)} pipelines wait`}</a>}
        </p>
      )}
    </>
  );
}

interface Need {
  id: string;
  pipeline: string | null;
  /** The class of its state: `failed`, `critical`. */
  state: string;
  words: string;
  why: ComponentChildren;
}

const NEEDS: readonly Column<Need>[] = [
  { id: "pipeline", title: "pipeline", value: (need) => need.pipeline, cell: (need) => (need.pipeline === null ? "the run" : <PipelineName name={need.pipeline} />) },
  { id: "state", title: "state", value: (need) => need.words, paint: (need) => `state ${need.state}`, cell: (need) => need.words },
  { id: "why", title: "why", kind: "reason", cell: (need) => need.why },
];

function needOf(row: Pipeline): Need {
  const isSlow = row.status === "running";
  const why = row.reason || (row.keeps_slo === false ? `${times(row.step_slowdown)} slower than alone, SLO ${times(row.slo_slowdown)}` : "");
  return { id: row.name, pipeline: row.name, state: row.status, words: isSlow ? "over its SLO" : row.status, why };
}

function needOfAlert(alert: Alert): Need {
  const rule = alert.rule.replaceAll("_", " ");
  return { id: `${alert.pipeline} ${alert.rule}`, pipeline: alert.pipeline, state: alert.level, words: `${alert.level}: ${rule}`, why: <AlertText alert={alert} /> };
}

function AlertText({ alert }: { alert: Alert }) {
  const { lane } = useShown();
  return (
    <>
      {alert.text}
      {alert.step !== null && alert.pipeline !== null && (
        <>
          {" "}
          <a href={address(`/pipelines/${of(lane.name, alert.pipeline)}`, { tab: "samples", step: String(alert.step) })}>since step {alert.step}</a>
        </>
      )}
      <span class="muted"> {alert.advice}</span>{" "}
      {alert.acknowledged ? (
        <span class="muted small" title={alert.acknowledged.at}>
          seen by {alert.acknowledged.by}
        </span>
      ) : (
        <button class="link small" onClick={() => void seen(lane.name, alert)} aria-label={`${alert.rule.replaceAll("_", " ")}: seen`}>
          seen
        </button>
      )}
    </>
  );
}

const OTHERS = "*";
const COLUMNS = ["computes", "switch", "waits for rollout", "for training", "for rewards", "for others"] as const;
const COLUMN_BY_CAUSE: Record<string, number> = { switch: 1, starting: 1, "waiting for rollout": 2, "waiting for training": 3, "waiting for rewards": 4 };

interface ChargedRow {
  name: string;
  isPipeline: boolean;
  paint: string;
  seconds: number[];
  all_s: number;
}

/** A row for each pipeline with its computing and what devices waited for of it; below, what belongs to no pipeline. */
function chargedRows(charges: Charge[], pipelines: readonly string[]): ChargedRow[] {
  const rows = new Map<string, ChargedRow>();
  for (const { kind, cause, pipeline, label, seconds } of charges) {
    const name = pipeline ?? label;
    const paint = pipeline === null ? `f-${paintOf(cause)}` : pipeline === OTHERS ? "f-busy" : `c${colourOf(pipelines, pipeline)}`;
    const row = rows.get(name) ?? { name, isPipeline: pipeline !== null, paint, seconds: COLUMNS.map(() => 0), all_s: 0 };
    const column = pipeline === null ? -1 : kind === "busy" ? 0 : (COLUMN_BY_CAUSE[cause] ?? 5);
    if (column >= 0) row.seconds[column] = (row.seconds[column] ?? 0) + seconds;
    row.all_s += seconds;
    rows.set(name, row);
  }
  const rank = (row: ChargedRow) => (!row.isPipeline ? 2 : row.name === OTHERS ? 1 : 0);
  return [...rows.values()].sort((a, b) => rank(a) - rank(b) || b.all_s - a.all_s);
}

function Charges({ charges }: { charges: Charge[] }) {
  const { lane, pipelines } = useShown();
  const whole_s = charges.reduce((sum, charge) => sum + charge.seconds, 0);
  if (whole_s === 0) return <p class="muted">No device has done anything yet. The first pipeline fills this table.</p>;
  const rows = chargedRows(charges, pipelines);
  const num_others = Object.values(lane.pipelines).reduce((sum, many) => sum + many, 0) - rows.filter((row) => row.isPipeline && row.name !== OTHERS).length;
  return (
    <>
      <div class="stack">
        {rows.map((row) => (
          <i class={row.paint} title={`${row.name === OTHERS ? "others" : row.name}: ${seconds(row.all_s)}`} style={{ width: `${(100 * row.all_s) / whole_s}%` }} />
        ))}
      </div>
      <Table name="charges" label="device-seconds by pipeline" class="charges" columns={chargeColumns(whole_s, num_others)} rows={rows} idOf={(row) => row.name} />
    </>
  );
}

function chargeColumns(whole_s: number, num_others: number): readonly Column<ChargedRow>[] {
  const paint = (row: ChargedRow, place: number) => (place === 0 ? row.paint : place === 1 ? "f-switch" : "f-wait");
  return [
    {
      id: "name",
      title: "of all device-seconds",
      value: (row) => row.name,
      cell: (row) =>
        row.isPipeline && row.name !== OTHERS ? (
          <PipelineName name={row.name} />
        ) : (
          <>
            <i class={`swatch ${row.paint}`} />
            {row.name === OTHERS ? `${count(num_others)} others` : row.name}
          </>
        ),
    },
    { id: "all", title: "in all", kind: "number", value: (row) => row.all_s, cell: (row) => percent(row.all_s / whole_s) },
    ...COLUMNS.map((title, place): Column<ChargedRow> => ({
      id: title.replaceAll(" ", "_"),
      title,
      kind: "number",
      value: (row) => row.seconds[place],
      cell: (row) => <Tinted part={(row.seconds[place] ?? 0) / whole_s} paint={paint(row, place)} />,
    })),
  ];
}

function Tinted({ part, paint }: { part: number; paint: string }) {
  if (part <= 0) return null;
  return (
    <span class="tinted">
      <i class={paint} style={{ opacity: String(0.12 + 0.6 * Math.min(1, 4 * part)) }} />
      {percent(part)}
    </span>
  );
}

function Devices({ devices, isOver }: { devices: Device[]; isOver: boolean }) {
  if (devices.length > MANY_DEVICES) return <Pools devices={devices} />;
  return (
    <div class="cells">
      {devices.map((device) => (
        <Cell key={device.id} device={device} isOver={isOver} />
      ))}
    </div>
  );
}

function Cell({ device, isOver }: { device: Device; isOver: boolean }) {
  const { pipelines } = useShown();
  const isBusy = device.kind === "busy";
  const whole_s = KINDS.reduce((sum, kind) => sum + device.seconds[kind], 0);
  const edge = isBusy && device.pipeline ? { borderLeftColor: `var(--p${colourOf(pipelines, device.pipeline)})` } : {};
  const doing = isBusy ? `${device.pipeline} ${device.step ?? ""} · ${stageName(device.stage)}` : device.label;
  return (
    <a class="cell" href={address("/timeline", { q: `device:${device.id}` })} style={isOver ? {} : edge}>
      <b>{device.id}</b> <span class="muted small">{percent(device.utilization)} busy in all</span>
      {!isOver && (
        <p>
          <span class="muted">now </span>
          {isBusy && device.pipeline ? <Dot name={device.pipeline} pipelines={pipelines} /> : null}
          {doing}
        </p>
      )}
      <Shares seconds={device.seconds} whole_s={whole_s} />
      {device.hardware && <Counters hardware={device.hardware} />}
    </a>
  );
}

/** What the machine's own counters say of a device, beside what rlmux counts. */
function Counters({ hardware }: { hardware: Hardware }) {
  const { use, memory_bytes, memory_used_bytes, power_w, temperature_c, uses } = hardware;
  const parts = [
    use !== null && `${percent(use)} in use`,
    memory_used_bytes !== null && memory_bytes !== null && `${size(memory_used_bytes)} of ${size(memory_bytes)}`,
    power_w !== null && `${power_w.toFixed(0)} W`,
    temperature_c !== null && `${temperature_c.toFixed(0)} °C`,
  ];
  return (
    <p class="muted small counters" title="the machine's own counters; the curve is use in the last quarter of an hour">
      {parts.filter(Boolean).join(" · ")} <Spark values={uses} colour={0} low={0} high={1} />
    </p>
  );
}

const PAINT_BY_KIND: Record<Kind, string> = { busy: "f-busy", switch: "f-switch", bubble: "f-wait", idle: "f-idle" };

function Shares({ seconds: by, whole_s }: { seconds: Record<Kind, number>; whole_s: number }) {
  if (whole_s <= 0) return null;
  return (
    <div class="stack" style={{ height: "6px", marginTop: "6px" }}>
      {KINDS.map((kind) => (
        <i class={PAINT_BY_KIND[kind]} title={`${kind} ${percent(by[kind] / whole_s)}`} style={{ width: `${(100 * by[kind]) / whole_s}%` }} />
      ))}
    </div>
  );
}

interface Pool {
  name: string;
  devices: number;
  busy: number;
  seconds: Record<Kind, number>;
}

const POOLS: readonly Column<Pool>[] = [
  { id: "pool", title: "pool", kind: "name", value: (pool) => pool.name, cell: (pool) => pool.name },
  { id: "devices", title: "devices", kind: "number", value: (pool) => pool.devices, cell: (pool) => count(pool.devices) },
  { id: "busy", title: "busy now", kind: "number", value: (pool) => pool.busy, cell: (pool) => count(pool.busy) },
  { id: "time", title: "its time", cell: (pool) => <Shares seconds={pool.seconds} whole_s={KINDS.reduce((sum, kind) => sum + pool.seconds[kind], 0)} /> },
];

/** Too many devices for a cell each: a row for each pool. */
function Pools({ devices }: { devices: Device[] }) {
  const pools = [...new Set(devices.map((device) => device.pool))].map((name): Pool => {
    const members = devices.filter((device) => device.pool === name);
    const seconds = Object.fromEntries(KINDS.map((kind) => [kind, members.reduce((sum, each) => sum + each.seconds[kind], 0)])) as Record<Kind, number>;
    return { name, devices: members.length, busy: members.filter((each) => each.kind === "busy").length, seconds };
  });
  return <Table name="pools" label="pools" columns={POOLS} rows={pools} idOf={(pool) => pool.name} />;
}

const BRIEF: readonly Column<Pipeline>[] = [
  { id: "name", title: "name", value: (row) => row.name, cell: (row) => <PipelineName name={row.name} /> },
  { id: "status", title: "state", value: (row) => row.doing || row.status, paint: (row) => `state ${row.status}`, cell: (row) => row.doing || row.status },
  { id: "step", title: "step", kind: "number", value: (row) => row.step, cell: (row) => <StepOf row={row} /> },
  { id: "reward", title: "reward", kind: "number", value: (row) => row.reward_last, cell: (row) => reward(row.reward_last) },
  { id: "slowdown", title: "slowdown", about: TERMS.slowdown, kind: "number", value: (row) => row.step_slowdown, cell: (row) => times(row.step_slowdown) },
];

function Brief({ rows }: { rows: Pipeline[] }) {
  const { lane } = useShown();
  const shown = rows.slice(0, Math.max(12, Math.min(24, rows.filter((row) => row.status === "running").length)));
  const num_all = Object.values(lane.pipelines).reduce((sum, many) => sum + many, 0);
  return (
    <>
      <Table name="brief" label="pipelines" columns={BRIEF} rows={shown} idOf={(row) => row.name} />
      {num_all > shown.length && (
        <p class="small">
          <a href={address("/pipelines", { sort: "active" })}>all {count(num_all)}</a>
        </p>
      )}
    </>
  );
}

const HAPPENED: readonly Column<Happening>[] = [
  { id: "at", title: "at", value: (event) => event.time_s, cell: (event) => <When at_s={event.time_s} /> },
  { id: "pipeline", title: "pipeline", kind: "name", value: (event) => event.pipeline, cell: (event) => event.pipeline },
  { id: "event", title: "event", value: (event) => event.what, cell: (event) => event.what },
  { id: "text", title: "why", cell: (event) => event.text },
  { id: "device", title: "device", kind: "muted", value: (event) => event.device, cell: (event) => event.device },
];

function Happenings({ lane }: { lane: Lane }) {
  const events = useData<Page<Happening>>(`/lanes/${of(lane.name)}/events?limit=12&migrations=false`, [`lane:${lane.name}`]);
  if (!events.value?.items.length) return null;
  return (
    <>
      <h2>
        What happened <small>newest first{lane.num_migrations ? `, without ${count(lane.num_migrations)} migrations` : ""}</small>
      </h2>
      <Table name="events" label="what happened" columns={HAPPENED} rows={events.value.items} idOf={(event, index) => `${event.time_s} ${index}`} />
    </>
  );
}

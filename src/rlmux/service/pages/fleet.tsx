// Fleet, the first page: is the hardware working, which pipeline is in trouble, what does each device do now.
import { post, useData } from "./api";
import { paintOf } from "./colours";
import { CostOverTime } from "./cost";
import { Trouble } from "./frame";
import { colourOf, of, useShown } from "./lane";
import { announce } from "./live";
import { Dot, PipelineName, Stack, Tiles, type Part } from "./parts";
import { address } from "./place";
import { KINDS, type Kind, type Page } from "./kinds";
import type { Alert, Charge, Device, Happening, Lane, Pipeline } from "./shapes";
import { count, moment, percent, reward, seconds, stageName, times } from "./words";

const MANY_DEVICES = 200;

export function Fleet() {
  const { lane } = useShown();
  const name = of(lane.name);
  const devices = useData<Page<Device>>(`/lanes/${name}/devices`, [`devices:${lane.name}`, `lane:${lane.name}`]);
  const rows = useData<Page<Pipeline>>(`/pipelines?lane=${name}&limit=200`, [`pipeline:${lane.name}`]);
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
      <Trouble error={devices.error ?? rows.error} />
      <NeedsYou rows={rows.value?.items ?? []} alerts={alerts.value?.items ?? []} />
      <h2>
        Where the time of all devices went <small>{seconds(lane.makespan_s)}{lane.state === "over" ? "" : " so far"}, {lane.num_devices} devices</small>
      </h2>
      <Charges charges={lane.charges} />
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
        ...KINDS.map((kind) => [kind, share(kind)] as const),
        ["pipelines", states.length ? states.map(([state, many]) => <span key={state}>{many}<small>{state} </small></span>) : "0"],
        ["makespan", seconds(lane.makespan_s)],
        ["switches", count(lane.num_switches)],
        ...(lane.num_migrations ? [["migrations", count(lane.num_migrations)] as const] : []),
        ...(lane.slo_attainment !== null ? [["SLOs kept", percent(lane.slo_attainment)] as const] : []),
        ["control overhead", percent(lane.control_overhead)],
      ]}
    />
  );
}

/** Say that an alert was seen: it stays until it is over. */
async function seen(lane: string, { rule, pipeline }: Alert): Promise<void> {
  await post(`/lanes/${of(lane)}/alerts`, { rule, pipeline }).catch(() => undefined);
  announce(`lane:${lane}`);
}

function NeedsYou({ rows, alerts }: { rows: Pipeline[]; alerts: Alert[] }) {
  const { lane } = useShown();
  const all = rows.filter((row) => ["failed", "refused", "waiting"].includes(row.status) || row.keeps_slo === false);
  if (all.length === 0 && alerts.length === 0) return null;
  return (
    <>
      <h2>Needs you</h2>
      <table>
        <tbody>
          {alerts.map((alert) => (
            <tr key={`${alert.pipeline} ${alert.rule}`}>
              <td>{alert.pipeline === null ? "the run" : <PipelineName name={alert.pipeline} />}</td>
              <td class={`state ${alert.level}`}>
                {alert.level}: {alert.rule.replaceAll("_", " ")}
              </td>
              <td>
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
              </td>
            </tr>
          ))}
          {all.map((row) => (
            <tr key={row.name}>
              <td>
                <PipelineName name={row.name} />
              </td>
              <td class={`state ${row.status}`}>{row.keeps_slo === false && row.status === "running" ? "over its SLO" : row.status}</td>
              <td>{row.reason || (row.keeps_slo === false ? `${times(row.step_slowdown)} of alone, SLO ${times(row.slo_slowdown)}` : "")}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Charges({ charges }: { charges: Charge[] }) {
  const { pipelines } = useShown();
  const parts = new Map<string, Part>();
  for (const { kind, cause, pipeline, label, seconds } of charges) {
    const isWork = kind === "busy" && pipeline !== null;
    const name = isWork ? `${pipeline} ${label}` : label;
    const paint = isWork ? `c${colourOf(pipelines, pipeline)}` : `f-${paintOf(cause)}`;
    parts.set(name, { paint, name, seconds: seconds + (parts.get(name)?.seconds ?? 0) });
  }
  const rank = ({ paint }: Part) => Number(paint.startsWith("f-"));
  const whole_s = charges.reduce((sum, charge) => sum + charge.seconds, 0);
  if (whole_s === 0) return <p class="muted">No device has done anything yet.</p>;
  return <Stack parts={[...parts.values()].sort((a, b) => rank(a) - rank(b) || b.seconds - a.seconds)} whole_s={whole_s} />;
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
      <b>{device.id}</b> <span class="muted small">{percent(device.utilization)} busy</span>
      {!isOver && (
        <p>
          {isBusy && device.pipeline ? <Dot name={device.pipeline} pipelines={pipelines} /> : null}
          {doing}
        </p>
      )}
      <Shares seconds={device.seconds} whole_s={whole_s} />
    </a>
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

/** Too many devices for a cell each: a row for each pool. */
function Pools({ devices }: { devices: Device[] }) {
  const pools = [...new Set(devices.map((device) => device.pool))];
  return (
    <table>
      <tbody>
        {pools.map((pool) => {
          const members = devices.filter((device) => device.pool === pool);
          const sums = Object.fromEntries(KINDS.map((kind) => [kind, members.reduce((sum, each) => sum + each.seconds[kind], 0)])) as Record<Kind, number>;
          return (
            <tr key={pool}>
              <td class="name">{pool}</td>
              <td class="muted">{members.length} devices, {members.filter((each) => each.kind === "busy").length} busy now</td>
              <td>
                <Shares seconds={sums} whole_s={KINDS.reduce((sum, kind) => sum + sums[kind], 0)} />
              </td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

function Brief({ rows }: { rows: Pipeline[] }) {
  const active = rows.filter((row) => row.status === "running");
  const shown = (active.length ? active : rows).slice(0, 12);
  return (
    <table>
      <tbody>
        {shown.map((row) => (
          <tr key={row.name}>
            <td>
              <PipelineName name={row.name} />
            </td>
            <td class={`state ${row.status}`}>{row.doing || row.status}</td>
            <td class="number">step {row.step}{row.num_steps ? ` of ${row.num_steps}` : ""}</td>
            <td class="number">reward {reward(row.reward_last)}</td>
            <td class="number">{row.step_slowdown === null ? "" : `${times(row.step_slowdown)} of alone`}</td>
          </tr>
        ))}
        {rows.length > shown.length && (
          <tr>
            <td colSpan={5}>
              <a href={address("/pipelines")}>all {rows.length}</a>
            </td>
          </tr>
        )}
      </tbody>
    </table>
  );
}

function Happenings({ lane }: { lane: Lane }) {
  const events = useData<Page<Happening>>(`/lanes/${of(lane.name)}/events?limit=12`, [`lane:${lane.name}`]);
  if (!events.value?.items.length) return null;
  return (
    <>
      <h2>
        What happened <small>newest first</small>
      </h2>
      <table>
        <tbody>
          {events.value.items.map((event) => (
            <tr>
              <td class="number">{moment(event.time_s, 100)}</td>
              <td class="name">{event.pipeline}</td>
              <td>{event.what}</td>
              <td>{event.text}</td>
              <td class="muted">{event.device}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

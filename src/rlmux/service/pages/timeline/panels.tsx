// What stands below the board: the reading under the pointer, where a measured window's time went, what happened at a click.
import { useData } from "../api";
import { timeOfDay } from "../clock";
import { paintOf } from "../colours";
import { Trouble } from "../frame";
import { colourOf, of, useShown } from "../lane";
import { PipelineName } from "../parts";
import type { Gap, Measured, Order, Other, Pinned } from "../shapes";
import { Table, type Column } from "../table";
import { TERMS, count, moment, percent, seconds, stageName } from "../words";
import type { Span } from "./feed";
import type { Hit } from "./hit";

export function Reading({ hit, at_s }: { hit: Hit | null; at_s: number | null }) {
  const { clock } = useShown().lane;
  const when = (value_s: number) => [moment(value_s, 1), timeOfDay(clock, value_s)].filter(Boolean).join(" · ");
  return (
    <div class="reading" role="status">
      {hit ? (
        <>
          {hit.device} · <b>{hit.title}</b>
          {hit.facts.map(([name, value]) => ` · ${name} ${value}`).join("")} · {seconds(hit.seconds)} from {when(hit.start_s)}
        </>
      ) : (
        at_s !== null && when(at_s)
      )}
    </div>
  );
}

type Sum = Measured["items"][number];

export function MeasureTable({ lane, span }: { lane: string; span: Span }) {
  const measured = useData<Measured>(`/timeline/${of(lane)}/measure?t0=${span.t0}&t1=${span.t1}`);
  const { pipelines, lane: { clock } } = useShown();
  if (!measured.value) return <Trouble error={measured.error} />;
  const { items, device_s, t0, t1 } = measured.value;
  const paint = ({ kind, pipeline, cause }: Sum) => (kind === "busy" && pipeline !== null ? `c${colourOf(pipelines, pipeline)}` : `f-${paintOf(cause)}`);
  const columns: Column<Sum>[] = [
    { id: "kind", title: "kind", about: `bubble: ${TERMS.bubble}`, kind: "muted", value: (item) => item.kind, cell: (item) => item.kind },
    {
      id: "name",
      title: "name",
      value: named,
      cell: (item) => (
        <>
          <i class={`swatch ${paint(item)}`} />
          {named(item)}
        </>
      ),
    },
    { id: "seconds", title: "device time", kind: "number", value: (item) => item.seconds, cell: (item) => seconds(item.seconds) },
    { id: "share", title: "part", kind: "number", value: (item) => item.share, cell: (item) => percent(item.share) },
  ];
  const lines = items.map((item) => [item.kind, item.pipeline ?? "", item.label, item.seconds.toFixed(3), ((item.share ?? 0) * 100).toFixed(2)].join("\t"));
  const copy = () => void navigator.clipboard.writeText(["kind\tpipeline\tname\tdevice seconds\tpercent", ...lines].join("\n"));
  return (
    <section class="measure">
      <b>{seconds(t1 - t0)} selected</b> <span class="muted">{moment(t0, 1)} to {moment(t1, 1)}{clock.length > 0 && ` (${timeOfDay(clock, t0)} to ${timeOfDay(clock, t1)})`}, {seconds(device_s)} of devices</span>{" "}
      <button onClick={copy}>Copy</button>
      <Table name="measured" label="where the time of the selection went" columns={columns} rows={items} idOf={(item, index) => `${item.kind} ${item.label} ${index}`} />
    </section>
  );
}

/** A row's name; one that a pipeline has names it. */
function named({ kind, pipeline, label }: Sum): string {
  if (pipeline === null || label.split(" ").includes(pipeline)) return label;
  return kind === "busy" ? `${pipeline} ${label}` : `${label} of ${pipeline}`;
}

/** What held a device at a moment, what fills a gap, what each pipeline that has the device did then, and who else could have run. */
export function GapTable({ gap }: { gap: Gap }) {
  const { interval, others, num_others } = gap;
  const filling = fillOf(gap);
  return (
    <section class="measure">
      <b>{interval.device}: {interval.label}</b>{" "}
      <span class="muted">
        {seconds(interval.end_s - interval.start_s)} from {moment(interval.start_s, 1)}
        {interval.is_open && ", not over"}
      </span>
      {filling && <p class="fill">{filling}.</p>}
      <table>
        <tbody>
          <OrderRow title="before" order={gap.before} />
          <OrderRow title="after" order={gap.after} />
          {gap.pinned.map((each) => (
            <CandidateRow key={each.pipeline} each={each} why={interval.kind === "busy" ? doingOf(each) : whyNot(each, interval.device)} />
          ))}
          {others.map((each) => (
            <CandidateRow key={each.pipeline} each={each} why={whyOther(each, interval.device)} />
          ))}
        </tbody>
      </table>
      {num_others > others.length && <p class="muted small">and {count(num_others - others.length)} more that were queued or pinned on other nodes of the pool</p>}
    </section>
  );
}

function CandidateRow({ each, why }: { each: Pinned; why: string }) {
  return (
    <tr>
      <td>
        <PipelineName name={each.pipeline} />
      </td>
      <td>{why}</td>
      <td class="muted">{each.next && `next: ${said(each.next)} at ${clock(each.next.start_s)}`}</td>
    </tr>
  );
}

/** What each cause of a gap waits for; the pipelines' orders are told of the others. */
const DEMANDS: Record<string, (name: string) => string> = {
  "tool wait": (name) => `the environment of ${name} has to answer`,
  switch: (name) => `the state of ${name} has to be on the device`,
  starting: (name) => `the worker of ${name} has to be ready`,
  "held back": (name) => `the policy has to let ${name} begin`,
  "lost work": (name) => `${name} has to do the lost work again`,
  "worker stood still": (name) => `the worker of ${name} has to go on`,
  control: () => "the controller has to give the next order",
  client: (name) => `the client of ${name} has to request work`,
  down: () => "the process of the run has to be there again",
};

/** What has to happen for a device to work again; null: it works. */
function fillOf(gap: Gap): string | null {
  const { cause, kind, label, pipeline, is_open } = gap.interval;
  if (kind === "busy") return null;
  if (cause === "nothing admitted") return `${label}: ${admissionOf(gap)}`;
  const demand = DEMANDS[cause]?.(pipeline ?? gap.after?.pipeline ?? "a pipeline") ?? orderOf(gap);
  return `${label}: ${demand}${DEMANDS[cause] && !is_open ? `; the gap ends at ${clock(gap.ends_s)}` : ""}`;
}

function admissionOf({ others }: Gap): string {
  const queued = others.filter((each) => !each.nodes.length).map((each) => each.pipeline);
  return queued.length ? "one of the queued pipelines has to be admitted" : "a pipeline has to be submitted";
}

/** When the next order of this device begins, by the order of the awaited pipeline that has to end before it. */
function orderOf({ interval, after, pinned }: Gap): string {
  if (!after) return interval.is_open ? "the next order of this device is not known yet" : "no order of this device follows";
  const awaited = pinned.find((each) => each.pipeline === interval.pipeline);
  const first = awaited?.next?.order === after.order ? null : (awaited?.next ?? null);
  const last = awaited?.doing.reduce<Order | null>((a, b) => (a && (a.end_s ?? Infinity) > (b.end_s ?? Infinity) ? a : b), null) ?? first;
  const next = `${after.pipeline === interval.pipeline ? "its" : `${after.pipeline}'s`} next ${workOf(after)} begins`;
  if (!last) return `${next} at ${clock(after.start_s)}`;
  const it = `${last.pipeline}'s ${workOf(last)}${last.step ? ` of step ${last.step}` : ""}`;
  if (last.end_s === null) return `${next} when ${it} ends`;
  const isAtOnce = after.start_s - last.end_s < Math.max(0.05, 0.02 * (last.end_s - last.start_s));
  return isAtOnce ? `${next} when ${it} ends at ${clock(last.end_s)}` : `${next} at ${clock(after.start_s)}, after ${it}, which ends at ${clock(last.end_s)}`;
}

function whyOther(each: Other, device: string): string {
  if (each.nodes.length) return `pinned on ${each.nodes.join(", ")}: ${whyNot(each, device)}`;
  return `queued since ${clock(each.submitted_s ?? 0)}, ${each.admitted_s === null ? "not admitted" : `admitted at ${clock(each.admitted_s)}`}`;
}

/** Why a pipeline with a node of the device's pool does not run on the device: it computes in the pool, or in another first. */
function whyNot(each: Pinned, device: string): string {
  const pool = (id: string) => id.replace(/-\d+\.\d+$/, "");
  const here = each.doing.filter((order) => order.devices.some((id) => pool(id) === pool(device)));
  if (here.length) return here.some((order) => order.devices.includes(device)) ? `has the device: ${here.map(said).join(", ")}` : `computing elsewhere: ${here.map(said).join(", ")}`;
  if (each.doing.length) return `waiting for its own ${each.doing.map(said).join(", ")}`;
  if (!each.next) return "nothing of it follows";
  if (each.next.devices.some((id) => pool(id) === pool(device))) return "nothing of it ran then";
  return `waiting for its own ${workOf(each.next)}, which begins at ${clock(each.next.start_s)}`;
}

function doingOf(each: Pinned): string {
  return each.doing.length ? `then: ${each.doing.map(said).join(", ")}` : "did nothing then";
}

function OrderRow({ title, order }: { title: string; order: Order | null }) {
  return (
    <tr>
      <td class="muted">{title}</td>
      <td colSpan={2}>{order ? `${order.pipeline} ${said(order)}` : "nothing"}</td>
    </tr>
  );
}

function said(order: Order): string {
  const where = order.devices.length ? ` on ${order.devices.join(", ")}` : "";
  return `${workOf(order)}${order.step ? ` ${order.step}` : ""}${where}`;
}

/** An order's stage as a noun: to generate is to roll out. */
function workOf(order: Order): string {
  return order.stage === "generate" ? "rollout" : stageName(order.stage);
}

/** A time of the run to the second; to the tenth in its first ten minutes. */
function clock(at_s: number): string {
  return moment(at_s, 60);
}

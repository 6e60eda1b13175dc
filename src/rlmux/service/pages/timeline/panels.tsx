// What stands below the board: the reading under the pointer, where a measured window's time went, what happened at a click.
import { useData } from "../api";
import { paintOf } from "../colours";
import { Trouble } from "../frame";
import { colourOf, of, useShown } from "../lane";
import { PipelineName } from "../parts";
import type { Gap, Measured, Order } from "../shapes";
import { moment, percent, seconds, stageName } from "../words";
import type { Span } from "./feed";
import type { Hit } from "./hit";

export function Reading({ hit, at_s }: { hit: Hit | null; at_s: number | null }) {
  return (
    <div class="reading" role="status">
      {hit ? (
        <>
          {hit.device} · <b>{hit.title}</b>
          {hit.facts.map(([name, value]) => ` · ${name} ${value}`).join("")} · {seconds(hit.seconds)} from {moment(hit.start_s, 1)}
        </>
      ) : (
        at_s !== null && moment(at_s, 1)
      )}
    </div>
  );
}

export function MeasureTable({ lane, span }: { lane: string; span: Span }) {
  const measured = useData<Measured>(`/timeline/${of(lane)}/measure?t0=${span.t0}&t1=${span.t1}`);
  const { pipelines } = useShown();
  if (!measured.value) return <Trouble error={measured.error} />;
  const { items, device_s, t0, t1 } = measured.value;
  const lines = items.map((item) => [item.kind, item.pipeline ?? "", item.label, item.seconds.toFixed(3), ((item.share ?? 0) * 100).toFixed(2)].join("\t"));
  const copy = () => void navigator.clipboard.writeText(["kind\tpipeline\tname\tdevice seconds\tpercent", ...lines].join("\n"));
  return (
    <section class="measure">
      <b>{seconds(t1 - t0)} selected</b> <span class="muted">{moment(t0, 1)} to {moment(t1, 1)}, {seconds(device_s)} of devices</span>{" "}
      <button onClick={copy}>Copy</button>
      <table>
        <tbody>
          {items.map((item) => (
            <tr>
              <td class="muted">{item.kind}</td>
              <td>
                <i class={`swatch ${item.kind === "busy" && item.pipeline !== null ? `c${colourOf(pipelines, item.pipeline)}` : `f-${paintOf(item.cause)}`}`} />
                {named(item)}
              </td>
              <td class="number">{seconds(item.seconds)}</td>
              <td class="number">{percent(item.share)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** A row's name; one that a pipeline has names it. */
function named({ kind, pipeline, label }: Measured["items"][number]): string {
  if (pipeline === null || label.split(" ").includes(pipeline)) return label;
  return kind === "busy" ? `${pipeline} ${label}` : `${label} of ${pipeline}`;
}

/** What held a device at a moment, and what each pipeline that has the device did then. */
export function GapTable({ gap }: { gap: Gap }) {
  const { interval } = gap;
  return (
    <section class="measure">
      <b>{interval.device}: {interval.label}</b>{" "}
      <span class="muted">
        {seconds(interval.end_s - interval.start_s)} from {moment(interval.start_s, 1)}
        {interval.is_open && ", not over"}
      </span>
      <table>
        <tbody>
          <OrderRow title="before" order={gap.before} />
          <OrderRow title="after" order={gap.after} />
          {gap.pinned.map((each) => (
            <tr>
              <td>
                <PipelineName name={each.pipeline} />
              </td>
              <td>{each.doing.length ? `then: ${each.doing.map(said).join(", ")}` : "did nothing then"}</td>
              <td class="muted">{each.next ? `next: ${said(each.next)} at ${moment(each.next.start_s, 1)}` : "nothing after it"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
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
  return `${stageName(order.stage)}${order.step ? ` ${order.step}` : ""}${where}`;
}

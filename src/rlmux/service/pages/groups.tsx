// Groups of pipelines with their sums, which the server makes: 1,000 rows are not sent for them.
import { useData } from "./api";
import { Trouble } from "./frame";
import { useShown } from "./lane";
import { address, usePlace } from "./place";
import type { Group, GroupList } from "./shapes";
import { Table, type Column } from "./table";
import { count, figure, percent } from "./words";

/** What the service calls a missing value. */
export const NO_VALUE = "-";

export function keyInWords(by: string, key: string): string {
  return key === NO_VALUE ? `no ${by === "status" ? "state" : by}` : key;
}

/** Where a group's pipelines are listed: under the filters of the address, and its own. */
function placeOf(by: string, key: string, query: URLSearchParams): string {
  const kept = Object.fromEntries([...query].filter(([name]) => !["group", "by", "sort", "columns", "groups.sort", "removed", "lane"].includes(name)));
  return address("/pipelines", { ...kept, ...(by === "day" ? { since: key, until: key } : { [by]: key }) });
}

function columnsOf(by: string, { total, other_hours }: GroupList, query: URLSearchParams): Column<Group>[] {
  const whole = total.device_hours + other_hours;
  const part = (hours: number) => (hours > 0 ? percent(hours / whole) : "");
  return [
    { id: "key", title: by === "status" ? "state" : by, value: (row) => row.key, cell: (row) => (row.key ? <a href={placeOf(by, row.key, query)}>{keyInWords(by, row.key)}</a> : "all of these") },
    { id: "pipelines", title: by === "day" ? "submitted" : "pipelines", kind: "number", value: (row) => row.pipelines, cell: (row) => count(row.pipelines) },
    { id: "running", title: "running", kind: "number", value: (row) => row.running, cell: (row) => (row.running ? count(row.running) : "") },
    { id: "steps", title: "steps", kind: "number", value: (row) => row.steps, cell: (row) => count(row.steps) },
    { id: "tokens", title: "tokens", kind: "number", value: (row) => row.tokens, cell: (row) => count(row.tokens) },
    { id: "device_hours", title: "device-hours", kind: "number", value: (row) => row.device_hours, cell: (row) => figure(row.device_hours) },
    ...(total.usd === null ? [] : [{ id: "usd", title: "dollars", kind: "number", value: (row: Group) => row.usd, cell: (row: Group) => `$${figure(row.usd)}` }]),
    { id: "share", title: "of all device time", kind: "number", value: (row) => row.device_hours, cell: (row) => part(row.device_hours) },
    { id: "busy", title: "computes", kind: "number", value: (row) => row.busy_hours, cell: (row) => part(row.busy_hours) },
    { id: "switch", title: "switch", kind: "number", value: (row) => row.switch_hours, cell: (row) => part(row.switch_hours) },
    { id: "wait", title: "devices wait for it", kind: "number", value: (row) => row.wait_hours, cell: (row) => part(row.wait_hours) },
  ];
}

export function GroupSums({ by, filters }: { by: string; filters: string }) {
  const { lane } = useShown();
  const { query } = usePlace();
  const groups = useData<GroupList>(`/pipelines/groups?by=${encodeURIComponent(by)}&${filters}`, [`pipeline:${lane.name}`]);
  if (!groups.value) return <Trouble error={groups.error} />;
  const { items, total, num_more, other_hours } = groups.value;
  const columns = columnsOf(by, groups.value, query);
  const whole = total.device_hours + other_hours;
  return (
    <>
      <Table
        name="groups"
        label={`sums by ${by}`}
        columns={columns}
        rows={items}
        idOf={(row) => row.key}
        empty={<p class="empty">No pipeline matches.</p>}
        foot={(shown) => (
          <tr>
            {shown.map((column) => (
              <td key={column.id} class={column.kind ?? ""}>
                {column.cell(total)}
              </td>
            ))}
          </tr>
        )}
      />
      <p class="muted small">
        {num_more > 0 && `${count(num_more)} more groups with less device time. `}
        {other_hours > 0 && `${figure(other_hours)} device-hours (${percent(other_hours / whole)}) are of no pipeline listed here: idle time, control, other pipelines. `}
        {by === "label" && "A pipeline with two labels counts for each, and once in the last row. "}
        {by === "day" && "Days are UTC. Device time is on the day it was spent; steps and tokens are of the pipelines submitted that day."}
      </p>
    </>
  );
}

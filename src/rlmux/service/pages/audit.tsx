// Audit: who asked for what, newest first, and what came of it. For administrators.
import { useData, useFurther } from "./api";
import { clockTime, dayOf } from "./clock";
import { Trouble } from "./frame";
import { amend, usePlace } from "./place";
import type { Page } from "./kinds";
import type { AuditRow } from "./shapes";
import { ColumnMenu, Table, type Column } from "./table";
import { count } from "./words";

const PREFIX = "/api/v1";

const COLUMNS: readonly Column<AuditRow>[] = [
  { id: "at", title: "at", kind: "nowrap", tip: (row) => row.at, cell: (row) => `${dayOf(new Date(row.at))} ${clockTime(new Date(row.at))}` },
  { id: "user", title: "user", cell: (row) => row.user || <span class="muted">not known</span> },
  { id: "token", title: "token", kind: "mono muted", cell: (row) => row.token || row.by || "–" },
  { id: "from", title: "from", kind: "mono", cell: (row) => row.address },
  {
    id: "asked",
    title: "asked",
    kind: "mono",
    cell: (row) => (
      <>
        {row.method} {row.path.startsWith(PREFIX) ? row.path.slice(PREFIX.length) : row.path}
        {row.left_out > 0 && <div class="why">and {count(row.left_out)} more reads that were refused before</div>}
      </>
    ),
  },
  { id: "answer", title: "answer", kind: "number", paint: (row) => (row.status !== null && row.status >= 400 ? "bad" : ""), cell: (row) => row.status ?? <span title="the server ended before it was answered">none</span> },
];

export function AuditPage() {
  const user = usePlace().query.get("user") ?? "";
  const filters = new URLSearchParams({ limit: "100", ...(user && { user }) }).toString();
  const first = useData<Page<AuditRow>>(`/audit?${filters}`);
  const { rows, more } = useFurther<AuditRow>("/audit", first.value, filters);
  return (
    <>
      <div class="heading">
        <h1>Audit</h1>
        <span class="muted small">who asked for what: all that may have an effect, and all that was refused</span>
      </div>
      <div class="toolbar">
        <input data-search type="search" placeholder="user   /" aria-label="user" value={user} onInput={(event) => amend({ user: event.currentTarget.value || null })} />
        <ColumnMenu columns={COLUMNS} />
      </div>
      <Trouble error={first.error} />
      {first.value && <Table label="requests" class="audit" columns={COLUMNS} rows={rows} idOf={(row, index) => `${row.at} ${index}`} isServers empty={<p class="empty">{user ? `No request of ${user}.` : "No request yet."}</p>} />}
      {more && <button onClick={more}>More</button>}
    </>
  );
}


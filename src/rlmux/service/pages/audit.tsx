// Audit: who asked for what, newest first, and what came of it. For administrators.
import { useData, useFurther } from "./api";
import { Trouble } from "./frame";
import { amend, usePlace } from "./place";
import type { Page } from "./kinds";
import type { AuditRow } from "./shapes";
import { count } from "./words";

const PREFIX = "/api/v1";

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
      </div>
      <Trouble error={first.error} />
      {rows.length > 0 && (
        <div class="scroll">
          <table class="audit">
            <thead>
              <tr>
                <th>at (UTC)</th>
                <th>user</th>
                <th>token</th>
                <th>from</th>
                <th>asked</th>
                <th class="number">answer</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((row, index) => (
                <RequestRow key={`${row.at} ${index}`} row={row} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {first.value && rows.length === 0 && <p class="empty">{user ? `No request of ${user}.` : "No request yet."}</p>}
      {more && <button onClick={more}>More</button>}
    </>
  );
}

function RequestRow({ row }: { row: AuditRow }) {
  const isRefused = row.status !== null && row.status >= 400;
  return (
    <tr>
      <td class="mono">{row.at.replace("T", " ").replace("Z", "")}</td>
      <td>{row.user || <span class="muted">not known</span>}</td>
      <td class="mono muted">{row.token || row.by || "–"}</td>
      <td class="mono">{row.address}</td>
      <td class="mono">
        {row.method} {row.path.startsWith(PREFIX) ? row.path.slice(PREFIX.length) : row.path}
        {row.left_out > 0 && <div class="why">and {count(row.left_out)} more reads that were refused before</div>}
      </td>
      <td class={`number ${isRefused ? "bad" : ""}`}>{row.status ?? <span title="the server ended before it was answered">none</span>}</td>
    </tr>
  );
}

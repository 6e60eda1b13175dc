// Two pipelines side by side, of one lane or of two: whether they are the same run, their figures, their curves on one axis.
import { useData } from "./api";
import { type Curve, Constants, Overlay, constantOf } from "./charts";
import { Trouble } from "./frame";
import { useShown, of } from "./lane";
import { address, amend, usePlace } from "./place";
import type { Page } from "./kinds";
import type { Compared, Metrics, Pipeline } from "./shapes";
import { count, percent, reward, seconds, times } from "./words";

/** Colours of the first and the second, whatever they are called. */
const COLOURS = [0, 1] as const;

export function Compare() {
  const { query } = usePlace();
  const { lanes } = useShown();
  const rows = useData<Page<Pipeline>>("/pipelines?limit=500", lanes.map((lane) => `pipeline:${lane.name}`));
  const names = (rows.value?.items ?? []).map((row) => of(row.lane, row.name));
  const [a, b] = [query.get("a") ?? "", query.get("b") ?? ""];
  const isReady = a !== "" && b !== "";
  const compared = useData<Compared>(isReady ? `/compare?of=${encodeURIComponent(a)}&of=${encodeURIComponent(b)}` : null, lanes.map((lane) => `pipeline:${lane.name}`));
  const both = compared.value?.items;
  return (
    <>
      <div class="heading">
        <h1>Compare</h1>
      </div>
      <div class="toolbar">
        {(["a", "b"] as const).map((key, at) => (
          <label>
            <i class={`dot c${COLOURS[at]}`} />
            <select aria-label={at === 0 ? "first pipeline" : "second pipeline"} value={query.get(key) ?? ""} onChange={(event) => amend({ [key]: event.currentTarget.value || null })}>
              <option value="">choose one</option>
              {names.map((name) => (
                <option value={name}>{shown(name)}</option>
              ))}
            </select>
          </label>
        ))}
      </div>
      <Trouble error={rows.error ?? compared.error} />
      {!isReady && <p class="empty">Choose two pipelines.</p>}
      {both && compared.value && (
        <>
          <p class={`banner ${compared.value.identity.is_same_plan && compared.value.identity.first_other !== null ? "" : "soft"}`} role="status">
            {compared.value.identity.says}
            {compared.value.identity.first_other !== null &&
              [a, b].map((one) => (
                <>
                  {" · "}
                  <a href={address(`/pipelines/${one}`, { tab: "samples", step: String(compared.value?.identity.first_other) })}>samples of {shown(one)}</a>
                </>
              ))}
          </p>
          <Figures rows={both} names={[shown(a), shown(b)]} />
          <Curves a={a} b={b} names={[shown(a), shown(b)]} />
        </>
      )}
    </>
  );
}

function shown(name: string): string {
  return name.split("/").map(decodeURIComponent).join(" / ");
}

function Figures({ rows, names }: { rows: [Pipeline, Pipeline]; names: [string, string] }) {
  const lines: [string, (row: Pipeline) => string][] = [
    ["state", (row) => row.status],
    ["steps", (row) => count(row.step)],
    ["reward, first", (row) => reward(row.reward_first)],
    ["reward, last", (row) => reward(row.reward_last)],
    ["a step takes", (row) => seconds(row.step_s_mean)],
    ["of alone", (row) => times(row.step_slowdown)],
    ["tokens", (row) => count(row.tokens)],
    ["promise", (row) => row.promise ?? "–"],
  ];
  const change = ([first, second]: [number | null, number | null]) => (first && second !== null ? percent(second / first - 1) : "");
  return (
    <table class="compared">
      <thead>
        <tr>
          <th />
          {names.map((name, at) => (
            <th class="number">
              <i class={`dot c${COLOURS[at]}`} />
              {name}
            </th>
          ))}
          <th class="number">second against first</th>
        </tr>
      </thead>
      <tbody>
        {lines.map(([title, read]) => (
          <tr>
            <td>{title}</td>
            {rows.map((row) => (
              <td class="number">{read(row)}</td>
            ))}
            <td class="number muted">
              {title === "a step takes" ? change([rows[0].step_s_mean, rows[1].step_s_mean]) : title === "tokens" ? change([rows[0].tokens, rows[1].tokens]) : ""}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Curves({ a, b, names }: { a: string; b: string; names: [string, string] }) {
  const first = useData<Metrics>(`/pipelines/${a}/metrics?points=800`);
  const second = useData<Metrics>(`/pipelines/${b}/metrics?points=800`);
  if (!first.value || !second.value) return <Trouble error={first.error ?? second.error} />;
  const [one, two] = [first.value.series, second.value.series];
  const shared = first.value.names.filter((name) => name in two);
  if (shared.length === 0) return <p class="empty">They have no metric in common.</p>;
  const constants = shared.map((metric) => [metric, constantOfBoth(one[metric], two[metric])] as const);
  return (
    <>
      <div class="charts">
        {constants.map(([metric, value]) => {
          const curves = [one[metric], two[metric]] as const;
          return value === null && curves[0] && curves[1] && <Overlay key={metric} title={metric} curves={[curves[0], curves[1]]} colours={COLOURS} names={names} />;
        })}
      </div>
      <Constants values={constants} />
    </>
  );
}

/** What both are at every step; null where one changes or they differ. */
function constantOfBoth(one: Curve | undefined, two: Curve | undefined): number | null {
  const [first, second] = [one, two].map((curve) => (curve ? constantOf(curve) : null));
  return first !== undefined && first === second ? first : null;
}

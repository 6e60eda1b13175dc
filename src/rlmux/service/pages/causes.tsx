/* Why a step takes longer than alone: a waterfall from a step alone to what it took. */

import { useData } from "./api";
import { paintOf } from "./colours";
import { Trouble } from "./frame";
import { colourOf, useShown } from "./lane";
import type { StepCauses } from "./shapes";
import { count, percent, seconds, times } from "./words";

export function Causes({ path, lane, name }: { path: string; lane: string; name: string }) {
  const { pipelines } = useShown();
  const causes = useData<StepCauses>(`${path}/causes`, [`pipeline:${lane}`]);
  if (!causes.value) return <Trouble error={causes.error} />;
  const { step_s, alone_s, slowdown, num_steps } = causes.value;
  if (step_s === null || alone_s === null) return <p class="empty">No step has ended yet. The causes of a step's time appear here with the first one.</p>;
  let at_s = 0;
  const rows = [
    { label: "alone", seconds: alone_s, paint: `c${colourOf(pipelines, name)}` },
    ...causes.value.causes.map((one) => ({
      label: one.label,
      seconds: one.seconds,
      paint: one.pipeline ? `c${colourOf(pipelines, one.pipeline)}` : `f-${paintOf(one.cause)}`,
    })),
  ].map((row) => ({ ...row, from_s: (at_s += row.seconds) - row.seconds }));
  return (
    <>
      <h2>
        Why a step takes {seconds(step_s)} <small>{slowdown === null ? "" : `${times(slowdown)} as long as alone; `}mean of the last {count(num_steps)} steps; the head has the mean of all</small>
      </h2>
      <table class="bars">
        <tbody>
          {[...rows, { label: "a step", seconds: step_s, paint: "f-busy", from_s: 0 }].map((row) => (
            <tr key={row.label}>
              <td class="name">{row.label}</td>
              <td class="number">{seconds(row.seconds)}</td>
              <td class="number muted">{percent(row.seconds / step_s)}</td>
              <td class="wide">
                <i class={`bar ${row.paint}`} style={{ marginLeft: `${(100 * row.from_s) / step_s}%`, width: `${(100 * row.seconds) / step_s}%` }} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

// What a lane costs an hour, beside the price of the same pipelines alone and of what computes; in devices without prices.
import { useData } from "./api";
import { Lines } from "./charts";
import { Trouble } from "./frame";
import { of, useShown } from "./lane";
import type { Cost } from "./shapes";
import { figure, percent } from "./words";

export function CostOverTime() {
  const { lane } = useShown();
  const cost = useData<Cost>(`/lanes/${of(lane.name)}/cost`, [`lane:${lane.name}`]);
  if (!cost.value) return <Trouble error={cost.error} />;
  const { unit, x, paid, alone, computing, sums } = cost.value;
  if (sums.paid === 0) return null;
  const isPriced = unit === "usd_per_hour";
  const whole = (value: number) => (isPriced ? `$${figure(value)}` : `${figure(value)} device-hours`);
  const rate = (value: number | null | undefined) => (isPriced ? `$${figure(value)}` : figure(value));
  const saved = sums.alone > 0 ? 1 - sums.paid / sums.alone : 0;
  return (
    <>
      <h2>{isPriced ? "Dollars an hour" : "Devices held"}</h2>
      <p class="saved">
        {saved >= 0.0005 && (
          <b>
            {whole(sums.alone - sums.paid)} saved, {percent(saved)}
          </b>
        )}
        Alone, each on devices of its own, the same pipelines would have {isPriced ? "cost" : "held"} {whole(sums.alone)}. Together they {isPriced ? "cost" : "held"} {whole(sums.paid)}, of which{" "}
        {whole(sums.computing)} computed.
      </p>
      <Lines
        label={isPriced ? "dollars an hour" : "devices held"}
        x={x}
        lines={[
          { name: isPriced ? "paid" : "held", values: paid, dash: [], isMain: true },
          { name: "alone", values: alone, dash: [7, 4] },
          { name: "computing", values: computing, dash: [2, 3] },
        ]}
        value={rate}
      />
    </>
  );
}

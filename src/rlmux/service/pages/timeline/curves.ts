// Rewards under the rows, on the same time axis: each pipeline's curve in its colour, steps as they ended.
import { type Colours, NUM_COLOURS } from "../colours";
import type { Scale } from "./rows";

export interface Curve {
  /** Place in the timeline's list of pipelines. */
  pipeline: number;
  x: readonly (number | null)[];
  y: readonly (number | null)[];
}

export function drawCurves(context: CanvasRenderingContext2D, curves: Curve[], box: { y: number; height: number }, scale: Scale, colours: Colours): void {
  const values = curves.flatMap(({ y }) => y.filter((value): value is number => value !== null));
  if (values.length === 0) return;
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const range = high > low ? high - low : 1;
  const yOf = (value: number) => box.y + box.height - 4 - ((value - low) / range) * (box.height - 10);
  context.save();
  context.beginPath();
  context.rect(scale.left, box.y, scale.width, box.height);
  context.clip();
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  for (const curve of curves) {
    context.strokeStyle = colours.pipelines[curve.pipeline % NUM_COLOURS] ?? colours.ink;
    context.beginPath();
    curve.x.forEach((at_s, index) => {
      const value = curve.y[index];
      if (at_s != null && value != null) context.lineTo(scale.x(at_s), yOf(value));
    });
    context.stroke();
  }
  context.restore();
  context.font = "10.5px system-ui,sans-serif";
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  context.fillText(high.toPrecision(2), scale.left - 5, box.y + 8);
  context.fillText(low.toPrecision(2), scale.left - 5, box.y + box.height - 4);
  context.textAlign = "left";
}

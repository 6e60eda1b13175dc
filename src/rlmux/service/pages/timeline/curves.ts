// Mean rewards under the rows, on the same time axis: each pipeline's curve in its colour, steps as they ended, its name at its end.
import { type Colours, NUM_COLOURS } from "../colours";
import { figure } from "../words";
import { niceStep } from "../clock";
import { type Scale } from "./rows";

export interface Curve {
  /** Place in the timeline's list of pipelines. */
  pipeline: number;
  /** Seconds of the run and mean reward. */
  points: readonly (readonly [number, number])[];
}

interface Box {
  y: number;
  height: number;
}

interface Label {
  text: string;
  colour: string;
  x: number;
  y: number;
  width: number;
}

const FONT = "10.5px system-ui,sans-serif";
const LINE = 12;
const DOT = 9;

/** From the lowest to the highest value of all curves, so that a pan moves none of them. */
function rangeOf(curves: readonly Curve[], box: Box) {
  let [low, high] = [Infinity, -Infinity];
  for (const { points } of curves) for (const [, value] of points) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > high) return null;
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  return { low, high, yOf: (value: number) => box.y + box.height - 8 - ((value - low) / (high - low)) * (box.height - 18) };
}

export function drawCurves(context: CanvasRenderingContext2D, curves: readonly Curve[], box: Box, scale: Scale, colours: Colours, names: readonly string[]): void {
  const range = rangeOf(curves, box);
  if (!range) return;
  context.save();
  context.beginPath();
  context.rect(scale.left, box.y, scale.width, box.height);
  context.clip();
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.font = FONT;
  const labels: Label[] = [];
  for (const { pipeline, points } of curves) {
    const colour = colours.pipelines[pipeline % NUM_COLOURS] ?? colours.ink;
    context.strokeStyle = context.fillStyle = colour;
    context.beginPath();
    for (const [at_s, value] of points) context.lineTo(scale.x(at_s), range.yOf(value));
    context.stroke();
    const end = points.findLast(([at_s]) => at_s <= scale.span.t1);
    if (!end || end[0] < scale.span.t0) continue;
    const [x, y, text] = [scale.x(end[0]), range.yOf(end[1]), names[pipeline] ?? ""];
    context.fillRect(x - 2, y - 2, 4, 4);
    labels.push(...labelAt({ text, colour, x, y, width: context.measureText(text).width + DOT + 6 }, scale, box, labels));
  }
  for (const label of labels) drawLabel(context, label, colours);
  context.restore();
}

/** Right of a curve's end, or left of it where the plot ends; a few lines up or down where another name is; none where all is full. */
function labelAt(label: Label, scale: Scale, box: Box, taken: readonly Label[]): Label[] {
  const isLeft = label.x + label.width + 5 > scale.left + scale.width;
  const x = Math.max(scale.left + 2, isLeft ? label.x - label.width - 5 : label.x + 5);
  const isFree = (y: number) => y >= box.y + LINE / 2 && y <= box.y + box.height - LINE / 2 && taken.every((each) => Math.abs(each.y - y) >= LINE || each.x > x + label.width || each.x + each.width < x);
  const lines = [0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7, 8, -8, 9, -9];
  const y = lines.map((line) => label.y + line * LINE).find(isFree);
  return y === undefined ? [] : [{ ...label, x, y }];
}

function drawLabel(context: CanvasRenderingContext2D, { text, colour, x, y, width }: Label, colours: Colours): void {
  context.globalAlpha = 0.78;
  context.fillStyle = colours.paper;
  context.fillRect(x, y - LINE / 2, width, LINE);
  context.globalAlpha = 1;
  context.fillStyle = colour;
  context.fillRect(x + 2, y - 3, 6, 6);
  context.fillStyle = colours.ink;
  context.textBaseline = "middle";
  context.fillText(text, x + DOT + 2, y);
}

/** The numbers and the name of the rewards' axis, in the gutter. */
export function drawCurveAxis(context: CanvasRenderingContext2D, curves: readonly Curve[], box: Box, scale: Scale, colours: Colours): void {
  const range = rangeOf(curves, box);
  context.font = "11px system-ui,sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colours.muted;
  context.fillText("mean reward", 10, box.y + box.height / 2);
  if (!range) return;
  context.font = FONT;
  context.textAlign = "right";
  const step = niceStep((range.high - range.low) / 4);
  for (let tick = Math.ceil(range.low / step); tick * step <= range.high; tick++) {
    const y = Math.round(range.yOf(tick * step));
    context.fillStyle = colours.line;
    context.fillRect(scale.left - 4, y, 4, 1);
    context.fillStyle = colours.muted;
    context.fillText(figure(tick * step), scale.left - 7, y + 0.5);
  }
  context.textAlign = "left";
}

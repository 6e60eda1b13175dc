// Time of day of a run's seconds. A run that was resumed has a mark for each of its processes; times are those of this browser.
import type { Lane } from "./shapes";
import { seconds } from "./words";

export type Marks = Lane["clock"];

/** When a second of the run was; null where no time of day is known. After a resume without a time it is a guess. */
export function dateOf(marks: Marks, at_s: number): { date: Date; isAbout: boolean } | null {
  const before = marks.filter((mark, index) => index === 0 || mark.at_s <= at_s);
  const known = before.findLast((mark) => mark.utc !== null);
  if (!known?.utc) return null;
  return { date: new Date(new Date(known.utc).getTime() + (at_s - known.at_s) * 1000), isAbout: before.at(-1)?.utc === null };
}

const pad = (value: number) => String(value).padStart(2, "0");

/** `14:03:22`; without seconds where they say nothing. */
export function clockTime(date: Date, hasSeconds = true): string {
  return `${pad(date.getHours())}:${pad(date.getMinutes())}${hasSeconds ? `:${pad(date.getSeconds())}` : ""}`;
}

/** `Nov 29`. */
export function dayOf(date: Date): string {
  return date.toLocaleDateString("en-US", { month: "short", day: "numeric" });
}

/** `14:03:22`, with its date unless it is today's; `about` for a guess. Empty where no time of day is known. */
export function timeOfDay(marks: Marks, at_s: number | null | undefined): string {
  const found = at_s == null ? null : dateOf(marks, at_s);
  if (!found) return "";
  const isToday = found.date.toDateString() === new Date().toDateString();
  return `${found.isAbout ? "about " : ""}${isToday ? "" : `${dayOf(found.date)} `}${clockTime(found.date)}`;
}

/** `14:03:22 · 12 min 05 s`: time of day, and seconds of the run. */
export function bothTimes(marks: Marks, at_s: number): string {
  const day = timeOfDay(marks, at_s);
  return day ? `${day} · ${seconds(at_s)}` : seconds(at_s);
}

/** Words below a mark of an axis: the time of day, and the date where it is another than `day`. */
export function tickInDay(marks: Marks, at_s: number, step_s: number, day: string): { text: string; day: string } {
  const found = dateOf(marks, at_s);
  if (!found) return { text: "", day };
  const its = dayOf(found.date);
  if (step_s >= 86400) return { text: its, day: its };
  const time = clockTime(found.date, step_s < 60);
  return { text: its === day ? time : `${its} ${time}`, day: its };
}

/** Unit, its seconds, the widest span that is in it, and round steps of it. */
const UNITS = [
  ["s", 1, 180, [1, 2, 5, 10, 15, 20, 30, 60]],
  ["min", 60, 3 * 3600, [1, 2, 5, 10, 15, 20, 30, 60]],
  ["h", 3600, 4 * 86400, [1, 2, 3, 6, 12, 24]],
  ["d", 86400, Infinity, [1, 2, 7, 14, 28]],
] as const;

export interface Ticks {
  /** Seconds from one mark to the next. */
  step_s: number;
  label: (at_s: number) => string;
}

/** 1, 2 or 5 times a power of ten, not below `least`. */
export function niceStep(least: number): number {
  const ten = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= least * 0.999) ?? 10 * ten;
}

/** Marks of an axis, all in the one unit that fits its width: `10 min`, `20 min`. */
export function ticksOf(span_s: number, most: number): Ticks {
  const [unit, unit_s, , steps] = UNITS.find((each) => span_s <= each[2]) ?? UNITS[3];
  const least = span_s / unit_s / Math.max(1, most);
  const step = (least > 0.5 ? steps.find((each) => each >= least * 0.999) : undefined) ?? niceStep(least);
  const decimals = Math.max(0, -Math.floor(Math.log10(step * 1.0001)));
  return { step_s: step * unit_s, label: (at_s) => `${(at_s / unit_s).toFixed(decimals)} ${unit}` };
}

// Which curves say nothing: their quarters differ by no more than chance.

import type { Curve } from "./charts";

/** Points below which a curve is always drawn as one that says something. */
const FEWEST = 12;
/** Range of four means over the error of one, which white noise exceeds one time in twenty (the studentized range). */
const CHANCE = 3.63;
/** Median size of the difference of two normal numbers, over their standard deviation. */
const MEDIAN_CHANGE = 0.954;
/** A point this many deviations from the median is no noise: a spike is worth a look. */
const SPIKE = 8;

interface Level {
  mean: number;
  /** Standard error of the mean. */
  error: number;
}

/**
 * The level of a curve that is flat within noise; null: the curve says something.
 *
 * The rule: noise is the median change from step to step. The curve is flat if the means of its four quarters lie within the
 * range that such noise alone gives, and no point is a spike; or if all points are the same within 1e-9.
 */
export function flatLevelOf({ y }: Curve): Level | null {
  const values = y.filter((value): value is number => value !== null);
  if (values.length < FEWEST) return null;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const mean = meanOf(values);
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return { mean, error: 0 };
  const noise = medianOf(values.slice(1).map((value, at) => Math.abs(value - (values[at] ?? value)))) / MEDIAN_CHANGE;
  const middle = medianOf(values);
  if (Math.max(high - middle, middle - low) > SPIKE * noise) return null;
  const quarter = values.length / 4;
  const means = [0, 1, 2, 3].map((at) => meanOf(values.slice(Math.round(at * quarter), Math.round((at + 1) * quarter))));
  const isFlat = Math.max(...means) - Math.min(...means) <= (CHANCE * noise) / Math.sqrt(quarter);
  return isFlat ? { mean, error: noise / Math.sqrt(values.length) } : null;
}

/** Whether curves on one axis are flat within noise, each of them and against each other. */
export function areFlat(curves: readonly Curve[]): boolean {
  const levels = curves.map(flatLevelOf);
  if (levels.length === 0 || !levels.every((level) => level !== null)) return false;
  const means = levels.map(({ mean }) => mean);
  return Math.max(...means) - Math.min(...means) <= CHANCE * Math.max(...levels.map(({ error }) => error)) + 1e-9 * Math.max(...means.map(Math.abs));
}

/** The same names, those of flat curves last. */
export function flatLast(names: readonly string[], isFlat: (name: string) => boolean): string[] {
  return [...names.filter((name) => !isFlat(name)), ...names.filter(isFlat)];
}

function meanOf(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function medianOf(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  return ((sorted[(sorted.length - 1) >> 1] ?? 0) + (sorted[sorted.length >> 1] ?? 0)) / 2;
}

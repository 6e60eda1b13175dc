// Numbers and times as a reader sees them. What does not exist is a dash, never 0 and never NaN.

import type { Removed } from "./shapes";

export const NONE = "–";

export function percent(part: number | null | undefined): string {
  if (part == null) return NONE;
  const value = part * 100;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${value !== 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)} %`;
}

/** 0.42 s, 12.3 s, 4 min 10 s, 2 h 05 min, 3 d 4 h. */
export function seconds(value: number | null | undefined): string {
  if (value == null) return NONE;
  if (value < 0) return `−${seconds(-value)}`;
  if (value > 0 && value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 119.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${pad(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function pad(value: number): string {
  return String(value).padStart(2, "0");
}

export function count(value: number | null | undefined): string {
  return value == null ? NONE : Math.round(value).toLocaleString("en-US");
}

/** Three significant digits. */
export function figure(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? count(value) : String(Number(value.toPrecision(3)));
}

/** A reward with three decimals, so that a column of them lines up; what that does not tell is a figure. */
export function reward(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  return size >= 1000 || (size > 0 && size < 0.0005) ? figure(value) : value.toFixed(3);
}

/** `sft_warmup` as people write it. */
export function stageName(stage: string | null | undefined): string {
  const known: Record<string, string> = { sft_warmup: "SFT warm-up", old_logprobs: "old log-probs", reference_logprobs: "reference log-probs" };
  return known[stage ?? ""] ?? stage ?? "";
}

export function times(value: number | null | undefined): string {
  return value == null ? NONE : `${value.toFixed(2)}×`;
}

/** How long ago, in words. */
export function ago(value_s: number): string {
  return value_s < 1.5 ? "now" : `${seconds(value_s).replace(/\.\d+ s/, " s")} ago`;
}

/** A place in a run's time, as precise as the window asks for. */
export function moment(at_s: number, span_s: number): string {
  if (span_s < 0.1) return `${at_s.toFixed(4)} s`;
  if (span_s < 20) return `${at_s.toFixed(2)} s`;
  if (at_s < 600) return `${at_s.toFixed(1)} s`;
  const whole = Math.floor(at_s);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  const rest = span_s < 7200 ? `:${pad(whole % 60)}` : "";
  return hours ? `${hours}:${pad(minutes)}${rest || " h"}` : `${minutes}:${pad(whole % 60)}`;
}

/** Bytes on a disk. */
export function size(bytes: number): string {
  const [unit, per] = bytes >= 1e9 ? ["GB", 1e9] : bytes >= 1e6 ? ["MB", 1e6] : ["kB", 1e3];
  return `${(bytes / per).toFixed(1)} ${unit}`;
}

/** The metrics that a reader looks at first, in that order, each in words and with its unit. */
export const FIRST_METRICS: Readonly<Record<string, readonly [string, string]>> = {
  reward_mean: ["Reward, mean", ""],
  loss: ["Loss", ""],
  kl: ["KL to the reference", "nats"],
  entropy: ["Entropy", "nats per token"],
  grad_norm: ["Gradient norm", ""],
  tokens: ["Tokens of a step", ""],
  response_len_mean: ["Response length, mean", "tokens"],
  logprob_gap: ["Largest log-prob gap, rollout to trainer", "nats"],
};

/** [those that a reader looks at first, the others], of these metrics. */
export function firstMetrics(names: readonly string[]): [string[], string[]] {
  return [Object.keys(FIRST_METRICS).filter((name) => names.includes(name)), names.filter((name) => !(name in FIRST_METRICS))];
}

/** A metric in words with its unit; its own name where it has no other. */
export function metricName(name: string): string {
  const [words, unit] = FIRST_METRICS[name] ?? [name, ""];
  return unit ? `${words} (${unit})` : words;
}

/** Which try a pipeline is in: "try 2 of 3". */
export function tryInWords({ number, of }: { number: number; of: number | null }): string {
  return of === null ? `try ${number}` : `try ${number} of ${of}`;
}

/** What was removed of a pipeline's files, and by whom. */
export function removedInWords({ parts, at_s, by, by_rule, freed_bytes }: Removed): string {
  const what = parts === "all" ? "all of its files were" : `its ${parts} were`;
  return `${what} removed at ${moment(at_s, 1)} by ${by_rule ? "the rule keep" : by || "the owner"} (${size(freed_bytes)})`;
}

/** Words that a page explains where they stand, as in docs/reference/words.md. */
export const TERMS = {
  accepts: "The largest step slowdown that the pipeline accepts, 1.0 or more: the file's slo_slowdown.",
  bubble: "Device time that a pipeline holds while nothing runs on it. Idle time is held by none.",
  filler: "A pipeline that samples and scores in gaps, and trains nothing.",
  held: "Kept in the queue until it is released: it is offered no room.",
  held_back: "The scheduler could have given the next order and decided otherwise: the policy's choice.",
  promise: "Its engines' determinism class, found by a probe: whether its weights are the same, bit for bit, shared and alone.",
  receipt: "Steps are trained again, alone, and the weights are compared bit for bit.",
  slowdown: "Time of a step beside others over its time alone on the same devices: 1.20 is a fifth longer.",
  staleness: "The trained weight version minus the oldest version of a trajectory's tokens.",
  try: "A pipeline that failed starts again from its newest checkpoint: by the file's retries, or by Retry.",
} as const;

export type TermName = keyof typeof TERMS;

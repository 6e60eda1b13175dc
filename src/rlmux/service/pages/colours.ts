// The house palette: Okabe and Ito's colours, told apart by the colour-blind, as in the report's pages. Hue is the pipeline,
// shade the stage, hatch a wait. The canvas reads the same variables that the style sheet sets, so themes agree.

export const NUM_COLOURS = 8;

/** What a cause is drawn as: the name of a colour in the style sheet. Causes that are not here wait for a pipeline. */
const PAINT_BY_CAUSE: Record<string, Paint> = {
  switch: "switch",
  starting: "starting",
  "tool wait": "tool",
  sync: "sync",
  migration: "sync",
  "held back": "held",
  "lost work": "lost",
  "worker stood still": "lost",
  control: "control",
  client: "idle",
  "nothing admitted": "idle",
  down: "idle",
};

export type Paint = "wait" | "switch" | "starting" | "tool" | "sync" | "held" | "lost" | "control" | "idle";

export const LEGEND: readonly (readonly [Paint, string])[] = [
  ["wait", "waiting for a pipeline"],
  ["sync", "weight sync, migration"],
  ["tool", "tool wait"],
  ["switch", "switch"],
  ["starting", "worker starting"],
  ["held", "held back by the policy"],
  ["lost", "lost work"],
  ["control", "control"],
  ["idle", "idle"],
];

/** Causes that are about one pipeline say which. */
const NAMES_PIPELINE = new Set([
  "waiting for rollout",
  "waiting for rewards",
  "waiting for training",
  "waiting for cycle slot",
  "waiting for the other devices",
  "sync",
  "migration",
  "client",
]);

export function paintOf(cause: string): Paint {
  return PAINT_BY_CAUSE[cause] ?? "wait";
}

/** A gap's name as reports say it: `waiting for rollout of sort`. */
export function nameOf(cause: string, pipeline: string | null | undefined): string {
  return pipeline != null && NAMES_PIPELINE.has(cause) ? `${cause} of ${pipeline}` : cause;
}

/** How strongly a stage shows its pipeline's colour. */
export function shadeOf(stage: string | null | undefined): number {
  return { generate: 0.55, sft_warmup: 0.8, reference_logprobs: 0.42, old_logprobs: 0.62, update: 1 }[stage ?? ""] ?? 0.8;
}

export type Colours = Record<Paint | "ink" | "muted" | "line" | "paper" | "track" | "bad", string> & { pipelines: string[] };

/** The colours of the theme that is shown. */
export function themeColours(): Colours {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string) => style.getPropertyValue(`--${name}`).trim();
  const names = ["ink", "muted", "line", "paper", "track", "bad", ...LEGEND.map(([paint]) => paint)];
  const plain = Object.fromEntries(names.map((name) => [name, read(name)]));
  return { ...plain, pipelines: Array.from({ length: NUM_COLOURS }, (_, index) => read(`p${index}`)) } as Colours;
}

/** Calls when the theme changes, by the system or by the button. */
export function onTheme(change: () => void): () => void {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = new MutationObserver(change);
  system.addEventListener("change", change);
  chosen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  return () => {
    system.removeEventListener("change", change);
    chosen.disconnect();
  };
}

// The lane that is shown: the one in the URL, else the first that runs, else the last. And the colour of each pipeline.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { NUM_COLOURS } from "./colours";
import type { Lane } from "./shapes";

export interface Shown {
  lane: Lane;
  lanes: Lane[];
  /** In the order of the log, so that a pipeline has one colour on every page. */
  pipelines: readonly string[];
}

export const ShownLane = createContext<Shown | null>(null);

export function useShown(): Shown {
  const shown = useContext(ShownLane);
  if (shown === null) throw new Error("a page is drawn inside the frame");
  return shown;
}

/** The address of a lane's data. */
export function of(lane: string, ...rest: string[]): string {
  return [lane, ...rest].map(encodeURIComponent).join("/");
}

/** The number of a pipeline's colour. */
export function colourOf(pipelines: readonly string[], name: string): number {
  return Math.max(0, pipelines.indexOf(name)) % NUM_COLOURS;
}

export function chosenLane<Each extends { name: string; state: string }>(lanes: Each[], wanted: string | null): Each | null {
  return lanes.find((lane) => lane.name === wanted) ?? lanes.find((lane) => lane.state === "running") ?? lanes.at(-1) ?? null;
}

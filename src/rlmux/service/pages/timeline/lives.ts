// A timeline as the board has it: the lives of a thousand pipelines come as columns and are rows here.
import { get } from "../api";
import { of } from "../lane";
import type { Timeline as Answer, Life } from "../shapes";

export type Timeline = Omit<Answer, "lives" | "life_columns"> & { lives: (Life | null)[] };

export function addressOf(lane: string): string {
  return `/timeline/${of(lane)}?lives=columns`;
}

export async function readTimeline(path: string): Promise<Timeline> {
  const { life_columns, ...timeline } = await get<Answer>(path);
  return { ...timeline, lives: livesOf(life_columns) };
}

function livesOf(columns: Answer["life_columns"]): (Life | null)[] {
  if (!columns) return [];
  const { projects, project, begun_ms, lasted_ms } = columns;
  const without = new Set(columns.has_no_rewards);
  return project.map((at, place) => {
    const [begun, lasted] = [begun_ms[place] ?? null, lasted_ms[place] ?? null];
    if (at < 0) return null;
    return {
      project: projects[at] ?? "",
      begun_s: begun === null ? null : begun / 1000,
      ended_s: lasted === null ? null : ((begun ?? 0) + lasted) / 1000,
      has_rewards: !without.has(place),
    };
  });
}

// Why a pipeline waits and what would start it now, in the words of `rlmux why`: on the queue and on its own page.
import { useData } from "./api";
import { Trouble } from "./frame";
import { of } from "./lane";
import { shareInWords } from "./shares";
import type { Why } from "./shapes";
import { count, seconds } from "./words";

const TOKENS: Record<string, string> = {
  held: "held",
  over_quota: "over its quota",
  budget_spent: "its budget is spent",
  filler: "filler: takes what others leave",
  parking: "others make room for it",
  no_room: "no room: first in the queue",
  behind: "no room: behind the first",
  reserved_for: "room is kept for the first",
};

export function tokenInWords(token: string): string {
  return TOKENS[token] ?? token;
}

function useWhy(lane: string, name: string) {
  return useData<Why>(`/pipelines/${of(lane, name)}/why`, [`queue:${lane}`, `pipeline:${lane}`]);
}

/** The changes that the controller has tried, the cheapest first. */
export function WouldStart({ lane, name }: { lane: string; name: string }) {
  const why = useWhy(lane, name);
  if (!why.value) return <Trouble error={why.error} />;
  if (why.value.token === null) return <div class="why">It waits no longer.</div>;
  return (
    <>
      {why.value.is_over_share && <div class="why">{overInWords(why.value)}</div>}
      <Changes why={why.value} />
    </>
  );
}

/** All of it, for the page of one pipeline. */
export function Waits({ lane, name }: { lane: string; name: string }) {
  const why = useWhy(lane, name);
  if (!why.value) return <Trouble error={why.error} />;
  const { token, position, num_waiting, waited_s, reason } = why.value;
  if (token === null) return null;
  return (
    <section class="banner soft" aria-label="why it waits">
      <b>{tokenInWords(token)}</b> ({position ? `${count(position)} of ${count(num_waiting)} in the queue` : "not offered room"}, for {seconds(waited_s)})
      {reason && <div>{reason}</div>}
      {why.value.is_over_share && <div>{overInWords(why.value)}</div>}
      <Changes why={why.value} />
    </section>
  );
}

function overInWords(why: Why): string {
  const first = why.first === why.pipeline ? "this one" : why.first;
  const when = why.starts_s == null ? "is unknown" : `is expected at ${seconds(why.starts_s)}, for ${first}`;
  return `${shareInWords({ project: why.project ?? "", share: why.share ?? 0, fair_share: why.fair_share ?? 0, is_over_share: true })}; the next start ${when}`;
}

function Changes({ why }: { why: Why }) {
  return (
    <ul class="would">
      {why.would_start_now_if.length === 0 && <li>No small change would start it now.</li>}
      {why.would_start_now_if.map((change) => (
        <li>would start now {inWords(change)}</li>
      ))}
    </ul>
  );
}

function inWords({ key, was, to }: Why["would_start_now_if"][number]): string {
  if (key === "hold") return "if it were released";
  return key === "without" ? `without ${to}` : `with ${key}: ${to} instead of ${was}`;
}

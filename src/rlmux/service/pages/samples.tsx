// What a pipeline's model said: trajectories by step, reward and words; one of them with its whole text. Text stays text.
import { get, useData } from "./api";
import { useEffect, useState } from "preact/hooks";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { visible } from "./log";
import { TokenLegend, Tokens } from "./tokens";
import { amend, usePlace } from "./place";
import type { Found, Sample, Samples } from "./shapes";
import { Table, type Column } from "./table";
import { count, reward } from "./words";

const FILTERS = ["step", "least", "most", "stop", "text", "sort"] as const;

export function Samples({ path, lane }: { path: string; lane: string }) {
  const { query } = usePlace();
  const asked = new URLSearchParams();
  for (const key of FILTERS) {
    const value = query.get(key);
    if (value) asked.set(key, value);
  }
  if (query.get("step") && !query.get("sort")) asked.set("sort", "step");
  const first = useData<Samples>(`${path}/samples?${asked}`, query.get("step") ? [] : [`pipeline:${lane}`]);
  const [further, setFurther] = useState<{ of: string; items: Found[]; next: string | null } | null>(null);
  const rest = further?.of === asked.toString() ? further : null;
  const items = [...(first.value?.items ?? []), ...(rest?.items ?? [])];
  const next = rest ? rest.next : (first.value?.next ?? null);
  const open = query.get("open");
  const last = first.value?.last_step ?? 0;
  const step = Number(query.get("step") ?? 0);
  const turn = (by: number) => amend({ step: String(Math.max(first.value?.first_step ?? 1, Math.min(last, (step || last + (by < 0 ? 1 : 0)) + by))), open: null });
  useKeys([
    { keys: "[", does: "step before", run: () => turn(-1) },
    { keys: "]", does: "step after", run: () => turn(1) },
  ]);
  const more = async () => {
    const page = await get<Samples>(`${path}/samples?${asked}${asked.size ? "&" : ""}cursor=${encodeURIComponent(next ?? "")}`);
    setFurther({ of: asked.toString(), items: [...(rest?.items ?? []), ...page.items], next: page.next });
  };
  const field = (key: string, placeholder: string, wide = false) => (
    <input
      {...(wide ? { "data-search": true, type: "search" } : { class: "narrow", inputMode: "decimal" as const })}
      placeholder={placeholder}
      aria-label={placeholder}
      value={query.get(key) ?? ""}
      onChange={(event) => amend({ [key]: event.currentTarget.value.trim() || null, open: null })}
    />
  );
  return (
    <>
      <div class="toolbar">
        {field("text", "words in prompt or answer   /", true)}
        <button onClick={() => turn(-1)} aria-label="step before">‹</button>
        {field("step", "any step")}
        <button onClick={() => turn(1)} aria-label="step after">›</button>
        {field("least", "reward from")}
        {field("most", "reward to")}
        <label>
          ended by{" "}
          <select value={query.get("stop") ?? ""} onChange={(event) => amend({ stop: event.currentTarget.value || null, open: null })}>
            <option value="">anything</option>
            <option value="stop">a stop</option>
            <option value="length">its length</option>
            <option value="failed">a failure</option>
            <option value="turns">its limit of turns</option>
            <option value="time">its limit of time</option>
          </select>
        </label>
        <label>
          order{" "}
          <select value={query.get("sort") ?? ""} onChange={(event) => amend({ sort: event.currentTarget.value || null })}>
            <option value="">by step</option>
            <option value="-reward">best first</option>
            <option value="reward">worst first</option>
            <option value="-tokens">longest first</option>
            <option value="tokens">shortest first</option>
          </select>
        </label>
      </div>
      <Trouble error={first.error} />
      <div class="samples">
        <div class="scroll" tabIndex={0}>
          {items.length > 0 && (
            <Table
              label="trajectories"
              columns={COLUMNS}
              rows={items}
              idOf={placeOf}
              isServers
              chosen={open}
              onChosen={(place) => amend({ open: place })}
              onRow={(one) => amend({ open: placeOf(one) })}
            />
          )}
          {first.value && items.length === 0 && <p class="empty">None meets that.</p>}
          {next && <button onClick={more}>More</button>}
        </div>
        {open && <One path={path} place={open} />}
      </div>
    </>
  );
}

/** A server's table: `sort` of the address is the menu's order too. */
const COLUMNS: readonly Column<Found>[] = [
  {
    id: "place",
    title: "place",
    kind: "mono",
    about: "step.prompt.sample",
    cell: (one) => (
      <button class="link" onClick={() => amend({ open: placeOf(one) })}>
        {placeOf(one)}
      </button>
    ),
  },
  { id: "reward", title: "reward", kind: "number", value: true, cell: (one) => reward(one.reward) },
  {
    id: "tokens",
    title: "tokens",
    kind: "number",
    value: true,
    cell: (one) => (
      <>
        {count(one.tokens)}
        {one.stop === "length" && <span title="cut by its length"> ✂</span>}
        {!["stop", "length"].includes(one.stop) && <span class="muted" title={ENDS[one.stop]}> {one.stop}</span>}
      </>
    ),
  },
  { id: "start", title: "answer", kind: "start", cell: (one) => visible(one.start) },
];

/** What ended a trajectory, by its stop reason. */
const ENDS: Readonly<Record<string, string>> = {
  stop: "a stop",
  length: "its length",
  failed: "a failure of its program or environment",
  turns: "its limit of turns",
  time: "its limit of time",
};

function placeOf(one: { step: number; prompt: number; sample: number }): string {
  return `${one.step}.${one.prompt}.${one.sample}`;
}

function One({ path, place }: { path: string; place: string }) {
  const found = useData<Sample>(`${path}/samples/${place.split(".").map(encodeURIComponent).join("/")}`);
  const [kept, keep] = useState<Sample | null>(null);
  useEffect(() => {
    if (found.value) keep(found.value);
  }, [found.value]);
  const one = found.value ?? (found.error ? null : kept);
  const { query } = usePlace();
  const isByToken = query.get("tokens") === "1";
  useKeys([{ keys: "t", does: "the trajectory by tokens, or as text", run: () => amend({ tokens: isByToken ? null : "1" }) }]);
  if (!one) return <Trouble error={found.error} />;
  const hasTokens = one.said.some((turn) => turn.tokens);
  return (
    <section class="sample" aria-label={`trajectory ${place}`}>
      <p class="small">
        reward <b>{reward(one.reward)}</b> · advantage {reward(one.advantage)} · {count(one.tokens)} tokens · {one.turns === 1 ? "1 turn" : `${one.turns} turns`} · ended by{" "}
        {ENDS[one.stop] ?? one.stop} · weights of version {one.first_version === one.last_version ? one.last_version : `${one.first_version} to ${one.last_version}`}
      </p>
      <Group one={one} />
      {hasTokens && (
        <button aria-pressed={isByToken} onClick={() => amend({ tokens: isByToken ? null : "1" })} title="by tokens (t)">
          By tokens
        </button>
      )}
      {isByToken && hasTokens && <TokenLegend />}
      <h2>Prompt</h2>
      <pre class="text" tabIndex={0}>{visible(one.prompt_text)}</pre>
      {one.said.map((turn) => (
        <>
          <h2>{turn.role === "model" ? "Model" : "Environment"}</h2>
          {isByToken && turn.tokens ? <Tokens tokens={turn.tokens} /> : <pre class={`text ${turn.role}`} tabIndex={0}>{visible(turn.text) || "(nothing that is text)"}</pre>}
          {turn.is_cut && <p class="muted small">There is more; this is its beginning.</p>}
        </>
      ))}
    </section>
  );
}

/** The rewards of all trajectories of the prompt, which the advantages compare. */
function Group({ one }: { one: Sample }) {
  const top = Math.max(1e-9, ...one.group.map((each) => Math.abs(each.reward)));
  return (
    <p class="group" aria-label="rewards of its prompt group">
      <span class="muted small">rewards of its prompt group</span>
      {one.group.map((each) => (
        <button
          class={each.sample === one.sample ? "chosen" : ""}
          title={`sample ${each.sample}: reward ${reward(each.reward)}, ${each.tokens} tokens`}
          aria-label={`sample ${each.sample}, reward ${reward(each.reward)}`}
          onClick={() => amend({ open: placeOf({ ...one, sample: each.sample }) })}
        >
          <i style={{ height: `${2 + (22 * Math.max(0, each.reward)) / top}px` }} />
        </button>
      ))}
    </p>
  );
}

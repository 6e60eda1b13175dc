// A file in the making: pasted, chosen or dropped, checked by the server, submitted once.
import { useRef, useState } from "preact/hooks";
import { Refusal, post } from "./api";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { announce } from "./live";
import type { Checked, Submitted } from "./shapes";
import { count, seconds } from "./words";

const EXAMPLE = `pipelines:
  - name: sort
    task: sort
    steps: 50`;
/** Kept while the page is open, so that a look elsewhere loses nothing. */
const kept = { text: "", source: "pasted.yaml" };

/** Put a text into the field before the page is opened. */
export function draft(text: string, source: string): void {
  [kept.text, kept.source] = [text, source];
}

export function Draft({ lane }: { lane: string }) {
  const [text, setText] = useState(kept.text);
  const [source, setSource] = useState(kept.source);
  const [isOver, setOver] = useState(false);
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState<Error | null>(null);
  const [checked, setChecked] = useState<Checked | null>(null);
  const [taken, setTaken] = useState<Submitted | null>(null);
  const area = useRef<HTMLTextAreaElement>(null);
  const key = useRef<{ of: string; is: string } | null>(null);
  useKeys([{ keys: "n", does: "a new file for the queue", run: () => area.current?.focus() }]);

  const change = (changed: string, from = source) => {
    [kept.text, kept.source] = [changed, from];
    setText(changed);
    setSource(from);
    setChecked(null);
    setTaken(null);
    setError(null);
  };
  const read = async (file: File | undefined) => {
    if (file) change(await file.text(), file.name);
  };
  const asking = async (ask: () => Promise<void>) => {
    setBusy(true);
    try {
      await ask();
      setError(null);
    } catch (caught) {
      setError(caught as Error);
      show(area.current, lineOf(caught));
    }
    setBusy(false);
  };
  const check = () =>
    asking(async () => {
      const found = await post<Checked>("/submissions", { lane, text, source, dry_run: true });
      setChecked(found);
      show(area.current, found.wrong?.line ?? null);
    });
  const submit = () =>
    asking(async () => {
      const body = { lane, text, source };
      const content = JSON.stringify(body);
      if (key.current?.of !== content) key.current = { of: content, is: newKey() }; // the same file sent again is the same submission
      setTaken(await post<Submitted>("/submissions", body, { "Idempotency-Key": key.current.is }));
      key.current = null;
      [kept.text, kept.source] = ["", "pasted.yaml"];
      setText("");
      setChecked(null);
      announce(`queue:${lane}`);
    });
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Escape") area.current?.blur();
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !text.trim()) return;
    event.preventDefault();
    void (event.shiftKey ? submit() : check());
  };
  return (
    <section aria-label="submit a file">
      <div
        class={`draft ${isOver ? "over" : ""}`}
        onDragOver={(event) => (event.preventDefault(), setOver(true))}
        onDragLeave={() => setOver(false)}
        onDrop={(event) => (event.preventDefault(), setOver(false), void read(event.dataTransfer?.files[0]))}
      >
        <textarea ref={area} class="mono" rows={text ? 14 : 6} spellcheck={false} readOnly={isBusy} aria-label="file to submit" placeholder={`Paste a file of pipelines, or drop one here:\n\n${EXAMPLE}`} value={text} onInput={(event) => change(event.currentTarget.value)} onKeyDown={onKey} />
      </div>
      <div class="toolbar">
        <input type="file" accept=".yaml,.yml" aria-label="choose a file" onChange={(event) => void read(event.currentTarget.files?.[0])} />
        <button disabled={isBusy || !text.trim()} onClick={check} title="Ctrl+Enter in the file">
          Check
        </button>
        <button disabled={isBusy || !text.trim()} onClick={submit} title="Ctrl+Shift+Enter in the file" aria-pressed={checked !== null && !checked.wrong}>
          {isBusy ? "Asking …" : `Submit to ${lane}`}
        </button>
        <span class="muted small">files with code or rows of their own: rlmux submit, which brings them along</span>
      </div>
      <Trouble error={error} />
      {checked?.wrong && (
        <p class="banner" role="alert">
          {checked.wrong.detail}
        </p>
      )}
      <Excerpt text={text} line={checked?.wrong ? checked.wrong.line : lineOf(error)} />
      {checked && !checked.wrong && (
        <p class="banner soft" role="status">
          It would be taken: {checked.pipelines.map((one) => `${one.pipeline} (${count(one.num_steps)} steps)`).join(", ")}.
          {!checked.is_lane_asked && " The lane's controller is away: whether the names are free is known when it is back."}
        </p>
      )}
      {taken && (
        <p class="banner soft" role="status">
          {taken.pipelines.map((one, at) => (
            <>
              {at > 0 && " · "}
              <b>{one.pipeline}</b>: {outcome(one)}
            </>
          ))}
        </p>
      )}
    </section>
  );
}

function outcome(one: Submitted["pipelines"][number]): string {
  if (one.outcome === "placed") return `placed on ${[...new Set([...(one.rollout_nodes ?? []), ...(one.train_nodes ?? [])])].join(", ")}`;
  if (one.outcome === "upcoming") return `comes at ${seconds(one.at_s)} of the run`;
  return one.reason ? `${one.outcome}: ${one.reason}` : one.outcome;
}

function lineOf(error: unknown): number | null {
  return error instanceof Refusal && typeof error.body.line === "number" ? error.body.line : null;
}

/** The wrong line with its neighbours. */
function Excerpt({ text, line }: { text: string; line: number | null }) {
  if (line === null) return null;
  const lines = text.split("\n");
  const first = Math.max(1, line - 2);
  return (
    <div class="excerpt" role="note" aria-label={`line ${line} is wrong`}>
      {lines.slice(first - 1, line + 2).map((each, at) => (
        <div class={first + at === line ? "wrong" : ""}>
          <i>{first + at === line ? "▸ " : "  "}{first + at}</i>
          {each || " "}
        </div>
      ))}
    </div>
  );
}

/** Choose the line in the field, so that it can be mended at once. */
function show(area: HTMLTextAreaElement | null, line: number | null): void {
  if (!area || line === null) return;
  const before = area.value.split("\n").slice(0, line - 1).join("\n");
  const start = before.length + (line > 1 ? 1 : 0);
  const end = area.value.indexOf("\n", start);
  area.focus();
  area.setSelectionRange(start, end < 0 ? area.value.length : end);
}

function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

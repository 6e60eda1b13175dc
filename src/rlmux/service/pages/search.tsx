// The field at the top: one search over the pipelines of all lanes, its results below it while it has the focus.
import { useEffect, useRef, useState } from "preact/hooks";
import { useData } from "./api";
import { Trouble } from "./frame";
import { useKeys } from "./keys";
import { of } from "./lane";
import { Labels } from "./parts";
import { address, go } from "./place";
import type { FoundRun, Search as Answer } from "./shapes";
import { count } from "./words";

/** Milliseconds without a key after which a search is sent. */
const PAUSE_MS = 150;

export function Search() {
  const [typed, setTyped] = useState("");
  const [words, setWords] = useState("");
  const [chosen, setChosen] = useState(0);
  const [isOpen, setOpen] = useState(false);
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => {
    const timer = setTimeout(() => setWords(/[\p{L}\p{N}]/u.test(typed) ? typed : ""), PAUSE_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  useKeys([{ keys: "s", does: "search all runs", run: () => field.current?.focus() }]);
  const found = useData<Answer>(words ? `/search?q=${encodeURIComponent(words)}` : null);
  const rows = found.value?.items ?? [];
  const open = (row: FoundRun | undefined) => {
    if (!row) return;
    field.current?.blur();
    go(address(`/pipelines/${of(row.lane, row.name)}`));
  };
  const press = (event: KeyboardEvent) => {
    if (event.key === "Escape") field.current?.blur();
    else if (event.key === "Enter") open(rows[chosen]);
    else if (event.key === "ArrowDown") setChosen(Math.min(rows.length - 1, chosen + 1));
    else if (event.key === "ArrowUp") setChosen(Math.max(0, chosen - 1));
    else return;
    event.preventDefault();
  };
  return (
    <div class="search" role="search">
      <input
        ref={field}
        type="search"
        aria-label="search all runs"
        placeholder="search all runs   s"
        maxLength={512}
        value={typed}
        onInput={(event) => (setTyped(event.currentTarget.value), setChosen(0))}
        onFocus={() => setOpen(true)}
        onBlur={() => setOpen(false)}
        onKeyDown={press}
      />
      {isOpen && words && (
        <div class="found" onMouseDown={(event) => event.preventDefault()}>
          <Trouble error={found.error} />
          {rows.map((row, index) => (
            <a key={of(row.lane, row.name)} class={index === chosen ? "chosen" : ""} href={address(`/pipelines/${of(row.lane, row.name)}`)} onClick={() => field.current?.blur()}>
              <b>{row.name}</b> <span class={`small state ${row.status}`}>{row.status}</span> <span class="muted small">{row.lane}</span>
              <Labels labels={row.labels} />
              {row.matches.map(({ field: name, text }) => (
                <div class="why">
                  {name} <b>{text}</b>
                </div>
              ))}
            </a>
          ))}
          {found.value && <p class="muted small">{found.value.total === 0 ? "No pipeline matches." : `${count(rows.length)} of ${count(found.value.total)}, newest first`}</p>}
        </div>
      )}
    </div>
  );
}

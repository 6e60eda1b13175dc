// What stays around every page: the rail, the lane, how fresh things are, light or dark, the keys.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Refusal, post, useData } from "./api";
import { allKeys, useKeys } from "./keys";
import { ShownLane, chosenLane, of } from "./lane";
import { announce, follow, usePulse } from "./live";
import { address, go, laneOf, usePlace } from "./place";
import { Search } from "./search";
import type { Page } from "./kinds";
import type { Lane, NewLane, OtherLane, Timeline, WhoAmI } from "./shapes";
import { ago, count, reward, seconds } from "./words";

/** Rows behind the log from which on a page says so; a live one is always a few behind. */
const MANY_ROWS = 5000;

const PLACES = [
  ["/fleet", "Fleet", "f"],
  ["/timeline", "Timeline", "t"],
  ["/pipelines", "Pipelines", "p"],
  ["/queue", "Queue", "q"],
  ["/shares", "Shares", "s"],
  ["/compare", "Compare", "c"],
  ["/whatif", "What if", "w"],
] as const;
type AnyLane = Lane | NewLane | OtherLane;

/** Whether the lane has an index, and so its pages. */
const isShown = (lane: AnyLane): lane is Lane => lane.state !== "unknown" && lane.state !== "other_version";

const OF_ADMINS = [["/audit", "Audit", "a"]] as const;

export function Frame({ children }: { children: ComponentChildren }) {
  const place = usePlace();
  const { path } = place;
  const lanes = useData<Page<AnyLane>>("/lanes", ["lane:*"]);
  const chosen = chosenLane(lanes.value?.items ?? [], laneOf(place));
  const lane = chosen && isShown(chosen) ? chosen : null;
  const timeline = useData<Timeline>(lane && `/timeline/${of(lane.name)}`, lane ? [`timeline:${lane.name}`] : []);
  const who = useData<WhoAmI>("/whoami");
  const places = who.value?.scopes.includes("admin") ? [...PLACES, ...OF_ADMINS] : PLACES;
  const help = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (chosen) follow(chosen.name);
  }, [chosen?.name]);
  useEffect(() => {
    if (chosen?.state !== "unknown") return;
    const timer = setInterval(() => announce(`lane:${chosen.name}`), 1000); // the stream has no word of it yet
    return () => clearInterval(timer);
  }, [chosen?.name, chosen?.state]);
  useKeys([
    ...places.map(([to, name, key]) => ({ keys: `g ${key}`, does: name, run: () => go(address(to)) })),
    { keys: "/", does: "search this page", run: () => document.querySelector<HTMLInputElement>("[data-search]")?.focus() },
    { keys: "?", does: "this help", run: () => help.current?.showModal() },
    { keys: "T", does: "light or dark", run: turnTheme },
  ]);
  const pipelines = timeline.value?.pipelines;
  return (
    <div class="frame">
      <nav class="rail" aria-label="pages">
        <div class="brand">
          <img src="/favicon.svg" alt="" /> rlmux
        </div>
        {places.map(([to, name]) => (
          <a href={address(to)} {...(path === to || path.startsWith(`${to}/`) ? { "aria-current": "page" as const } : {})}>
            {name}
          </a>
        ))}
      </nav>
      <header class="top">
        {chosen && <LanePicker lane={chosen} lanes={lanes.value?.items ?? []} />}
        <Search />
        <span class="space" />
        {lane && <Freshness lane={lane} />}
        <button onClick={turnTheme} title="light or dark (T)" aria-label="light or dark">
          ◐
        </button>
        <button onClick={() => help.current?.showModal()} title="keys (?)" aria-label="keys">
          ?
        </button>
        <button onClick={leave}>Log out</button>
      </header>
      <main>
        <Trouble error={lanes.error ?? timeline.error} />
        {lane?.banner && <p class="banner">{lane.banner}</p>}
        {chosen?.state === "other_version" && <Kept lane={chosen} />}
        {chosen?.state === "unknown" && <p class="banner soft">{chosen.banner}. The page opens once the log has been read.</p>}
        {lane && lane.is_indexing && lane.seq - lane.index_seq > MANY_ROWS && <p class="banner soft">The log is being read: {count(lane.index_seq)} of {count(lane.seq)} rows are shown.</p>}
        {lanes.value && !chosen && <NoRun />}
        {lane && pipelines && <ShownLane.Provider value={{ lane, lanes: (lanes.value?.items ?? []).filter(isShown), pipelines }}>{children}</ShownLane.Provider>}
      </main>
      <dialog ref={help}>
        <Keys />
      </dialog>
    </div>
  );
}

/** What is left of a lane whose log another version wrote: the figures and files of its last report. */
function Kept({ lane }: { lane: OtherLane }) {
  return (
    <>
      <div class="heading">
        <h1>{lane.name}</h1>
      </div>
      <p class="banner">{lane.banner}</p>
      {lane.kept && (
        <>
          <h2>
            Its last report <small>{seconds(lane.kept.makespan_s)}</small>
          </h2>
          <table>
            <thead>
              <tr>
                <th>pipeline</th>
                <th>status</th>
                <th class="number">steps</th>
                <th class="number">first reward</th>
                <th class="number">last reward</th>
              </tr>
            </thead>
            <tbody>
              {lane.kept.pipelines.map((row) => (
                <tr key={row.name}>
                  <td>{row.name}</td>
                  <td>{row.status}</td>
                  <td class="number">{row.steps}</td>
                  <td class="number">{reward(row.reward_first)}</td>
                  <td class="number">{reward(row.reward_last)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </>
      )}
      {lane.files.length > 0 && (
        <p>
          Save:{" "}
          {lane.files.map((file) => (
            <>
              <a href={`/api/v1/lanes/${of(lane.name)}/${file}`} download={file}>
                {file}
              </a>{" "}
            </>
          ))}
        </p>
      )}
    </>
  );
}

function NoRun() {
  return (
    <>
      <div class="heading">
        <h1>No run is here yet</h1>
      </div>
      <p class="empty">
        A folder that <code class="mono">rlmux run</code> writes below the one that is served appears by itself.
      </p>
    </>
  );
}

function LanePicker({ lane, lanes }: { lane: { name: string }; lanes: { name: string }[] }) {
  const { path } = usePlace();
  const at = path.startsWith("/pipelines/") ? "/pipelines" : path; // another lane has other pipelines
  return (
    <label>
      <span class="muted">lane</span>
      <select value={lane.name} onChange={(event) => go(address(at, { lane: event.currentTarget.value }))}>
        {lanes.map((each) => (
          <option value={each.name}>{each.name}</option>
        ))}
      </select>
    </label>
  );
}

/** How old what is shown is, in words; a run that is over does not age. */
function Freshness({ lane }: { lane: Lane }) {
  const pulse = usePulse();
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick((count) => count + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  const age_s = Math.max(0, Date.now() - pulse.heard_ms) / 1000;
  const isLost = pulse.state === "lost";
  const words = isLost
    ? `no connection${pulse.heard_ms ? `, last heard ${ago(age_s)}` : ""}`
    : lane.state === "over"
      ? "run is over"
      : lane.state === "stopped"
        ? "run is stopped"
        : lane.state === "resuming"
          ? "run is resuming"
          : lane.state === "not_answering"
            ? "does not answer"
            : pulse.state === "connecting"
              ? "connecting"
              : `live · ${ago(age_s)}`;
  return (
    <span class={`pulse ${isLost ? "lost" : lane.state === "running" ? pulse.state : ""}`} role="status">
      <i /> {words}
    </span>
  );
}

export function Trouble({ error }: { error: Error | null | undefined }) {
  if (!error || (error instanceof Refusal && error.status === 401)) return null;
  const accepted = error instanceof Refusal && error.body.accepted ? `; accepted: ${String(error.body.accepted)}` : "";
  return (
    <p class="banner" role="alert">
      {error instanceof Refusal ? error.message : "The service cannot be reached."}
      {accepted}
    </p>
  );
}

function Keys() {
  return (
    <>
      <h1>Keys</h1>
      <table>
        {allKeys().map((key) => (
          <tr>
            <td>
              {key.keys.split(" ").map((one) => (
                <>
                  <kbd>{one === " " ? "space" : one}</kbd>{" "}
                </>
              ))}
            </td>
            <td>{key.does}</td>
          </tr>
        ))}
      </table>
      <form method="dialog">
        <p>
          <button>Close</button>
        </p>
      </form>
    </>
  );
}

const THEME = "rlmux-theme";

/** The choice of this browser; without one the system's is taken. */
export function setTheme(): void {
  const chosen = localStorage.getItem(THEME);
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

function turnTheme(): void {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
  localStorage.setItem(THEME, isDark ? "light" : "dark");
  setTheme();
}

async function leave(): Promise<void> {
  await post("/logout", {}).catch(() => undefined);
  go("/login");
}

// The URL is the state: every view of a page can be sent to a colleague, and Back goes back.
//
//   /timeline?lane=demo&t0=12.5&t1=60      path names the page, the query its state
import { useEffect, useState } from "preact/hooks";

export interface Place {
  path: string;
  query: URLSearchParams;
}

type Changes = Record<string, string | null>;

const CHANGED = "rlmux-place";

function here(): Place {
  return { path: location.pathname, query: new URLSearchParams(location.search) };
}

/** The lane that a place is about: the one in a pipeline's address, else the one in the query. */
export function laneOf({ path, query }: Place): string | null {
  const [, page, lane, name] = path.split("/");
  return page === "pipelines" && lane && name ? decodeURIComponent(lane) : query.get("lane");
}

/** The address of a page; null takes a key out. The lane stays as it is unless it is named, or a pipeline's address has it. */
export function address(path: string, changes: Changes = {}): string {
  const query = new URLSearchParams();
  const lane = laneOf(here());
  if (lane !== null && laneOf({ path, query }) === null) query.set("lane", lane);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null) query.delete(key);
    else query.set(key, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export function go(to: string): void {
  history.pushState(null, "", to);
  dispatchEvent(new Event(CHANGED));
}

/** Change the state of this page without a step in the browser's history. */
export function amend(changes: Changes): void {
  const query = here().query;
  for (const [key, value] of Object.entries(changes)) {
    if (value === null) query.delete(key);
    else query.set(key, value);
  }
  const text = query.toString();
  const to = location.pathname + (text ? `?${text}` : "");
  if (to === location.pathname + location.search) return;
  history.replaceState(null, "", to);
  dispatchEvent(new Event(CHANGED));
}

/** Where the browser is; the component is drawn again when that changes. */
export function usePlace(): Place {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const update = () => setPlace(here());
    addEventListener("popstate", update);
    addEventListener(CHANGED, update);
    return () => {
      removeEventListener("popstate", update);
      removeEventListener(CHANGED, update);
    };
  }, []);
  return place;
}

/** Links within the pages change the place instead of loading a document. */
export function followLinks(): void {
  document.addEventListener("click", (event) => {
    if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = event.target instanceof Element ? event.target.closest("a") : null;
    if (!link || link.origin !== location.origin || link.target || link.hasAttribute("download")) return;
    if (link.pathname.startsWith("/api/")) return;
    event.preventDefault();
    go(link.pathname + link.search);
  });
}

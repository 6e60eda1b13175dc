// Requests to the service. Every page reads the same documented addresses as the command line does.
//
//   useData("/lanes/demo", ["lane:demo"])   reads at once, and again when the stream says that one of these changed;
//                                           a hidden tab reads when it is shown
import type { Page } from "./kinds";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { listen } from "./live";
import { go } from "./place";

const BASE = "/api/v1";

/** What the service answered instead of data: what is wrong, where, and what would be accepted. */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    detail: string,
    readonly body: Record<string, unknown>,
  ) {
    super(detail);
  }
}

async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const answer = await fetch(BASE + path, { credentials: "same-origin", ...options });
  if (answer.ok) return answer;
  if (answer.status === 401 && location.pathname !== "/login") {
    go(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  }
  const body = await answer.json().catch(() => ({}));
  throw new Refusal(answer.status, String(body.detail ?? body.title ?? `the service answered ${answer.status}`), body);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await request(path, signal ? { signal } : {})).json() as Promise<T>;
}

export async function getText(path: string): Promise<string> {
  return (await request(path)).text();
}

export async function getBytes(path: string, signal?: AbortSignal): Promise<ArrayBuffer> {
  return (await request(path, signal ? { signal } : {})).arrayBuffer();
}

export async function post<T>(path: string, body: unknown, headers: Record<string, string> = {}): Promise<T> {
  const answer = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
  });
  return (answer.status === 204 ? null : await answer.json()) as T;
}

export interface Data<T> {
  value: T | null;
  error: Error | null;
}

/** At most one request of a component per this many milliseconds, however fast things change. */
const PAUSE_MS = 2000;

/** What an address answers; null is "ask for nothing". The last answer stays while the next is on its way. */
export function useData<T>(path: string | null, keys: readonly string[] = [], read: (path: string) => Promise<T> = get): Data<T> {
  const [data, setData] = useState<Data<T> & { path: string | null }>({ value: null, error: null, path: null });
  const wanted = keys.join(" ");
  const reader = useRef(read);
  useEffect(() => {
    if (path === null) return;
    let isOn = true;
    let timer = 0;
    let asked_ms = -PAUSE_MS;
    let isDue = false;
    const ask = async () => {
      clearTimeout(timer);
      timer = 0;
      isDue = false;
      asked_ms = performance.now();
      try {
        const value = await reader.current(path);
        if (isOn) setData({ value, error: null, path });
      } catch (error) {
        if (isOn) setData((before) => ({ value: before.path === path ? before.value : null, error: error as Error, path }));
      }
    };
    const again = () => {
      if (document.hidden) isDue = true;
      else if (timer === 0) timer = setTimeout(ask, Math.max(0, asked_ms + PAUSE_MS - performance.now()));
    };
    const show = () => {
      if (isDue && !document.hidden) void ask();
    };
    void ask();
    document.addEventListener("visibilitychange", show);
    const stop = wanted ? listen(({ key, isOwn }) => isAbout(key, wanted.split(" ")) && (isOwn ? void ask() : again())) : undefined;
    return () => {
      isOn = false;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", show);
      stop?.();
    };
  }, [path, wanted]);
  return data.path === path ? data : { value: null, error: null };
}

function isAbout(key: string, wanted: string[]): boolean {
  return key === "reset" || wanted.some((each) => each === key || (each.endsWith("*") && key.startsWith(each.slice(0, -1))));
}

/** The pages of a list after its first one, which are asked for one by one. */
export function useFurther<T>(path: string, first: Page<T> | null, filters: string) {
  const [further, setFurther] = useState<Page<T> | null>(null);
  useEffect(() => setFurther(null), [path, filters]);
  const next = (further ?? first)?.next ?? null;
  const more = async () => {
    const page = await get<Page<T>>(`${path}?${filters}&cursor=${encodeURIComponent(next ?? "")}`);
    setFurther({ items: [...(further?.items ?? []), ...page.items], next: page.next });
  };
  const rows = useMemo(() => [...(first?.items ?? []), ...(further?.items ?? [])], [first, further]);
  return { rows, more: next === null ? null : more };
}

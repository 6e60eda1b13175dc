// The keyboard: one table of what each key does, which is also the help that `?` shows.
//
// A page adds its keys while it is shown; keys typed into a field are the field's own.
import { useEffect, useRef } from "preact/hooks";

export interface Key {
  /** A key's name as the browser gives it, or `g f` for one after the other. */
  keys: string;
  does: string;
  run: () => void;
}

const groups = new Set<{ current: Key[] }>();
let first: { key: string; at: number } | null = null;

export function useKeys(keys: Key[]): void {
  const group = useRef(keys);
  group.current = keys;
  useEffect(() => {
    groups.add(group);
    return () => void groups.delete(group);
  }, []);
}

/** Every key that works at this moment. */
export function allKeys(): Key[] {
  return [...groups].flatMap((group) => group.current);
}

export function listenToKeys(): void {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || isPressing(event)) return;
    const before = first && event.timeStamp - first.at < 1500 ? `${first.key} ` : "";
    const found = allKeys().find((each) => each.keys === before + event.key) ?? allKeys().find((each) => each.keys === event.key);
    first = found ? null : { key: event.key, at: event.timeStamp };
    if (!found) return;
    event.preventDefault();
    found.run();
  });
}

/** Enter and space on a button or a link are its own. */
function isPressing(event: KeyboardEvent): boolean {
  return (event.key === "Enter" || event.key === " ") && event.target instanceof Element && event.target.closest("a, button, summary, [role=button]") !== null;
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName));
}

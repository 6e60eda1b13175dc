// What the types of the answers, in shapes.ts, have in common.

export type Kind = "busy" | "switch" | "bubble" | "idle";
export const KINDS: readonly Kind[] = ["busy", "switch", "bubble", "idle"];

export interface Page<T> {
  items: T[];
  next: string | null;
}

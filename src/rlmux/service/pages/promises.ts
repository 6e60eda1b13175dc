// What sharing leaves of a pipeline's weights, in words: the class that a probe of its engines found.

const WORDS: Record<string, readonly [string, string]> = {
  exact: ["identical", "The same weights, bit for bit, alone, shared, paused, moved or resumed. A probe of its engines found this; the command of the tab Weights compares."],
  replayable: ["identical if replayed", "The same weights, bit for bit, if the same schedule is repeated. A probe of its engines found this; the command of the tab Weights compares."],
  statistical: ["of one distribution", "What runs beside it changes last bits of its sampling, not the distribution. A probe of its engines found this."],
};

export function promiseWord(promise: string | null): string {
  return promise === null ? "–" : (WORDS[promise]?.[0] ?? promise);
}

export function promiseTitle(promise: string | null): string {
  return promise === null ? "Its engines are probed before its first step." : (WORDS[promise]?.[1] ?? "");
}

// What a user does to one pipeline: hold, release, rank, cancel, retry. The server says what came of it, and that is shown.
import { useState } from "preact/hooks";
import { post } from "./api";
import { of } from "./lane";
import { announce } from "./live";

export interface Acts {
  /** What the last act of this page came to; an error is shown as such. */
  said: string | null;
  error: Error | null;
  tell: (name: string, verb: "cancel" | "retry" | "hold" | "release" | "rank" | "park" | "unpark", body?: Record<string, number>) => void;
}

export function useActs(lane: string): Acts {
  const [said, setSaid] = useState<string | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const tell: Acts["tell"] = async (name, verb, body = {}) => {
    try {
      const answer = await post<{ pipeline: string; outcome: string }>(`/pipelines/${of(lane, name)}/${verb}`, body);
      setSaid(`${answer.pipeline}: ${answer.outcome}`);
      setError(null);
    } catch (caught) {
      setError(caught as Error);
      setSaid(null);
    }
    announce(`queue:${lane}`);
    announce(`pipeline:${lane}`);
  };
  return { said, error, tell };
}

/** A button that asks once more before it ends a pipeline. */
export function CancelButton({ name, tell }: { name: string; tell: Acts["tell"] }) {
  const [isSure, setSure] = useState(false);
  return isSure ? (
    <button class="bad" onClick={() => tell(name, "cancel")} onBlur={() => setSure(false)} ref={(button) => button?.focus()}>
      End {name}?
    </button>
  ) : (
    <button onClick={() => setSure(true)}>Cancel</button>
  );
}

/** A failed pipeline goes on from its newest checkpoint, as soon as there is room. */
export function RetryButton({ name, tell }: { name: string; tell: Acts["tell"] }) {
  return (
    <button title="goes on from its newest checkpoint, as soon as there is room" onClick={() => tell(name, "retry")}>
      Retry
    </button>
  );
}

// What a user does to one pipeline: hold, release, rank, cancel, retry, remove. The server says what came of it, and that is shown.
import { useState } from "preact/hooks";
import { post } from "./api";
import { of } from "./lane";
import { announce } from "./live";
import { size } from "./words";

export interface Acts {
  /** What the last act of this page came to; an error is shown as such. */
  said: string | null;
  error: Error | null;
  tell: (name: string, verb: "cancel" | "retry" | "remove" | "hold" | "release" | "rank" | "park" | "unpark", body?: Record<string, number | boolean>) => void;
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

/** A button that removes the files of a pipeline that is over, once it has said how many bytes they are and asked again. */
export function RemoveButton({ lane, name, tell }: { lane: string; name: string; tell: Acts["tell"] }) {
  const [bytes, setBytes] = useState<number | null>(null);
  const ask = async () => setBytes((await post<{ freed_bytes: number }>(`/pipelines/${of(lane, name)}/remove`, { dry_run: true })).freed_bytes);
  return bytes === null ? (
    <button title="its checkpoints, samples and output; its steps and what it used stay" onClick={() => void ask().catch(() => tell(name, "remove", { dry_run: true }))}>
      Remove
    </button>
  ) : (
    <button class="bad" onClick={() => (setBytes(null), tell(name, "remove"))} onBlur={() => setBytes(null)} ref={(button) => button?.focus()}>
      Remove {size(bytes)} of {name}?
    </button>
  );
}

// What is kept of a pipeline's weights: checkpoints and where they lie, the command that takes them out, the receipt.
import { useState } from "preact/hooks";
import { useData } from "./api";
import { Trouble } from "./frame";
import type { Checkpoints } from "./shapes";
import { count, size } from "./words";

export function Weights({ path, lane, name }: { path: string; lane: string; name: string }) {
  const kept = useData<Checkpoints>(`${path}/checkpoints`, [`pipeline:${lane}`]);
  if (!kept.value) return <Trouble error={kept.error} />;
  const { run, items } = kept.value;
  return (
    <>
      <h2>
        Checkpoints <small>on the server's machine, newest first</small>
      </h2>
      {items.length === 0 && <p class="empty">None is kept yet. The first one appears here when it is on disk.</p>}
      {items.length > 0 && (
        <table class="bars">
          <tbody>
            {[...items].reverse().map((one) => (
              <tr key={one.step}>
                <td class="number">step {count(one.step)}</td>
                <td class="number">{size(one.size_bytes)}</td>
                <td class="mono">{one.path}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      <h2>
        Export <small>a folder that transformers and vLLM load, of the newest checkpoint or of --step N</small>
      </h2>
      <Command words={["rlmux", "export", run, name, "--to", "hf", "--out", `${name}-weights`]} />
      <h2>
        Receipt <small>trains a sample of its steps again, alone, and compares the weights bit by bit; --all: every step</small>
      </h2>
      <Command words={["rlmux", "verify", run, name]} />
    </>
  );
}

/** A command to be run on the server's machine, and a button that copies it. */
function Command({ words }: { words: string[] }) {
  const [isCopied, setCopied] = useState(false);
  const line = words.map((word) => (/^[\w./=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");
  const copy = async () => {
    await navigator.clipboard.writeText(line);
    setCopied(true);
  };
  return (
    <p class="toolbar">
      <code class="mono">{line}</code>
      <button onClick={() => void copy()}>{isCopied ? "Copied" : "Copy"}</button>
    </p>
  );
}

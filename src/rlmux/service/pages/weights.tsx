// What is kept of a pipeline's weights: checkpoints and where they lie, the command that takes them out, the receipt.
import { useState } from "preact/hooks";
import { useData } from "./api";
import { Trouble } from "./frame";
import { Term } from "./parts";
import type { Checkpoints } from "./shapes";
import { Table, type Column } from "./table";
import { count, size } from "./words";

type Checkpoint = Checkpoints["items"][number];

const CHECKPOINTS: readonly Column<Checkpoint>[] = [
  { id: "step", title: "step", kind: "number", value: (one) => one.step, cell: (one) => count(one.step) },
  { id: "size", title: "size", kind: "number", value: (one) => one.size_bytes, cell: (one) => size(one.size_bytes) },
  { id: "path", title: "folder", kind: "mono", cell: (one) => one.path },
];

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
        <Table name="checkpoints" label="checkpoints" class="checkpoints" columns={CHECKPOINTS} rows={[...items].reverse()} idOf={(one) => String(one.step)} />
      )}
      <h2>
        Export <small>a folder that transformers and vLLM load, of the newest checkpoint or of --step N</small>
      </h2>
      <Command words={["rlmux", "export", run, name, "--to", "hf", "--out", `${name}-weights`]} />
      <h2>
        <Term word="receipt">Receipt</Term> <small>trains a sample of its steps again, alone, and compares the weights bit by bit; --all: every step</small>
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

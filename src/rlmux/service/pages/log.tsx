// What a pipeline's workers wrote: the end first, older parts on demand. Text stays text; control characters show as signs.
import { useEffect, useState } from "preact/hooks";
import { get } from "./api";
import { Trouble } from "./frame";
import { amend, usePlace } from "./place";

interface Piece {
  offset: number;
  next_offset: number;
  size: number;
  text: string;
  is_end: boolean;
}

const BYTES = 65536;
const SEARCHED_BYTES = 16 << 20;

export function Log({ path, isOver }: { path: string; isOver: boolean }) {
  const { query } = usePlace();
  const grep = query.get("grep") ?? "";
  const [pieces, setPieces] = useState<Piece[]>([]);
  const [error, setError] = useState<Error | null>(null);
  const reach = grep ? SEARCHED_BYTES : BYTES;
  const ask = async (offset: number, limit = reach) => {
    try {
      const filter = grep ? `&grep=${encodeURIComponent(grep)}` : "";
      const piece = await get<Piece>(`${path}/logs?offset=${offset}&limit=${limit}${filter}`);
      setError(null);
      return piece;
    } catch (trouble) {
      setError(trouble as Error);
      return null;
    }
  };
  useEffect(() => {
    setPieces([]);
    void ask(-reach).then((piece) => piece && setPieces([piece]));
  }, [path, grep]);
  useEffect(() => {
    const last = pieces.at(-1);
    if (isOver || !last) return;
    const timer = setTimeout(async () => {
      const piece = await ask(last.next_offset);
      if (piece) setPieces([...pieces, piece].filter((each, index) => each.text || index === pieces.length));
    }, 2000);
    return () => clearTimeout(timer);
  }, [pieces, isOver]);
  const start = pieces[0]?.offset ?? 0;
  const older = async () => {
    const piece = await ask(Math.max(0, start - reach), Math.min(reach, start));
    if (piece) setPieces([piece, ...pieces]);
  };
  return (
    <>
      <div class="toolbar">
        <input data-search type="search" placeholder="lines that contain   /" aria-label="lines that contain" value={grep} onInput={(event) => amend({ grep: event.currentTarget.value || null })} />
        {start > 0 && <button onClick={older}>{grep ? "Search older" : "Older"}</button>}
      </div>
      <Trouble error={error} />
      <pre class="text" tabIndex={0}>{visible(pieces.map((piece) => piece.text).join("")) || (grep ? none(start, pieces.at(-1)?.size ?? 0) : "Its workers have written nothing.")}</pre>
    </>
  );
}

/** What is said where no line contains the words: how much of the log was searched. */
function none(start: number, size: number): string {
  return start > 0 ? `No line of the newest ${((size - start) / 1e6).toFixed(1)} MB of ${(size / 1e6).toFixed(1)} contains that.` : "No line contains that.";
}

/** Colour codes are dropped, other control characters become the signs for them. */
export function visible(text: string): string {
  return text.replace(/\u001b\[[0-9;]*m/g, "").replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)));
}

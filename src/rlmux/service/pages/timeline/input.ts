// Pointer and wheel on the board.
//
//   drag                  pan                    wheel          zoom at the pointer; sideways, or with shift: pan
//   shift + drag          measure                double click   zoom in
//   drag on the overview  move the window        click          what happened there
import type { Board } from "./board";
import { AXIS, GUTTER, Scale } from "./rows";

interface Actions {
  onMeasured: () => void;
  onClick: (x: number, y: number) => void;
}

type Grip = { kind: "pan" | "measure" | "overview"; x: number; y: number; t0: number; t1: number; at_s: number; moved: boolean };

const CLICK_PIXELS = 3;

export function listenToPointer(canvas: HTMLCanvasElement, board: Board, actions: Actions): () => void {
  let grip: Grip | null = null;
  const place = (event: MouseEvent) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const down = (event: PointerEvent) => {
    if (event.button !== 0) return;
    const { x, y } = place(event);
    const kind = event.shiftKey ? "measure" : y < AXIS.y ? "overview" : "pan";
    grip = { kind, x, y, ...board.span, at_s: board.scale.at(x), moved: false };
    if (kind === "overview") moveWindow(board, x);
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add(kind === "measure" ? "measuring" : "held");
  };
  const move = (event: PointerEvent) => {
    const { x, y } = place(event);
    if (!grip) return board.point({ x, y });
    grip.moved ||= Math.hypot(x - grip.x, y - grip.y) > CLICK_PIXELS;
    if (grip.kind === "overview") moveWindow(board, x);
    else if (grip.kind === "measure") measure(board, grip.at_s, board.scale.at(x));
    else if (grip.moved) pan(board, grip, x);
  };
  const up = (event: PointerEvent) => {
    const held = grip;
    grip = null;
    canvas.classList.remove("held", "measuring");
    if (!held) return;
    if (held.kind === "measure") actions.onMeasured();
    else if (!held.moved && held.kind === "pan") actions.onClick(place(event).x, place(event).y);
  };
  const wheel = (event: WheelEvent) => {
    event.preventDefault();
    const seconds = board.span.t1 - board.span.t0;
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      const shift_s = (sideways / board.plotWidth) * seconds;
      return board.setSpan({ t0: board.span.t0 + shift_s, t1: board.span.t1 + shift_s });
    }
    zoom(board, Math.exp(event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.0018)), board.scale.at(Math.max(GUTTER, place(event).x)));
  };
  const leave = () => board.point(null);
  const twice = (event: MouseEvent) => zoom(board, 0.5, board.scale.at(place(event).x));
  canvas.addEventListener("pointerdown", down);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", twice);
  canvas.addEventListener("wheel", wheel, { passive: false });
  return () => {
    for (const [name, listener] of Object.entries({ pointerdown: down, pointermove: move, pointerup: up, pointercancel: up, pointerleave: leave, dblclick: twice, wheel })) {
      canvas.removeEventListener(name, listener as EventListener);
    }
  };
}

/** Zoom by a factor around a moment, or around the middle. */
export function zoom(board: Board, factor: number, at_s = (board.span.t0 + board.span.t1) / 2): void {
  const { t0, t1 } = board.span;
  board.setSpan({ t0: at_s - (at_s - t0) * factor, t1: at_s + (t1 - at_s) * factor });
}

/** Pan by a part of the view. */
export function shift(board: Board, part: number): void {
  const { t0, t1 } = board.span;
  board.setSpan({ t0: t0 + (t1 - t0) * part, t1: t1 + (t1 - t0) * part });
}

function pan(board: Board, grip: Grip, x: number): void {
  const shift_s = ((grip.x - x) / board.plotWidth) * (grip.t1 - grip.t0);
  board.setSpan({ t0: grip.t0 + shift_s, t1: grip.t1 + shift_s });
}

function measure(board: Board, from_s: number, to_s: number): void {
  const { start_s, end_s } = board.timeline;
  const inside = (at_s: number) => Math.min(Math.max(at_s, start_s), end_s);
  board.setMeasured({ t0: inside(Math.min(from_s, to_s)), t1: inside(Math.max(from_s, to_s)) });
}

/** The window's middle goes to a place on the overview. */
function moveWindow(board: Board, x: number): void {
  const { start_s, end_s } = board.timeline;
  const at_s = new Scale({ t0: start_s, t1: end_s }, GUTTER, board.plotWidth).at(x);
  const half_s = (board.span.t1 - board.span.t0) / 2;
  board.setSpan({ t0: at_s - half_s, t1: at_s + half_s });
}

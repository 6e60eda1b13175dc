// The strip above the timeline: how all devices together spent the whole run, and which part of it is in view.
import type { Colours } from "../colours";
import type { Tiles } from "./binary";
import type { Span } from "./feed";
import type { Scale } from "./rows";

interface Strip {
  tiles: Tiles;
  picture: HTMLCanvasElement;
}

export function drawOverview(context: CanvasRenderingContext2D, strips: Strip[], whole: Scale, view: Span, { y, height }: { y: number; height: number }, colours: Colours): void {
  const right = whole.left + whole.width;
  context.fillStyle = colours.track;
  context.fillRect(whole.left, y, whole.width, height);
  context.save();
  context.beginPath();
  context.rect(whole.left, y, whole.width, height);
  context.clip();
  for (const { tiles, picture } of strips) {
    const x = whole.x(tiles.first_bucket * tiles.bucket_s);
    const width = tiles.num_buckets * tiles.bucket_s * whole.perSecond;
    context.imageSmoothingEnabled = width < tiles.num_buckets;
    context.drawImage(picture, x, y, width, height);
  }
  context.restore();
  const [begin, end] = [Math.max(whole.left, whole.x(view.t0)), Math.min(right, whole.x(view.t1))];
  context.fillStyle = colours.paper;
  context.globalAlpha = 0.66;
  context.fillRect(whole.left, y, begin - whole.left, height);
  context.fillRect(end, y, right - end, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1;
  context.strokeRect(begin + 0.5, y + 0.5, Math.max(2, end - begin - 1), height - 1);
  context.font = "11px system-ui,sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colours.muted;
  context.fillText("all devices", 10, y + height / 2);
}

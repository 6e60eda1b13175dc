// Small pieces that several pages draw: a pipeline's name with its colour, figures in a row, a sparkline, a stacked bar.
import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";
import { timeOfDay } from "./clock";
import { LEGEND, type Paint } from "./colours";
import { colourOf, of, useShown } from "./lane";
import { address } from "./place";
import { NONE, TERMS, type TermName, count, percent, seconds } from "./words";

export function PipelineName({ name }: { name: string }) {
  const { lane, pipelines } = useShown();
  if (isAnother(name)) {
    return (
      <span class="name">
        <Dot name={name} pipelines={pipelines} />
        {name}
      </span>
    );
  }
  return (
    <a class="name" href={address(`/pipelines/${of(lane.name, name)}`)}>
      <Dot name={name} pipelines={pipelines} />
      {name}
    </a>
  );
}

/** A second of the run: its time of day, then the time since the run began; the second under the pointer where it is short. */
export function When({ at_s, isShort = false }: { at_s: number | null | undefined; isShort?: boolean }) {
  const { lane } = useShown();
  if (at_s == null) return <>{NONE}</>;
  const day = timeOfDay(lane.clock, at_s);
  if (isShort) return <span class="nowrap" title={`${seconds(at_s)} after the run's begin`}>{day.replace(/:\d\d$/, "") || seconds(at_s)}</span>;
  return (
    <span class="nowrap">
      {day}
      {day ? <span class="muted"> · {seconds(at_s)}</span> : seconds(at_s)}
    </span>
  );
}

/** A word, and one sentence that says what it means: under the pointer, by Enter, by a tap. */
export function Term({ word, children }: { word: TermName; children?: ComponentChildren }) {
  return (
    <Explained words={TERMS[word]} kind="term">
      {children ?? word.replaceAll("_", " ")}
    </Explained>
  );
}

/** A button with a sentence; in the top layer, as a table would cut it. */
export function Explained({ words, kind, label, children }: { words: string; kind: string; label?: string; children: ComponentChildren }) {
  const id = useId();
  const place = (event: MouseEvent) => {
    const { left, bottom } = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const box = document.getElementById(id);
    box?.style.setProperty("left", `${Math.max(8, Math.min(left, innerWidth - 308))}px`);
    box?.style.setProperty("top", `${bottom + 5}px`);
  };
  return (
    <>
      <button type="button" class={kind} title={words} {...(label ? { "aria-label": label } : {})} {...{ popovertarget: id }} onClick={place}>
        {children}
      </button>
      <span id={id} class="explained" {...{ popover: "auto" }} role="note">
        {words}
      </span>
    </>
  );
}

/** Its step, of how many. */
export function StepOf({ row: { step, num_steps } }: { row: { step: number; num_steps: number | null } }) {
  return (
    <>
      {count(step)}
      {num_steps !== null && <span class="muted">/{count(num_steps)}</span>}
    </>
  );
}

export function Labels({ labels }: { labels: readonly string[] | undefined }) {
  return labels?.map((label) => (
    <>
      {" "}
      <span class="label">{label}</span>
    </>
  ));
}

/** Whether this is what the service calls pipelines that the reader is not shown: no pipeline has a name with a blank. */
export function isAnother(name: string): boolean {
  return /^another pipeline( \d+)?$/.test(name);
}

export function Dot({ name, pipelines }: { name: string; pipelines: readonly string[] }) {
  return <i class={`dot c${colourOf(pipelines, name)}`} />;
}

export function Tiles({ tiles }: { tiles: readonly (readonly [string, ComponentChildren, TermName?])[] }) {
  return (
    <dl class="tiles">
      {tiles.map(([name, figure, term]) => (
        <div key={name}>
          <dt>{term ? <Term word={term}>{name}</Term> : name}</dt>
          <dd>{figure}</dd>
        </div>
      ))}
    </dl>
  );
}

interface SparkProps {
  values: readonly (number | null)[];
  colour: number;
  /** Ends of the scale; without, those of the values. */
  low?: number;
  high?: number;
}

/** A curve the size of a word. Gaps where there is no number. */
export function Spark({ values, colour, ...scale }: SparkProps) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) return null;
  const low = scale.low ?? Math.min(...known);
  const high = scale.high ?? Math.max(...known);
  const x = (index: number) => 1 + (index / (values.length - 1)) * 88;
  const y = (value: number) => 17 - (high > low ? (value - low) / (high - low) : 0.5) * 16;
  let path = "";
  values.forEach((value, index) => {
    if (value !== null) path += `${index > 0 && values[index - 1] != null ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return (
    <svg class="spark" width="90" height="18" role="img" aria-label={`from ${known[0]} to ${known.at(-1)}`}>
      <path d={path} fill="none" stroke={`var(--p${colour})`} stroke-width="1.6" stroke-linejoin="round" />
    </svg>
  );
}

export interface Part {
  /** A class of the style sheet: `c3`, `f-wait`. */
  paint: string;
  name: string;
  seconds: number;
}

/** A bar of named parts, and the same in words. */
export function Stack({ parts, whole_s }: { parts: readonly Part[]; whole_s: number }) {
  if (whole_s <= 0) return null;
  const shown = parts.filter((part) => part.seconds / whole_s >= 0.0005);
  return (
    <>
      <div class="stack">
        {shown.map((part) => (
          <i class={part.paint} title={`${part.name}: ${seconds(part.seconds)}`} style={{ width: `${(100 * part.seconds) / whole_s}%` }} />
        ))}
      </div>
      <div class="why">
        {shown.map((part, index) => (
          <>
            {index > 0 && " · "}
            {part.name} <b>{percent(part.seconds / whole_s)}</b>
          </>
        ))}
      </div>
    </>
  );
}

/** What the colours mean: the pipelines `names` and how many more, then causes. */
export function Legend({ names, more, paints }: { names: readonly string[]; more: number; paints?: ReadonlySet<Paint> }) {
  return (
    <div class="key">
      {names.map((name) => (
        <PipelineName key={name} name={name} />
      ))}
      {more > 0 && <span class="muted">and {count(more)} more in view</span>}
      {LEGEND.filter(([paint]) => !paints || paints.has(paint)).map(([paint, words]) => (
        <span key={paint}>
          <i class={`f-${paint}`} />
          {paint === "held" ? <Term word="held_back">{words}</Term> : words}
        </span>
      ))}
    </div>
  );
}

// A turn token by token: how likely each was when it was sampled, by an underline and a colour, and where the weights changed.
import { visible } from "./log";
import type { Token } from "./shapes";
import { figure } from "./words";

/** Probability from which on a token belongs here, the class that draws it, and the same in words. */
const LIKELY: readonly (readonly [number, string, string])[] = [
  [0.9, "", "likely: 0.9 or more"],
  [0.5, "t1", "0.5 to 0.9"],
  [0.1, "t2", "0.1 to 0.5"],
  [0.01, "t3", "0.01 to 0.1"],
  [0, "t4", "rare: below 0.01"],
];

function classOf(logprob: number): string {
  const found = LIKELY.find(([least]) => Math.exp(logprob) >= least);
  return found ? found[1] : "t4";
}

export function Tokens({ tokens }: { tokens: readonly Token[] }) {
  return (
    <pre class="text model tokens" tabIndex={0}>
      {tokens.map((token, at) => (
        <>
          {(at === 0 || tokens[at - 1]?.version !== token.version) && <sup title={`weights of version ${token.version}`}>v{token.version}</sup>}
          <span class={classOf(token.logprob)} title={`probability ${figure(Math.exp(token.logprob))}, log-prob ${token.logprob.toFixed(3)}, weights of version ${token.version}`}>
            {visible(token.text) || "\u2205"}
          </span>
        </>
      ))}
    </pre>
  );
}

/** What the underlines and colours mean. */
export function TokenLegend() {
  return (
    <div class="key token-key" aria-label="how likely a token was when it was sampled">
      {LIKELY.map(([, name, words]) => (
        <i class={name}>{words}</i>
      ))}
      <span class="muted">v7: the weights that sampled it</span>
    </div>
  );
}

// The door: a one-time ticket from the address that `rlmux serve` printed, or a token: a user's own, or the owner's in `admin.token`.
//
// The ticket stands behind `#`, so no server log, proxy or referrer ever has it; it is gone from the address before it is sent.
import { useEffect, useRef, useState } from "preact/hooks";
import { Refusal, post, useData } from "./api";
import { go, usePlace } from "./place";
import type { Version } from "./shapes";

export function Login() {
  const { query } = usePlace();
  const provider = useData<Version>("/version").value?.oidc;
  const [trouble, setTrouble] = useState<{ text: string } | null>(null);
  const field = useRef<HTMLInputElement>(null);
  const [isTrying, setIsTrying] = useState(location.hash.startsWith("#t="));
  const enter = async (proof: { ticket: string } | { token: string }) => {
    setIsTrying(true);
    try {
      await post("/login", proof);
      go(inside(query.get("next")));
    } catch (error) {
      setIsTrying(false);
      const accepted = error instanceof Refusal && error.body.accepted ? `; accepted: ${error.body.accepted}` : "";
      const isTicket = "ticket" in proof;
      setTrouble({
        text: isTicket
          ? "This link has been used, or is older than a minute. Paste your token instead, or open a new link."
          : `${(error as Error).message}${accepted}`,
      });
    }
  };
  useEffect(() => {
    field.current?.focus();
    field.current?.select();
  }, [trouble]);
  useEffect(() => {
    const ticket = new URLSearchParams(location.hash.slice(1)).get("t");
    if (ticket === null) return;
    history.replaceState(null, "", location.pathname + location.search);
    void enter({ ticket });
  }, []);
  return (
    <div class="alone">
      <h1>rlmux</h1>
      {isTrying && !field.current ? (
        <p class="muted">Logging in.</p>
      ) : (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            void enter({ token: String(new FormData(event.currentTarget).get("token")).trim() });
          }}
        >
          <p>
            Paste the token that you were given. The owner of the server opens the address that <code>rlmux serve</code> prints, or has the token in the
            file <code>admin.token</code> in the folder that is served.
          </p>
          <input ref={field} name="token" type="password" autocomplete="off" aria-label="token" aria-invalid={trouble !== null} autofocus required />
          <button disabled={isTrying}>Log in</button>
          {provider && (
            <a href={provider} target="_self">
              Log in with your organisation
            </a>
          )}
        </form>
      )}
      {trouble && (
        <p class="banner" role="alert">
          {trouble.text}
        </p>
      )}
    </div>
  );
}

/** Only a path of this service: `//elsewhere` is none. */
function inside(next: string | null): string {
  return next !== null && /^\/[^/\\]/.test(next) && !next.startsWith("/login") ? next : "/fleet";
}

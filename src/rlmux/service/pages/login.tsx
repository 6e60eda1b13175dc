// The door: a one-time ticket from the address that `rlmux serve` printed, or the token of its file.
//
// The ticket stands behind `#`, so no server log, proxy or referrer ever has it; it is gone from the address before it is sent.
import { useEffect, useState } from "preact/hooks";
import { post } from "./api";
import { go, usePlace } from "./place";

export function Login() {
  const { query } = usePlace();
  const [trouble, setTrouble] = useState("");
  const [isTrying, setIsTrying] = useState(location.hash.startsWith("#t="));
  const enter = async (proof: { ticket: string } | { token: string }) => {
    setIsTrying(true);
    try {
      await post("/login", proof);
      go(inside(query.get("next")));
    } catch (error) {
      setIsTrying(false);
      setTrouble(
        "ticket" in proof ? "This link has been used, or is older than a minute. Paste the token instead, or open a new link." : (error as Error).message,
      );
    }
  };
  useEffect(() => {
    const ticket = new URLSearchParams(location.hash.slice(1)).get("t");
    if (ticket === null) return;
    history.replaceState(null, "", location.pathname + location.search);
    void enter({ ticket });
  }, []);
  return (
    <div class="alone">
      <h1>rlmux</h1>
      {isTrying ? (
        <p class="muted">Logging in.</p>
      ) : (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            void enter({ token: String(new FormData(event.currentTarget).get("token")).trim() });
          }}
        >
          <p>
            Open the address that <code>rlmux serve</code> prints, or paste the token from the file <code>admin.token</code> in the folder that is served.
          </p>
          <input name="token" type="password" autocomplete="off" aria-label="token" autofocus required />
          <button>Log in</button>
        </form>
      )}
      {trouble && (
        <p class="banner" role="alert">
          {trouble}
        </p>
      )}
    </div>
  );
}

/** Only a path of this service: `//elsewhere` is none. */
function inside(next: string | null): string {
  return next !== null && /^\/[^/\\]/.test(next) && !next.startsWith("/login") ? next : "/fleet";
}

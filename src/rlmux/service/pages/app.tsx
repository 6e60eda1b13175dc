// The dashboard: which page an address shows. Everything that a page says is an answer of /api/v1.
//
//   place.ts  the URL is the state       api.ts   requests        live.ts   what changed
//   frame.tsx what is around a page      fleet, pipelines, pipeline, queue, shares, audit, timeline, login: one file each
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { AuditPage } from "./audit";
import { Compare } from "./compare";
import { Fleet } from "./fleet";
import { Frame, setTheme } from "./frame";
import { listenToKeys } from "./keys";
import { Login } from "./login";
import { Pipeline } from "./pipeline";
import { Pipelines } from "./pipelines";
import { QueuePage } from "./queue";
import { SharesPage } from "./shares";
import { address, followLinks, go, usePlace } from "./place";
import { TimelinePage } from "./timeline";
import { WhatIf } from "./whatif";
import "./style.css";

function App() {
  const { path } = usePlace();
  if (path === "/login") return <Login />;
  return (
    <Frame>
      <Shown path={path} />
    </Frame>
  );
}

function Shown({ path }: { path: string }) {
  const [, page, lane, name] = path.split("/").map(decodeURIComponent);
  useEffect(() => {
    document.title = [name, page && page[0]?.toUpperCase() + page.slice(1), "rlmux"].filter(Boolean).join(" · ");
    if (path === "/") go(address("/fleet"));
  }, [path]);
  if (page === "timeline") return <TimelinePage />;
  if (page === "pipelines") return lane && name ? <Pipeline key={path} lane={lane} name={name} /> : <Pipelines />;
  if (page === "queue") return <QueuePage />;
  if (page === "shares") return <SharesPage />;
  if (page === "audit") return <AuditPage />;
  if (page === "compare") return <Compare />;
  if (page === "whatif") return <WhatIf />;
  if (page === "fleet" || page === "") return <Fleet />;
  return <NoPage path={path} />;
}

function NoPage({ path }: { path: string }) {
  return (
    <>
      <div class="heading">
        <h1>There is no such page</h1>
      </div>
      <p class="empty">
        <span class="mono">{path}</span> · <a href={address("/fleet")}>to the fleet</a>
      </p>
    </>
  );
}

setTheme();
followLinks();
listenToKeys();
render(<App />, document.getElementById("app")!);

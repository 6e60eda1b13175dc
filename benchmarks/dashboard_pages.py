"""How fast the timeline of a long run opens and moves, in a real browser.

    python benchmarks/dashboard_pages.py RUN [--json]

RUN is a run's folder, for example one of `benchmarks/log.py --keep DIR --devices 100`. It is served by this process,
from an index that is made first; the browser is headless Chromium, new for each opening, drawing in software.

    rows, intervals     of the log, and of what is made of it
    index_rows_s        rows a second until the index is whole; goal: 40,000
    ready_s             seconds from the address to the picture with all that is in view, median of five; goal: 1.2
    lcp_s               largest contentful paint, as the browser reports it; goal: 1.0
    requests, kb        of an opening; kilobytes as transferred; goals: 12 and 600
    frame_p95_ms        of 300 frames while panning, at each of six zooms; goal: 17.5 for the worst
    frame_max_ms        goal: 50
    window_ms           from a jump to a far window to its picture, median; goal: 150
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from rlmux.service.dashboard.access import Limits
from rlmux.service.dashboard.app import Dashboard
from rlmux.service.listening import Listening
from rlmux.service.server import Server

GOALS = {
    "index_rows_s": 40_000.0, "ready_s": 1.2, "lcp_s": 1.0, "requests": 12.0, "kb": 600.0, "frame_p95_ms": 17.5,
    "frame_max_ms": 50.0, "window_ms": 150.0,
}  # fmt: skip
MANY = Limits(requests_per_s=1e6, burst=1e6, logins_per_minute=1e6)
WHOLE = "canvas[data-state=whole]"
FRAMES = """(count) => new Promise((done) => {
  const times = [];
  const frame = (at) => {
    times.push(at);
    if (times.length > count) done(times.slice(1).map((time, index) => time - times[index]));
    else requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[Server, Dashboard]]:
    server = Server(Listening())
    dashboard = Dashboard(folder, server, limits=MANY)
    try:
        server.start()
        dashboard.start()
        yield server, dashboard
    finally:
        server.close()
        dashboard.close()


def index(server: Server, dashboard: Dashboard) -> dict[str, float]:
    """Wait until the index is whole."""
    begin_s = time.perf_counter()
    with httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {dashboard.token}"}, timeout=60
    ) as client:
        while True:
            (lane,) = client.get("/api/v1/lanes").json()["items"]
            if not lane["is_indexing"] and lane["index_seq"] == lane["seq"]:
                break
            time.sleep(0.1)
        spent_s = time.perf_counter() - begin_s
        timeline = client.get(f"/api/v1/timeline/{lane['name']}").json()
    return {"rows": lane["seq"], "intervals": timeline["num_intervals"], "index_rows_s": lane["seq"] / spent_s}


def enter(browser: Any, server: Server, dashboard: Dashboard) -> Any:
    """A page of a new browser, logged in."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.goto(dashboard.login_url())
    page.wait_for_selector("main h1")
    page.goto("about:blank")
    return page


def opening(page: Any, server: Server) -> dict[str, float]:
    """One opening of the timeline."""
    sizes: list[int] = []
    page.on("requestfinished", lambda asked: sizes.append(asked.sizes()["responseBodySize"]))
    begin_s = time.perf_counter()
    page.goto(f"{server.url}/timeline")
    page.wait_for_selector(WHOLE, timeout=60_000)
    ready_s = time.perf_counter() - begin_s
    lcp_ms = page.evaluate(
        "() => new Promise((done) => new PerformanceObserver((list) => done(list.getEntries().at(-1).startTime))"
        ".observe({type: 'largest-contentful-paint', buffered: true}))"
    )
    return {"ready_s": ready_s, "lcp_s": lcp_ms / 1000, "requests": len(sizes), "kb": sum(sizes) / 1000}


def panning(page: Any) -> dict[str, float]:
    """Frames while the pointer drags, at six zooms."""
    box = page.locator("canvas").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + 150)
    worst_p95, longest = 0.0, 0.0
    for _ in range(6):
        page.mouse.move(*middle)
        page.mouse.down()
        page.evaluate(f"() => {{ window.frames_ = ({FRAMES})(300); }}")
        for number in range(100):
            page.mouse.move(middle[0] + 200 * (1 if number // 25 % 2 else -1) * (number % 25) / 25, middle[1])
        deltas = sorted(page.evaluate("() => window.frames_"))
        page.mouse.up()
        worst_p95, longest = max(worst_p95, deltas[int(0.95 * len(deltas))]), max(longest, deltas[-1])
        page.keyboard.press("+")
        page.keyboard.press("+")
        page.wait_for_selector(WHOLE, timeout=60_000)
    return {"frame_p95_ms": worst_p95, "frame_max_ms": longest}


def jumps(page: Any) -> dict[str, float]:
    """Far windows at the zoom that panning has left."""
    box = page.locator("canvas").bounding_box()
    taken = []
    for part in (0.2, 0.8, 0.35, 0.65, 0.5):
        begin_s = time.perf_counter()
        page.mouse.click(box["x"] + 140 + part * (box["width"] - 140), box["y"] + 20)
        page.wait_for_timeout(20)
        page.wait_for_selector(WHOLE, timeout=60_000)
        taken.append(1000 * (time.perf_counter() - begin_s))
    return {"window_ms": statistics.median(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    program = os.environ.get("RLMUX_CHROMIUM") or shutil.which("chromium")
    (arguments.run / "index.db").unlink(missing_ok=True)
    with served(arguments.run) as (server, dashboard), sync_playwright() as driver:
        figures = index(server, dashboard)
        openings = []
        for _ in range(5):
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = enter(browser, server, dashboard)
            openings.append(opening(page, server))
            if len(openings) == 5:
                moved = {**panning(page), **jumps(page)}
            browser.close()
        figures |= {name: statistics.median(each[name] for each in openings) for name in openings[0]} | moved
    if arguments.json:
        sys.exit(print(json.dumps(figures)))
    for name, value in figures.items():
        print(f"{name:16} {value:12.4g}  {f'goal: {GOALS[name]:g}' if name in GOALS else ''}")


if __name__ == "__main__":
    main()

"""What the pages cost after a hundred days: seconds until they are ready, frames, search, memory and watchers.

    PYTHONPATH=. python benchmarks/pages.py [--pipelines 1000] [--steps 143] [--minutes 1] [--watch-s 60] [--json]
    PYTHONPATH=. python benchmarks/pages.py --grow-minutes 60

The log is made up (`tests/log_script.py`): a lane that stays open for ten days, a million rows by default. Needs the
development environment and Chromium.

    ready           seconds from the request for a page to its heading, and to a timeline that is all there; goal: 1.2
    longest frame   milliseconds between two frames while a timeline is dragged, and while the wheel zooms; goal: 50
    search          95th percentile of milliseconds over 40 requests for a frequent word; goal: 200
    memory          megabytes of the server, and of the JavaScript of a tab that stays open for `--minutes`
    restart         seconds from the start of a server whose log has new rows to pages that have them all; goal: 3
    ten watchers    processor seconds of the server a minute of a growing run, with ten open fleet pages and with none
    growing         with `--grow-minutes`, alone: megabytes of the server with its indexer, and of the JavaScript of two
                    tabs (fleet; a timeline that follows), while a lane gets `ROWS_PER_S` rows a second
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from playwright.sync_api import Page, sync_playwright
from tests.log_script import append, long_lane

from rlmux.log.run_log import Entry, RunLog

ROWS_PER_S = 10
LATE_ROWS = 2_000
"""Rows that a log gets before a restart."""
WORDS = ("job", "team-1", "user-3", "number", "failed", "grpo", "lane")
FRAMES = """() => { window.frames_ms = []; let last = performance.now();
  const tick = (now) => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick); }"""


class Served:
    """`rlmux serve` of a folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "rlmux", "serve", str(folder), "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.login = next(word for line in self.process.stdout for word in line.split() if "/login#" in word)
        self.url = self.login.split("/login#")[0]

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def family_mb(self) -> float:
        """With the indexer, which is a process of its own."""
        server = psutil.Process(self.process.pid)
        return sum(each.memory_info().rss for each in (server, *server.children(recursive=True))) / 1e6

    def processor_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    served = Served(folder)
    try:
        yield served
    finally:
        served.process.terminate()
        served.process.wait(30)


def ready_s(page: Page, url: str, path: str, selector: str) -> float:
    begin_s = time.perf_counter()
    page.goto(url + path)
    page.wait_for_selector(selector)
    return time.perf_counter() - begin_s


def longest_frame_ms(page: Page, move: Any) -> float:
    page.evaluate(FRAMES)
    page.wait_for_timeout(200)
    page.evaluate("() => { window.frames_ms.length = 0; }")
    move()
    return float(max(page.evaluate("() => window.frames_ms")))


def drag(page: Page) -> None:
    box = page.locator("canvas").first.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] * 0.6, box["y"] + 95
    for _ in range(4):
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x - 400, y, steps=40)
        page.mouse.move(x + 400, y, steps=40)
        page.mouse.up()


def wheel(page: Page) -> None:
    box = page.locator("canvas").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 95)
    for turn in range(40):
        page.mouse.wheel(0, -60 if turn % 20 < 10 else 60)
        page.wait_for_timeout(30)


def search_p95_ms(client: httpx.Client, word: str) -> float:
    taken_ms = []
    for _ in range(40):
        begin_s = time.perf_counter()
        client.get("/api/v1/search", params={"q": word}).raise_for_status()
        taken_ms.append((time.perf_counter() - begin_s) * 1e3)
        time.sleep(0.03)  # the service takes 50 requests a second of one caller
    return statistics.quantiles(taken_ms, n=20)[-1]


def measure_pages(folder: Path, minutes: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    with serving(folder) as served, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(served.login)
        page.wait_for_selector("main h1")
        cookies = {each["name"]: each["value"] for each in page.context.cookies()}
        client = httpx.Client(base_url=served.url, cookies=cookies, timeout=120)
        while any(lane["is_indexing"] for lane in client.get("/api/v1/lanes").json()["items"]):
            time.sleep(1)
        for path in ("/fleet", "/pipelines", "/queue", "/shares"):
            figures[f"ready{path} s"] = ready_s(page, served.url, path, "main h1")
        figures["ready /timeline s"] = ready_s(page, served.url, "/timeline", "canvas[data-state=whole]")
        figures["longest frame, drag of all ms"] = longest_frame_ms(page, lambda: drag(page))
        figures["longest frame, wheel ms"] = longest_frame_ms(page, lambda: wheel(page))
        page.goto(served.url + "/timeline?t0=400000&t1=420000")
        page.wait_for_selector("canvas[data-state=whole]")
        figures["longest frame, drag of 2 % ms"] = longest_frame_ms(page, lambda: drag(page))
        for word in WORDS:
            figures[f"search {word} p95 ms"] = search_p95_ms(client, word)
        figures["server MB"] = served.memory_mb()
        page.goto(served.url + "/fleet")
        page.wait_for_selector("main h1")
        session = page.context.new_cdp_session(page)
        figures["tab MB at first"] = heap_mb(session)
        time.sleep(60 * minutes)
        figures[f"tab MB after {minutes:g} minutes"] = heap_mb(session)
        figures[f"server MB after {minutes:g} minutes"] = served.memory_mb()
        browser.close()
    return figures


def measure_restart(folder: Path, rows: list[Entry]) -> dict[str, float]:
    """`rows`: what the log gets while no server runs."""
    with RunLog.open(folder) as log:
        append(log, rows)
    begin_s = time.perf_counter()
    with serving(folder) as served:
        token = (folder / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        client = httpx.Client(base_url=served.url, headers=headers, timeout=120)
        while any(lane["is_indexing"] for lane in client.get("/api/v1/lanes").json()["items"]):
            time.sleep(0.05)
        return {"restart s": time.perf_counter() - begin_s}


def measure_growth(folder: Path, minutes: float, rows: list[Entry]) -> dict[str, float]:
    """A lane whose process lives and writes `rows`, with a fleet page and a timeline that follows it."""
    figures: dict[str, float] = {}
    with RunLog.open(folder) as log, serving(folder) as served, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        sessions: dict[str, Any] = {}
        for name, path in (("fleet", "/fleet"), ("timeline", "/timeline?follow=1")):
            page = context.new_page()
            page.goto(served.login if not sessions else served.url + path)
            page.wait_for_selector("main h1")
            page.goto(served.url + path)
            page.wait_for_selector("main h1")
            sessions[name] = context.new_cdp_session(page)
        begin_s, num_written, marks = time.monotonic(), 0, [1.0, 2.0, 10.0, 30.0, 60.0, 120.0]
        due = [0.05, *(mark for mark in marks if mark < minutes), minutes]
        while due:
            passed_s = time.monotonic() - begin_s
            if passed_s >= 60 * due[0]:
                for name, session in sessions.items():
                    figures[f"tab MB, {name}, {due[0]:g} minutes"] = heap_mb(session)
                figures[f"server and indexer MB, {due[0]:g} minutes"] = served.family_mb()
                print(json.dumps({"minutes": due.pop(0), "rows": num_written, **figures}), file=sys.stderr, flush=True)
            num_due = min(len(rows), int(ROWS_PER_S * passed_s))
            append(log, rows[num_written:num_due])
            log.commit()
            num_written = num_due
            sessions["fleet"].send("Runtime.evaluate", {"expression": "0"})  # playwright handles what has come
            time.sleep(0.5)
        figures["rows written"] = num_written
        browser.close()
    return figures


def heap_mb(session: Any) -> float:
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6


def measure_watchers(folder: Path, seconds: float) -> dict[str, float]:
    """Of a real run: two pipelines that train while pages are open on them."""
    figures: dict[str, float] = {}
    run = folder / "watched"
    example = Path(__file__).parent.parent / "examples" / "01_two_pipelines.yaml"
    command = [sys.executable, "-m", "rlmux", "run", str(example), "--out", str(run)]
    command += ["--set", "pipelines.*.steps=100000"]
    trained = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (run / "run.db").exists():
            assert trained.poll() is None, "the run to watch did not start"
            time.sleep(0.5)
        time.sleep(30)
        with serving(run) as served, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            context = browser.new_context()
            first = context.new_page()
            first.goto(served.login)
            first.wait_for_selector("main h1")
            for num_watchers in (0, 10):
                first.goto("about:blank")
                pages = [context.new_page() for _ in range(num_watchers)]
                for page in pages:
                    page.goto(served.url + "/fleet")
                    page.wait_for_selector("main h1")
                time.sleep(10)
                before_s = served.processor_s()
                time.sleep(seconds)
                spent_s = (served.processor_s() - before_s) * 60 / seconds
                figures[f"server, {num_watchers} watchers, processor s a minute"] = spent_s
            browser.close()
    finally:
        trained.terminate()
        trained.wait(120)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=143)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--watch-s", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--grow-minutes", type=float, default=0.0)
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as made:
        script = long_lane(asked.pipelines, num_steps=asked.steps)
        figures["rows"] = len(script.rows)
        folder = Path(made) / "long"
        late = int(ROWS_PER_S * 60 * asked.grow_minutes) or LATE_ROWS
        script.write(folder, len(script.rows) - late)
        rows = script.rows[-late:]
        del script
        if asked.grow_minutes:
            figures |= measure_growth(folder, asked.grow_minutes, rows)
        else:
            figures |= measure_pages(folder, asked.minutes)
            figures |= measure_restart(folder, rows)
            figures |= measure_watchers(Path(made), asked.watch_s)
    if asked.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name:45} {value:12,.2f}")


if __name__ == "__main__":
    main()

"""What watching costs a run: the same file trained with nobody looking, and with a server, ten readers and a scraper.

    python benchmarks/watchers.py [FILE] [--repeats 6] [--readers 10] [--steps N]

FILE is by default examples/01_two_pipelines.yaml. Runs alternate; each reader has a stream of its own, and asks for
what a page asks for at every event, at most once a second; the figures for Prometheus are asked for each 5 s.

    alone_s, watched_s      makespan of each run, median
    ratio                   watched over alone, median of the pairs; goal: 1.005
    answers                 answers that the readers got, in all
    equal                   whether all weights are equal
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

FILE = Path(__file__).parents[1] / "examples" / "01_two_pipelines.yaml"
GOAL = 1.005
SCRAPE_S = 5.0


def train(file: Path, folder: Path, sets: list[str]) -> dict[str, Any]:
    words = ["run", str(file), "--out", str(folder), "--json", *(word for each in sets for word in ("--set", each))]
    said = subprocess.run([sys.executable, "-m", "rlmux", *words], check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, Any] = json.loads(said.stdout)
    return summary


class Readers:
    """Threads that read from a server until they are told to stop."""

    def __init__(self, url: str, token: str, num: int) -> None:
        self.num_answers = 0
        self._url = f"{url}/api/v1"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._is_over = threading.Event()
        threads = [threading.Thread(target=self._scrape), *(threading.Thread(target=self._read) for _ in range(num))]
        self._threads = threads
        for thread in threads:
            thread.start()

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _scrape(self) -> None:
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=30) as client:
            while not self._is_over.wait(SCRAPE_S):
                self._ask(client, "/metrics")

    def _read(self) -> None:
        """As the fleet page: a stream, and what it shows asked for again when the stream says that it has changed."""
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=httpx.Timeout(30, read=2)) as client:
            while not self._is_over.wait(0.5):
                lanes = self._ask(client, "/lanes")
                names = [lane["name"] for lane in lanes.json()["items"]] if lanes is not None else []
                topics = ",".join(["lanes", *(f"pipelines:{name}" for name in names)])
                with contextlib.suppress(httpx.HTTPError), client.stream("GET", f"/stream?topics={topics}") as stream:
                    self._follow(client, stream.iter_lines(), names)

    def _follow(self, client: httpx.Client, lines: Iterator[str], names: list[str]) -> None:
        asked_s = 0.0
        for line in lines:
            if self._is_over.is_set() or not names:
                return
            if line.startswith("event:") and time.monotonic() - asked_s > 1.0:
                asked_s = time.monotonic()
                for path in (
                    "/lanes",
                    f"/lanes/{names[0]}/devices",
                    f"/pipelines?lane={names[0]}",
                    f"/timeline/{names[0]}",
                ):
                    self._ask(client, path)

    def _ask(self, client: httpx.Client, path: str) -> httpx.Response | None:
        with contextlib.suppress(httpx.HTTPError):
            answer = client.get(path)
            self.num_answers += answer.is_success
            return answer if answer.is_success else None
        return None


class Watch:
    """A server of the folder that a run is in, from when its log is there, and its readers."""

    def __init__(self, root: Path, num_readers: int) -> None:
        self._root, self._num_readers = root, num_readers
        self._server: subprocess.Popen[str] | None = None
        self._readers: Readers | None = None
        self._thread = threading.Thread(target=self._begin)
        self._thread.start()

    def close(self) -> int:
        """End all; returns the number of answers that were read."""
        self._thread.join()
        assert self._server is not None
        assert self._readers is not None
        self._readers.close()
        self._server.terminate()
        self._server.communicate()
        return self._readers.num_answers

    def _begin(self) -> None:
        while not (self._root / "run" / "header.json").exists():
            time.sleep(0.05)
        words = [sys.executable, "-m", "rlmux", "serve", str(self._root), "--listen", "127.0.0.1:0"]
        self._server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._server.stdout is not None
        url = next(line for line in self._server.stdout if line.startswith("dashboard: ")).partition(": ")[2]
        token = (self._root / "admin.token").read_text().strip()
        self._readers = Readers(url.partition("/login")[0], token, self._num_readers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    sets = [] if asked.steps is None else [f"pipelines.*.steps={asked.steps}"]
    alone: list[float] = []
    seen: list[float] = []
    weights: set[tuple[str, ...]] = set()
    num_answers = 0
    with tempfile.TemporaryDirectory(prefix="rlmux-watchers-") as place:
        for repeat in range(asked.repeats):
            for is_watched in (False, True) if repeat % 2 == 0 else (True, False):
                root = Path(place) / f"{repeat}-{is_watched}"
                root.mkdir()
                watch = Watch(root, asked.readers) if is_watched else None
                summary = train(asked.file, root / "run", sets)
                num_answers += watch.close() if watch is not None else 0
                (seen if is_watched else alone).append(float(summary["makespan_s"]))
                weights.add(tuple(one["weights_sha256"] for one in summary["pipelines"].values()))
    table = {
        "alone_s": statistics.median(alone),
        "watched_s": statistics.median(seen),
        "ratio": statistics.median(one / other for one, other in zip(seen, alone, strict=True)),
        "answers": num_answers,
        "equal": len(weights) == 1,
    }
    if asked.json:
        sys.exit(print(json.dumps({**table, "alone": alone, "watched": seen})))
    for name, value in table.items():
        print(f"{name:12} {value:12.5g}{f'   goal: {GOAL}' if name == 'ratio' else ''}")


if __name__ == "__main__":
    main()

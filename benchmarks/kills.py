"""SIGKILL at random moments: what a service was asked for is there exactly once, and weights are what they would be.

    python benchmarks/kills.py server [--kills 200] [--clients 20] [--seed 0]
    python benchmarks/kills.py controller [--kills 50] [--seed 0]
    python benchmarks/kills.py browser [--kills 20] [--seed 0]

A service with one lane trains a pipeline. `server`: its server is killed and started again, while clients submit
pipelines that are due later than this lasts, each as fast as it is answered. `controller`: the lane's controller is
killed, and started again by the server, which is killed each third time as well. The same file is then trained
undisturbed. `browser`: the server is killed while a page is open (needs playwright and Chromium).

    kills, minutes      how many, in how long
    while_training      kills before the pipeline had ended
    submitted, lost, twice      names that a client was told are taken; those of them that the log has not, or has twice
    refused             submissions that a client was told are not taken, and why
    equal               whether the weights are those of the undisturbed run
    steps               of the pipeline, and steps that were done again
    back_s              seconds from a kill until the server answers again, or the controller does: median and longest
    shown_s             seconds from the server's first answer until the page says that it is live: median and longest

What it started ends with it, killed or not (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import rlmux
from rlmux.client import on_server
from rlmux.core.errors import RlmuxError
from rlmux.report.folder_lock import living_owner
from rlmux.report.log import LogReader
from rlmux.runtime.control_socket import ask
from rlmux.runtime.reaper import marking

CLUSTER = "{pools: {rollout: {devices: 1}, train: {devices: 1}}}"
LIMIT_S = 300.0


def pipeline(steps: int) -> dict[str, Any]:
    return {
        "name": "trained",
        "task": "sort",
        "steps": steps,
        "model": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16},
        "algorithm": {"name": "grpo", "prompts_per_step": 4, "group_size": 4},
        "rollout": {"slots": 8},
    }


class Service:
    """A service of one lane, and the server process of now."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        self.lane = self.root / "cpu"
        (folder / "service.yaml").write_text(f"lanes: {{cpu: {{cluster: {CLUSTER}}}}}\n")
        self.address = "127.0.0.1:0"
        self.login = ""
        """Address that logs a browser in, once."""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = ["serve", str(self.folder / "service.yaml"), "--out", str(self.root), "--listen", self.address]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlmux", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def url(self) -> str:
        """Waits until the server answers."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("dashboard: "):
                self.login = line.partition(": ")[2].strip()
                url = self.login.partition("/login")[0]
                self.address = url.removeprefix("http://")
                os.environ["RLMUX_TOKEN"] = (self.root / "admin.token").read_text().strip()
                return url
        sys.exit("the server did not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    @property
    def controller(self) -> int | None:
        owner = living_owner(self.lane)
        return owner and owner[0]

    def is_up(self) -> bool:
        try:
            return bool(ask(self.lane, "status")["pid"])
        except RlmuxError:
            return False


@contextmanager
def service() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="rlmux-kills-") as folder, marking():
        one = Service(Path(folder))
        try:
            one.start()
            one.url()
            until(one.is_up)
            yield one
        finally:
            one.kill()
            if (pid := one.controller) is not None:
                os.kill(pid, signal.SIGTERM)  # what a shell starts in the background ignores SIGINT
                until(lambda: one.controller is None)


def is_back(one: Service, killed: int) -> bool:
    """Whether another controller than the killed one is up."""
    return one.controller not in (None, killed) and one.is_up()


def until(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Seconds that it took."""
    begin_s = time.monotonic()
    while not is_so():
        if time.monotonic() - begin_s > limit_s:
            sys.exit("it did not come about")
        time.sleep(0.02)
    return time.monotonic() - begin_s


class Clients:
    """Threads that submit, each as fast as it is answered."""

    def __init__(self, url: str, num_clients: int) -> None:
        self._connection = rlmux.connect(f"{url}/lanes/cpu")
        self.told: list[str] = []
        self.refused: list[str] = []
        """What the server, or the connection, said to a submission that was not taken."""
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._submit, args=(number,), daemon=True) for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _submit(self, number: int) -> None:
        at = 0
        while not self._is_over.is_set():
            name = f"later-{number}-{at}"
            file = {"pipelines": [{"name": name, "task": "sort", "steps": 1, "submit_at_s": 1e6}]}
            try:
                self._connection.submit(file)
                self.told.append(name)
            except RlmuxError as error:
                self.refused.append(str(error))
            at += 1
            self._is_over.wait(2.0)

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def kill_servers(one: Service, num_kills: int, num_clients: int, chance: random.Random) -> dict[str, Any]:
    on_server._AWAY_S = LIMIT_S
    back, num_while_training, clients = [], 0, Clients(f"http://{one.address}", num_clients)
    for number in range(num_kills):
        time.sleep(chance.uniform(0.0, 1.5))
        num_while_training += is_training(one)
        one.kill()
        begin_s = time.monotonic()
        one.start()
        if chance.random() < 0.2:  # while it starts, too
            time.sleep(chance.uniform(0.0, 2.0))
            one.kill()
            one.start()
        one.url()
        until(lambda: answers(one))
        back.append(time.monotonic() - begin_s)
        if number % 20 == 19:
            print(f"{number + 1} kills, {len(clients.told)} submitted", file=sys.stderr, flush=True)
    clients.close()
    until(lambda: all(row["state"] != "accepted" for row in submissions(one)))
    taken = Counter(str(name) for note in notes(one.lane, "submitted") for name in note["pipelines"])
    return {
        "submitted": len(clients.told),
        "refused": f"{len(clients.refused)} {sorted(set(clients.refused))[:3]}" if clients.refused else "0",
        "lost": sum(name not in taken for name in clients.told),
        "twice": sum(many > 1 for many in taken.values()),
        "while_training": num_while_training,
        "back_s": back,
    }


def answers(one: Service) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://{one.address}/api/v1/health").is_success
    return False


def submissions(one: Service) -> list[dict[str, Any]]:
    """The newest; those before them were handed over before them."""
    headers = {"Authorization": f"Bearer {os.environ['RLMUX_TOKEN']}"}
    answer = httpx.get(f"http://{one.address}/api/v1/submissions?limit=500", headers=headers, timeout=60)
    items: list[dict[str, Any]] = answer.raise_for_status().json()["items"]
    return items


def kill_controllers(one: Service, num_kills: int, chance: random.Random) -> dict[str, Any]:
    back, num_while_training = [], 0
    for number in range(num_kills):
        time.sleep(chance.uniform(0.0, 3.0))
        if number % 3 == 2:  # a server waits ever longer before it starts a controller again; a new one does not
            one.kill()
            one.start()
            one.url()
        pid = one.controller
        assert pid is not None
        num_while_training += is_training(one)
        os.kill(pid, signal.SIGKILL)
        begin_s = time.monotonic()
        until(partial(is_back, one, pid))
        back.append(time.monotonic() - begin_s)
        if number % 10 == 9:
            print(f"{number + 1} kills", file=sys.stderr, flush=True)
    return {"while_training": num_while_training, "back_s": back}


def kill_under_a_page(one: Service, num_kills: int, chance: random.Random) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright  # only this part needs a browser

    back, shown = [], []
    with sync_playwright() as driver:
        program = os.environ.get("RLMUX_CHROMIUM") or shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(one.login)
        page.wait_for_selector(".pulse.live")
        for _ in range(num_kills):
            time.sleep(chance.uniform(0.0, 3.0))
            one.kill()
            begin_s = time.monotonic()
            page.wait_for_selector(".pulse.lost")
            one.start()
            one.url()
            until(lambda: answers(one))
            back.append(time.monotonic() - begin_s)
            page.wait_for_selector(".pulse.live")
            shown.append(time.monotonic() - begin_s - back[-1])
        browser.close()
    return {"shown_s": f"{statistics.median(shown):.2f}, {max(shown):.2f}", "back_s": back}


def is_training(one: Service) -> bool:
    return not notes(one.lane, "pipeline_end")


def steps_of(lane: Path) -> list[int]:
    """Every step of the pipeline that was published, in the log's order."""
    return [int(note["step"]) for note in notes(lane, "step") if note["pipeline"] == "trained"]


def notes(lane: Path, type: str) -> list[Any]:
    with LogReader(lane) as log:
        return [entry.value for entry in log.entries() if entry.kind == "note" and entry.type == type]


def undisturbed(folder: Path, steps: int) -> str:
    """Hash of the weights that the pipeline ends with."""
    file = folder / "alone.yaml"
    file.write_text(f"cluster: {CLUSTER}\npipelines: {json.dumps([pipeline(steps)])}\n")
    words = ["run", str(file), "--out", str(folder / "alone"), "--json"]
    said = subprocess.run([sys.executable, "-m", "rlmux", *words], check=True, capture_output=True, text=True)
    return str(json.loads(said.stdout)["pipelines"]["trained"]["weights_sha256"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["server", "controller", "browser"])
    parser.add_argument("--kills", type=int)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    num_kills, chance = (
        asked.kills or {"server": 200, "controller": 50, "browser": 20}[asked.what],
        random.Random(asked.seed),
    )
    with service() as one:
        rlmux.connect(f"http://{one.address}/lanes/cpu").submit({"pipelines": [pipeline(asked.steps)]})
        begin_s = time.monotonic()
        if asked.what == "server":
            found = kill_servers(one, num_kills, asked.clients, chance)
        elif asked.what == "browser":
            found = kill_under_a_page(one, num_kills, chance)
        else:
            found = kill_controllers(one, num_kills, chance)
        minutes = (time.monotonic() - begin_s) / 60
        until(one.is_up)
        until(lambda: notes(one.lane, "pipeline_end"), limit_s=3600.0)
        steps = steps_of(one.lane)
        ends = notes(one.lane, "pipeline_end")
        (sha256,) = (end["weights_sha256"] for end in ends if end["pipeline"] == "trained")
        is_equal = sha256 == undisturbed(one.folder, asked.steps)
    back = found.pop("back_s")
    table = {
        "kills": num_kills,
        "minutes": round(minutes, 1),
        **found,
        "equal": is_equal,
        "steps": f"{max(steps)}, {len(steps) - len(set(steps))} again",
        "back_s": f"{statistics.median(back):.2f}, {max(back):.2f}",
    }
    if asked.json:
        sys.exit(print(json.dumps(table)))
    for name, value in table.items():
        print(f"{name:12} {value}")


if __name__ == "__main__":
    main()

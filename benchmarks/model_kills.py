"""SIGKILL to a model server at random moments, under clients that save, delete and overwrite: nothing differs.

    python benchmarks/model_kills.py [--kills 200] [--clients 4] [--seed 0]

Each client trains a model of its own: every round has a loss, an update, a save under the name `latest` (overwritten or
deleted before, by turns), sometimes a load of it, and samples of what was saved now and in the round before. The server
is killed meanwhile and resumed. When it was killed often enough, each client ends its round, and the same rounds are
done on a server that is left alone, one client after another.

    kills, minutes      how many, in how long
    rounds              of each client
    equal               clients whose weights after every update, and whose every sample, are those without a kill
    listed, unloadable  checkpoints that the server lists at the end, and those of them that do not load
    back_s              seconds from a kill until the server answers again: median and longest
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rlmux.runtime.reaper import marking
from rlmux.service.serving import LEDGER
from rlmux.service.tinker import wire_pb2 as wire
from rlmux.service.tinker.ledger import Ledger

FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
serve:
  models:
    rlmux/tiny:
      model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 16}
      max_prompt_tokens: 64
      max_new_tokens: 16
      slots: 8
"""
SAMPLED = {"max_tokens": 12, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
LIMIT_S = 600.0


class Server:
    """A model server in its folder, and its process of now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        (folder / "serve.yaml").write_text(FILE)
        self._log = (folder / "server.log").open("w")
        self.url = ""
        self._start("serve", str(folder / "serve.yaml"), "--listen", "127.0.0.1:0", "--out", str(self.folder))

    def _start(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlmux", *words], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if "=" not in line:
            self._log.flush()
            sys.exit(f"the server did not start: {Path(self._log.name).read_text()[-2000:]}")
        self.url = line.partition("=")[2]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def resume(self) -> None:
        self._start("resume", str(self.folder))

    def hashes(self, model: str) -> list[str]:
        """Hash of a model's weights after each of its updates."""
        ledger = Ledger(self.folder / LEDGER)
        try:
            return list(ledger.hashes(model).values())
        finally:
            ledger.close()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate()
        self._log.close()


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    folder.mkdir()
    one = Server(folder)
    try:
        yield one
    finally:
        one.close()


class Client:
    """A program that asks again where nobody answers, as SDKs do."""

    def __init__(self, url: str, number: int) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": "tml-test"}, timeout=60)
        self._number = number
        self._seq_id = 0
        self._samplers: list[str] = []
        self.samples: list[bytes] = []
        self.session = self._ask("create_session", tags=[f"rlmux.seed={number}"], sdk_version="0")["session_id"]
        self.model = self._ask(
            "create_model", session_id=self.session, model_seq_id=0, base_model="rlmux/tiny", lora_config={"rank": 8}
        )["model_id"]

    def run(self, num_rounds: int | None, is_over: threading.Event) -> int:
        """Do rounds, so many or until it is over; returns how many."""
        done = 0
        while done != num_rounds and not (num_rounds is None and is_over.is_set()):
            self._round(done)
            done += 1
        return done

    def _round(self, number: int) -> None:
        chance = random.Random(f"{self._number} {number}")
        self._ask("session_heartbeat", session_id=self.session)
        body = training_body(self.model, self._next(), self._number * 10_000 + number)
        loss = self._post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"}).json()
        step = self._ask("optim_step", model_id=self.model, seq_id=self._next(), adam_params={"learning_rate": 1e-2})
        run = f"training_runs/{self.model}/checkpoints"
        if number and chance.random() < 0.5:
            self._request("DELETE", f"{run}/weights/latest", gone_is_fine=True)
        save = self._ask("save_weights", model_id=self.model, seq_id=self._next(), path="latest", overwrite=True)
        path = self._result(save["request_id"])["path"]
        asked = [loss, step, save]
        if chance.random() < 0.5:
            load = self._ask("load_weights", model_id=self.model, seq_id=self._next(), path=path, optimizer=True)
            asked.append(load)
        sampler = self._ask(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=number, model_path=path
        )["sampling_session_id"]
        self._samplers.append(sampler)
        for seq_id, each in enumerate(self._samplers[:-3:-1]):  # the one before is of weights that no name has now
            sample = {"sampling_session_id": each, "seq_id": seq_id, "prompt": PROMPT, "num_samples": 2}
            asked.append(self._ask("asample", **sample, sampling_params=SAMPLED))
        answers = [self._retrieve(each["request_id"]).content for each in asked]
        self.samples += answers[-len(self._samplers[-2:]) :]

    def listed(self) -> list[str]:
        answer = self._request("GET", f"training_runs/{self.model}/checkpoints").json()
        return [one["tinker_path"] for one in answer["checkpoints"]]

    def loads(self, path: str) -> bool:
        load = self._ask("load_weights", model_id=self.model, seq_id=self._next(), path=path, optimizer=True)
        return "error" not in self._result(load["request_id"])

    def _next(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _ask(self, route: str, /, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._post(route, json=body).json()
        return found

    def _post(self, route: str, **how: Any) -> httpx.Response:
        return self._request("POST", route, **how)

    def _retrieve(self, request_id: str) -> httpx.Response:
        while True:
            answer = self._post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                return answer

    def _result(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._retrieve(request_id).json()
        return found

    def _request(self, method: str, route: str, *, gone_is_fine: bool = False, **how: Any) -> httpx.Response:
        begin_s = time.monotonic()
        while True:
            try:
                answer = self._http.request(method, route, **how)
            except httpx.TransportError:
                if time.monotonic() - begin_s > LIMIT_S:
                    raise
                time.sleep(0.1)
                continue
            if answer.is_success or answer.status_code == 408 or (gone_is_fine and answer.status_code == 404):
                return answer
            raise RuntimeError(f"client {self._number}: {method} {route}: {answer.status_code} {answer.text}")


def training_body(model: str, seq_id: int, seed: int) -> bytes:
    """A loss over three sequences of 8 tokens."""
    generator = np.random.default_rng(seed)
    message = wire.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="importance_sampling")
    for _ in range(3):
        tokens = generator.integers(0, 90, 9)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        for name, array, dtype in (
            ("target_tokens", tokens[1:].astype("<i8"), wire.DTYPE_INT64),
            ("logprobs", np.full(8, -4.0, "<f4"), wire.DTYPE_FLOAT32),
            ("advantages", generator.uniform(-1, 1, 8).astype("<f4"), wire.DTYPE_FLOAT32),
        ):
            datum.loss_fn_inputs[name].CopyFrom(wire.Tensor(dense=array.tobytes(), dtype=dtype, shape=[8]))
    return message.SerializeToString(deterministic=True)


class Crowd:
    """Clients in threads of their own, until they are told that it is over."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.clients = [Client(url, number) for number in range(num_clients)]
        self.num_rounds = [0] * num_clients
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            self.num_rounds[number] = self.clients[number].run(None, self._is_over)
        except Exception as error:  # told at the end, with all the others'
            self.failures.append(str(error))

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def killed(folder: Path, num_kills: int, num_clients: int, chance: random.Random) -> tuple[dict[str, Any], list[Any]]:
    """Returns (row of the table, what came of each client)."""
    back = []
    begin_s = time.monotonic()
    with server(folder) as one:
        crowd = Crowd(one.url, num_clients)
        for number in range(num_kills):
            time.sleep(chance.uniform(0.5, 10.0))
            one.kill()
            killed_s = time.monotonic()
            one.resume()
            back.append(time.monotonic() - killed_s)
            if number % 20 == 19:
                print(f"{number + 1} kills", file=sys.stderr, flush=True)
        crowd.close()
        if crowd.failures:
            sys.exit("\n".join(crowd.failures))
        found = [
            (rounds, one.hashes(client.model), client.samples)
            for rounds, client in zip(crowd.num_rounds, crowd.clients, strict=True)
        ]
        listed = [(client, path) for client in crowd.clients for path in client.listed()]
        unloadable = [path for client, path in listed if not client.loads(path)]
    row = {
        "kills": num_kills,
        "minutes": round((time.monotonic() - begin_s) / 60, 1),
        "rounds": ", ".join(map(str, crowd.num_rounds)),
        "listed": len(listed),
        "unloadable": " ".join([str(len(unloadable)), *unloadable]),
        "back_s": f"{statistics.median(back):.2f}, {max(back):.2f}" if back else "-",
    }
    return row, found


def alone(folder: Path, num_rounds: list[int]) -> Iterator[tuple[list[str], list[bytes]]]:
    """(hashes, samples) of each client, one after another on a server that is left alone."""
    with server(folder) as one:
        for number, rounds in enumerate(num_rounds):
            client = Client(one.url, number)
            client.run(rounds, threading.Event())
            yield one.hashes(client.model), client.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="rlmux-kills-") as folder, marking():
        row, found = killed(Path(folder) / "killed", asked.kills, asked.clients, random.Random(asked.seed))
        expected = list(alone(Path(folder) / "alone", [rounds for rounds, *_ in found]))
    is_equal = [(hashes, samples) == other for (_, hashes, samples), other in zip(found, expected, strict=True)]
    row["equal"] = f"{sum(is_equal)} of {len(is_equal)}"
    if asked.json:
        sys.exit(print(json.dumps(row)))
    for name, value in row.items():
        print(f"{name:12} {value}")


if __name__ == "__main__":
    main()

"""A server as a user starts it, and a client that speaks its protocol without the SDK."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlmux.service.tinker import wire_pb2 as wire

ROOT = Path(__file__).parents[2]
FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
serve:
  models:
    rlmux/tiny:
      model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 16}
      max_prompt_tokens: 64
      max_new_tokens: 64
      slots: 8
"""


class Served:
    """One server process."""

    def __init__(self, words: list[str], folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "rlmux", "serve", "--listen", "127.0.0.1:0", *words]
        self.folder = folder
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().partition("=")[2]

    def kill(self) -> None:
        self.process.kill()
        self._leave()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self._leave()

    def _leave(self) -> int:
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start a server in a new folder, or on one that another left behind."""
    running: list[Served] = []
    file = tmp_path / "serve.yaml"
    file.write_text(FILE, encoding="utf-8")

    def start(resume: Served | None = None) -> Served:
        folder = tmp_path / f"run{len(running)}" if resume is None else resume.folder
        words = [str(file), "--out", str(folder)] if resume is None else ["--resume", str(folder)]
        running.append(Served(words, folder))
        return running[-1]

    yield start
    for each in running:
        with contextlib.suppress(ProcessLookupError):
            if each.process.poll() is None:
                each.kill()


class Client:
    """Asks by hand what the SDK asks."""

    def __init__(self, url: str, key: str = "tml-test") -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60)

    def post(self, route: str, /, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def ask(self, route: str, /, **body: Any) -> dict[str, Any]:
        answer = self.post(route, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, request_id: str) -> httpx.Response:
        while True:
            answer = self.post("retrieve_future", request_id=request_id)
            if answer.status_code != 408:
                return answer

    def model(self, session: str, number: int = 0) -> str:
        promise = self.ask(
            "create_model", session_id=session, model_seq_id=number, base_model="rlmux/tiny", lora_config={"rank": 8}
        )
        return str(promise["model_id"])

    def train(self, model: str, number: int, seed: int) -> list[str]:
        """A loss and an update; returns the ids of the two promises."""
        body = training_body(model, number, seed)
        sent = self.http.post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})
        assert sent.status_code == 200, sent.text
        params = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
        step = self.ask("optim_step", model_id=model, seq_id=number + 1, adam_params=params)
        return [sent.json()["request_id"], step["request_id"]]


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(served: Served, key: str = "tml-test") -> Client:
        clients.append(Client(served.url, key))
        return clients[-1]

    yield make
    for client in clients:
        client.http.close()


def training_body(model: str, number: int, seed: int) -> bytes:
    generator = np.random.default_rng(seed)
    message = wire.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn="importance_sampling")
    for _ in range(3):
        tokens = generator.integers(0, 90, 9)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        arrays = {
            "target_tokens": (tokens[1:].astype("<i8"), wire.DTYPE_INT64),
            "logprobs": (np.full(8, -4.0, "<f4"), wire.DTYPE_FLOAT32),
            "advantages": (generator.uniform(-1, 1, 8).astype("<f4"), wire.DTYPE_FLOAT32),
        }
        for name, (array, dtype) in arrays.items():
            datum.loss_fn_inputs[name].CopyFrom(wire.Tensor(dense=array.tobytes(), dtype=dtype, shape=[8]))
    return message.SerializeToString(deterministic=True)

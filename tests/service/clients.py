"""A server process, programs of the real SDK, and a client that speaks the protocol without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.command_line import command

from rlmux.service.tinker import wire_pb2 as wire

ROOT = Path(__file__).parents[2]
CLIENT_PYTHON = os.environ.get("RLMUX_TINKER_PYTHON") or (sys.executable if find_spec("tinker") else "")
"""Python with the SDK; empty where there is none."""


class Served:
    """One server process."""

    def __init__(self, words: list[str], folder: Path, *, has_own_fork_server: bool = False) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "rlmux", *words] if has_own_fork_server else command(*words)
        self.folder = folder
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip().partition("=")[2]

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://").partition("/")[0]

    def kill(self) -> None:
        self.process.kill()
        self._leave()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self._leave()

    def _leave(self) -> int:
        code = self.process.wait(120)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Program:
    """A client program of the real SDK, in a process of its own; its output is kept line by line."""

    def __init__(self, served: Served, words: list[object]) -> None:
        environment = {
            **os.environ,
            "TINKER_BASE_URL": served.url,
            "TINKER_API_KEY": "tml-test",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [CLIENT_PYTHON, "-W", "ignore", *map(str, words)],
            stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment, cwd=served.folder / "tokenizers",
        )  # fmt: skip

    def line(self) -> dict[str, Any]:
        """Its next line of output, which is JSON. Fails with what it wrote to stderr where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(120)
            self.errors.seek(0)
            pytest.fail(f"the client ended with {self.process.returncode}: {self.errors.read()[-3000:]}")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


def weights_of(served: Served, path: str) -> str:
    """Hash of the weights that a client saved under a name, as the server's folder has it."""
    run, _, name = path.removeprefix("tinker://").split("/")
    session, _, number = run.split(":")
    models = served.folder / "models" / f"{session.partition('-')[0]}-{number}"
    (folder,) = models.glob(f"state-*-{name}")
    return json.loads((folder / "state.json").read_text())["weights_sha256"]


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
        future = self.ask(
            "create_model", session_id=session, model_seq_id=number, base_model="rlmux/tiny", lora_config={"rank": 8}
        )
        return str(future["model_id"])

    def train(self, model: str, number: int, seed: int) -> list[str]:
        """A loss and an update; returns the ids of the two futures."""
        body = training_body(model, number, seed)
        sent = self.http.post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})
        assert sent.status_code == 200, sent.text
        params = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
        step = self.ask("optim_step", model_id=model, seq_id=number + 1, adam_params=params)
        return [sent.json()["request_id"], step["request_id"]]


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

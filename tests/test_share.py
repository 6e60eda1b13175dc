"""The permit client alone, and its hooks for torch: what a program gets that copies share.py."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import socket
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from tests.waiting import until

from rlmux import share


@pytest.fixture(autouse=True)
def no_broker(monkeypatch):
    for name in ("RLMUX_BROKER", "RLMUX_JOB", "RLMUX_SLO", "RLMUX_WEIGHT", "RLMUX_OFFLOAD", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_broker_phases_begin_at_once_and_nothing_is_started():
    before = threading.active_count()
    job = share.join("a", {"train": "gpu0"})
    calls = []
    job.on_leave("gpu0", lambda: calls.append("off"), lambda: calls.append("on"))

    @job.phase("train")
    def step(number):
        return number + 1

    @job.phase("train")
    async def later(number):
        async with job.phase(None):
            return number + 2

    with job.phase("train", units=3) as phase:
        phase.done(1)
        job.safe_point()
        assert step(1) == 2
    assert asyncio.run(later(1)) == 3
    assert (job.is_shared, calls, threading.active_count()) == (False, [], before)


def test_a_role_that_the_job_does_not_have_is_named_with_those_it_has():
    job = share.join("a", {"train": "gpu0"})
    with pytest.raises(share.ShareError, match="phase 'rolout': accepted: None, 'train'"):
        job.phase("rolout")


@pytest.mark.parametrize("weight", ["0", "-1", "101", "nan", "two"])
def test_a_weight_that_is_none_is_told_what_is_accepted(monkeypatch, weight):
    monkeypatch.setenv("RLMUX_WEIGHT", weight)
    with pytest.raises(share.ShareError, match=f"weight {weight}: accepted: a number from 1 to 100 "):
        share.join("a")


@pytest.mark.parametrize(
    "address", ["/run/rlmux.sock", "unix:", "tcp://localhost", "tcp://:80", "tls:a:80", "http://a:80"]
)
def test_an_address_that_is_none_is_told_what_is_accepted(monkeypatch, address):
    monkeypatch.setenv("RLMUX_BROKER", address)
    with pytest.raises(share.ShareError, match="accepted: unix:PATH, tcp://HOST:PORT or tls://HOST:PORT"):
        share.join("a")


def test_where_no_broker_answers_the_address_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RLMUX_BROKER", f"unix:{tmp_path}/s")
    monkeypatch.setattr(share, "CONNECT_LIMIT_S", 0.2)
    with pytest.raises(share.ShareError, match="no broker answers at RLMUX_BROKER=unix:"):
        share.join("a")


class LittleBroker(threading.Thread):
    """Grants what is asked for; at the end of a phase it asks the program to leave, and at once again."""

    def __init__(self, path) -> None:
        super().__init__(daemon=True)
        self.heard: list[str] = []
        self._listening = socket.create_server(str(path), family=socket.AF_UNIX)
        self.start()

    def run(self) -> None:
        connection, _ = self._listening.accept()
        with self._listening, connection, connection.makefile("rw") as lines:
            for message in map(json.loads, lines):
                self.heard.append(message["t"])
                for answer in self.answers(message):
                    lines.write(json.dumps(answer) + "\n")
                lines.flush()

    @staticmethod
    def answers(message):
        match message["t"]:
            case "hello":
                return [{"t": "welcome", "pools": {"train": "gpu0"}}]
            case "ask":
                return [{"t": "granted", "id": message["id"], "fence": 1, "pools": ["gpu0"]}]
            case "done":
                after = {"t": "after", "fence": 1, "leave": True, "pools": ["gpu0"]}
                return [after, {"t": "evict", "pool": "gpu0", "for": "b"}]
        return []


def test_two_requests_to_leave_run_the_hook_once(monkeypatch, tmp_path):
    """A broker that was started again may ask for what the one before has asked for."""
    broker, calls = LittleBroker(tmp_path / "s"), []
    monkeypatch.setenv("RLMUX_BROKER", f"unix:{tmp_path}/s")
    job = share.join("a", {"train": "gpu0"})

    def offload():
        calls.append("begins")
        time.sleep(0.2)
        calls.append("ends")

    job.on_leave("gpu0", offload, lambda: None)
    with job.phase("train"):
        pass
    until(lambda: broker.heard.count("left") == 2, "two answers that it left", seen=lambda: broker.heard)
    assert calls == ["begins", "ends"]
    assert "failed_to_leave" not in broker.heard
    job.close()


# ---------------------------------------------------------------------- torch


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight  # tied: one storage
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(16.0).reshape(2, 8)).square().sum().backward()
    optimizer.step()


def test_an_offloaded_model_is_gone_and_comes_back_with_its_optimizer_bit_for_bit():
    model, optimizer = trained()
    other, other_optimizer = trained()
    hooks = share.torch_offload(model, optimizer)
    weight, view = model[0].weight, model[0].weight.data[3]
    before = hooks.resident_bytes()
    for _ in range(3):
        assert hooks.offload() == before > 4 * 8 * 8 * 4
        assert hooks.resident_bytes() == 0
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in model.parameters())
        hooks.onload()
        step(model, optimizer)
        step(other, other_optimizer)
        assert hooks.resident_bytes() == before
    assert model[0].weight is weight
    assert torch.equal(view, weight.data[3])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_memory_that_numpy_shares_is_replaced_and_that_is_said_once():
    model = torch.nn.Linear(4, 4)
    model.weight.data = torch.from_numpy(np.arange(16, dtype=np.float32).reshape(4, 4))
    expected = model.weight.data.clone()
    hooks = share.torch_offload(model)
    with pytest.warns(UserWarning, match="another owner shares"):
        freed = hooks.offload()
    assert freed == 16 * 4 + 4 * 4
    assert model.weight.numel() == 0
    hooks.onload()
    assert torch.equal(model.weight.data, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.offload()


def test_views_of_one_memory_that_cannot_be_emptied_are_views_of_one_memory_again():
    flat = torch.nn.Parameter(torch.arange(12.0))
    flat.detach().numpy()  # from now on torch does not let go of this memory, though the array is gone
    model = torch.nn.Module()
    model.flat, model.turned = flat, torch.nn.Parameter(flat.data[4:].view(2, 4).t())
    hooks = share.torch_offload(model)
    with pytest.warns(UserWarning, match="another owner shares"):
        assert hooks.offload() == 12 * 4
    assert hooks.resident_bytes() == 0
    hooks.onload()
    assert hooks.resident_bytes() == 12 * 4
    assert model.turned.stride() == (1, 4)
    model.turned.data[0, 1] = 99.0
    assert flat.tolist() == [*range(8), 99.0, 9, 10, 11]


def test_an_offload_that_fails_in_the_middle_leaves_everything_where_it_was(monkeypatch):
    model, optimizer = trained()
    hooks = share.torch_offload(model, optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make, made = hooks._host_buffer, []

    def fail_at_the_third(storage):
        made.append(storage)
        if len(made) == 3:
            raise MemoryError("no host memory")
        return make(storage)

    monkeypatch.setattr(hooks, "_host_buffer", fail_at_the_third)
    with pytest.raises(MemoryError):
        hooks.offload()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_engine_behind_http_is_put_to_sleep_and_woken_and_an_error_of_it_is_raised(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy would ask itself for 127.0.0.1
    asked = []

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/wake_up" else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        share.http_sleep(url, "sglang").offload()
        vllm = share.http_sleep(url, "vllm")
        vllm.offload()
        with pytest.raises(OSError, match="500") as failed:
            vllm.onload()
        failed.value.close()
        server.shutdown()
        thread.join()
    assert asked == [("/release_memory_occupation", b"{}"), ("/sleep?level=1", b""), ("/wake_up", b"")]
    with pytest.raises(ValueError, match="accepted: vllm, sglang"):
        share.http_sleep(url, "llama")


def test_a_trainer_that_is_none_of_trls_is_refused_with_what_it_misses():
    with pytest.raises(TypeError, match="has no _generate, _calculate_rewards"):
        share.trl(type("Trainer", (), {"train": print, "training_step": print})(), share.join("a"))


def test_a_forked_child_of_a_program_is_not_the_program():
    job = share.join("a", {"train": "gpu0"})
    job._pid = os.getppid()
    job._link = object()  # type: ignore[assignment]
    assert not job.is_shared
    with job.phase("train"):
        job.safe_point()


TOOL = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in {fails}) echo "no such process" >&2; exit 3;; esac
"""


@pytest.fixture
def checkpointing(tmp_path, monkeypatch):
    """`checkpointing(fails)` puts an executable in place of NVIDIA's tool; returns a function for the calls so far."""
    calls = tmp_path / "calls"

    def place(fails: str = "never"):
        tool = tmp_path / "cuda-checkpoint"
        tool.write_text(TOOL.format(calls=calls, fails=fails))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return lambda: [line.removeprefix("--action ") for line in calls.read_text().splitlines()]

    return place


def test_processes_are_locked_before_any_is_copied_and_go_on_once_all_are_back(checkpointing, tmp_path):
    calls = checkpointing()
    hooks = share.cuda_checkpoint([7, 8], driver=str(tmp_path), limit_s=2)
    hooks.offload()
    away = ["lock --pid 7 --timeout 2000", "lock --pid 8 --timeout 2000", "checkpoint --pid 7", "checkpoint --pid 8"]
    assert calls() == away
    hooks.onload()
    assert calls()[4:] == ["restore --pid 7", "restore --pid 8", "unlock --pid 7", "unlock --pid 8"]


def test_a_process_that_cannot_be_copied_leaves_none_locked_and_is_told(checkpointing, tmp_path):
    calls = checkpointing('"--action checkpoint --pid 8"')
    with pytest.raises(RuntimeError, match="--action checkpoint --pid 8 ended with 3: no such process"):
        share.cuda_checkpoint([7, 8], driver=str(tmp_path)).offload()
    assert calls()[4:] == ["restore --pid 7", "unlock --pid 8", "unlock --pid 7"]


def test_without_the_tool_or_a_gpu_the_program_is_told_as_it_joins(checkpointing, monkeypatch, tmp_path):
    monkeypatch.setenv("RLMUX_BROKER", "unix:/nowhere")
    monkeypatch.setenv("RLMUX_OFFLOAD", "cuda-checkpoint")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(share.ShareError, match="cuda-checkpoint is not on PATH"):
        share.join("a", {"train": "gpu0"})
    with pytest.raises(share.ShareError, match="one pool for all roles"):
        share.join("a", {"train": "gpu0", "rollout": "gpu1"})
    checkpointing()
    with pytest.raises(RuntimeError, match="no NVIDIA driver here"):
        share.cuda_checkpoint(driver=str(tmp_path / "none"))
    monkeypatch.setenv("RLMUX_OFFLOAD", "criu")
    with pytest.raises(share.ShareError, match="RLMUX_OFFLOAD=criu: accepted: cuda-checkpoint"):
        share.join("a", {"train": "gpu0"})


@pytest.mark.parametrize(
    "touch",
    [
        lambda model, optimizer: model(torch.zeros(1, 3)),
        lambda model, optimizer: next(model.parameters()).sum(),
        lambda model, optimizer: next(model.parameters()).data,
        lambda model, optimizer: next(model.parameters()).grad + 1,
        lambda model, optimizer: optimizer.step(),
        lambda model, optimizer: {key: value.clone() for key, value in model.state_dict().items()},
        lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ],
)
def test_an_offloaded_tensor_that_is_read_raises_with_the_phase_to_enter(touch):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = share.torch_offload(model, optimizer)
    share.join("a", pools={"rollout": "gpu0", "train": "gpu1"}).on_leave("train", hooks)
    hooks.offload()
    assert [tuple(one.shape) for one in model.parameters()] == [(2, 3), (2,)], "shapes can be read"
    with pytest.raises(RuntimeError, match=r"offloaded.*accepted: within job.phase\('train'\)"):
        touch(model, optimizer)
    assert hooks.offload() == 0
    hooks.onload()
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.step()


def test_a_region_that_cannot_be_entered_leaves_the_outer_one_its_pool(monkeypatch):
    job, held = share.join("a", pools={"train": "gpu0", "rollout": "gpu1"}), []

    def change(region):
        held[:] = []
        if "gpu1" in region.pools:
            raise share.ShareError("no permit")
        held[:] = region.pools

    monkeypatch.setattr(share.Job, "is_shared", True)
    monkeypatch.setattr(job, "_change", change)
    with job.phase("train"):
        with pytest.raises(share.ShareError, match="no permit"), job.phase("rollout"):
            pass
        assert held == ["gpu0"]


def test_hooks_of_a_program_may_have_phases_of_their_own():
    class Trainer:
        phases = ("warm-up",)

        def offload(self) -> None: ...

        def onload(self) -> None: ...

    share.join("a", pools={"train": "gpu0"}).on_leave("train", Trainer())
    assert Trainer.phases == ("warm-up",)

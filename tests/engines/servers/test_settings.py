"""What servers of others are started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.core.errors import UserError
from rlmux.engines.servers.factory import DIALECTS, check_memory
from rlmux.engines.servers.settings import ServerSettings


def settings(device: str, args: tuple[str, ...] = ()) -> ServerSettings:
    return ServerSettings(
        folder=Path("model"),
        num_slots=8,
        max_len=64,
        device=device,
        num_threads=1,
        dtype="bfloat16",
        memory_bytes=40e9,
        device_bytes=0.0 if device == "cpu" else 80e9,
        args=args,
    )


@pytest.mark.parametrize(("name", "key"), [("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")])
def test_a_server_on_a_gpu_takes_the_memory_that_it_was_counted_with(name, key):
    command = DIALECTS[name].command("python", 1, settings("cuda"))
    assert command[command.index(key) + 1] == "0.500"
    assert key not in DIALECTS[name].command("python", 1, settings("cpu"))


def test_an_argument_of_the_file_comes_last_and_holds():
    command = DIALECTS["vllm"].command("python", 1, settings("cuda", ("--gpu-memory-utilization", "0.7")))
    assert command[-2:] == ["--gpu-memory-utilization", "0.7"]


def test_vllm_records_cuda_graphs_on_a_gpu_and_compiles_nothing_on_a_cpu():
    assert "--enforce-eager" not in DIALECTS["vllm"].command("python", 1, settings("cuda"))
    assert "--enforce-eager" in DIALECTS["vllm"].command("python", 1, settings("cpu"))


def test_a_server_that_took_more_memory_than_its_limit_is_refused_with_the_key():
    check_memory("vllm", 42e9, 40e9)
    with pytest.raises(UserError, match=r"vllm took 60.0 GB of device memory; its limit is 40.0 GB; .*memory_gb: 60"):
        check_memory("vllm", 60e9, 40e9)

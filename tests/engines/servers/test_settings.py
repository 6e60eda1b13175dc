"""What servers of others are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import UserError
from rlmux.engines.servers.factory import check_memory, dialect_of
from rlmux.engines.servers.settings import ServerSettings
from rlmux.engines.servers.sglang import Sglang
from rlmux.engines.servers.vllm import Vllm

SERVERS = {"vllm": Vllm((0, 32)), "sglang": Sglang()}


def settings(device: str, args: tuple[str, ...] = (), **more: Any) -> ServerSettings:
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
        **more,
    )


@pytest.mark.parametrize(("name", "key"), [("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")])
def test_a_server_on_a_gpu_takes_the_memory_that_it_was_counted_with(name, key):
    command = SERVERS[name].command("python", 1, settings("cuda"))
    assert command[command.index(key) + 1] == "0.500"
    assert key not in SERVERS[name].command("python", 1, settings("cpu"))


def test_an_argument_of_the_file_comes_last_and_holds():
    command = SERVERS["vllm"].command("python", 1, settings("cuda", ("--gpu-memory-utilization", "0.7")))
    assert command[-2:] == ["--gpu-memory-utilization", "0.7"]


def test_vllm_records_cuda_graphs_on_a_gpu_and_compiles_nothing_on_a_cpu():
    assert "--enforce-eager" not in SERVERS["vllm"].command("python", 1, settings("cuda"))
    assert "--enforce-eager" in SERVERS["vllm"].command("python", 1, settings("cpu"))


def test_a_server_that_took_more_memory_than_its_limit_is_refused_with_the_key():
    check_memory("vllm", 42e9, 40e9)
    with pytest.raises(UserError, match=r"vllm took 60.0 GB of device memory; its limit is 40.0 GB; .*memory_gb: 60"):
        check_memory("vllm", 60e9, 40e9)


def test_what_rlmux_gives_a_server_can_be_left_out_and_its_variables_be_set_and_unset():
    given = settings(
        "cuda",
        takes_tensors=True,
        without=("--weight-transfer-config", "--enable-sleep-mode"),
        variables={"VLLM_BATCH_INVARIANT": None, "VLLM_USE_V2_MODEL_RUNNER": "0", "NCCL_DEBUG": "INFO"},
    )
    command, variables = SERVERS["vllm"].command("python", 1, given), SERVERS["vllm"].environment(given)
    assert not {"--weight-transfer-config", "--enable-sleep-mode"} & set(command)
    assert not [word for word in command if "ipc" in word], "the value of a flag goes with it"
    assert "--gpu-memory-utilization" in command
    assert variables["VLLM_BATCH_INVARIANT"] is None
    assert (variables["VLLM_USE_V2_MODEL_RUNNER"], variables["NCCL_DEBUG"]) == ("0", "INFO")


@pytest.mark.parametrize("name", SERVERS)
def test_a_copy_of_the_model_is_split_over_gpus_and_there_may_be_several(name):
    words = {"vllm": ("--tensor-parallel-size", "--data-parallel-size"), "sglang": ("--tp-size", "--dp-size")}[name]
    one = SERVERS[name].command("python", 1, settings("cuda"))
    assert not set(words) & set(one)
    several = SERVERS[name].command("python", 1, settings("cuda", tensor_parallel=2, data_parallel=4))
    assert [several[several.index(word) + 1] for word in words] == ["2", "4"]


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.24.0", "--tokens-only"),
        ("0.29.1", "--tokens-only"),
        ("0.30.0", "--enable-scale-out"),
        ("1.4", "--enable-scale-out"),
    ],
)
def test_a_version_gets_the_flag_that_it_knows_for_tokens(version, flag):
    flags = {"--tokens-only", "--enable-scale-out"} & set(
        dialect_of("vllm", version).command("python", 1, settings("cpu"))
    )
    assert flags == {flag}


def test_buffers_of_weights_are_asked_for_where_the_server_can_take_them():
    command = SERVERS["vllm"].command("python", 1, settings("cuda", takes_tensors=True))
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "ipc"}'
    assert "--weight-transfer-config" not in SERVERS["vllm"].command("python", 1, settings("cuda"))

"""Models that are LoRA adapters of one base: programs of the real SDK, and what a server tells and refuses of ranks."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.service.conftest import FILE
from tests.service.tinker.test_random_requests import SERVED, Place, as_json
from tests.service.tinker.test_sdk import PROGRAMS, check_two_clients_and_a_killed_server

from rlmux.config.serve_file import ServeSpec
from rlmux.config.service_file import parse_service_file
from rlmux.core.errors import UserError
from rlmux.log.run_log import LogReader
from rlmux.rl.memory.adapter_base import base_bytes
from rlmux.runtime.memory.memory_budget import with_machine_memory
from rlmux.service import model_serving
from rlmux.service.model_serving import Serving, with_bases
from rlmux.service.served_verification import verify_served
from rlmux.service.tinker.bodies import LoraConfig

LORA = f"{FILE}      parameters: lora\n      max_lora_rank: 16\n"


@pytest.mark.slow
def test_two_adapters_at_once_and_a_killed_server_are_what_each_is_alone_and_verified(serve, program):
    served = serve(text=LORA)
    resumed = check_two_clients_and_a_killed_server(served, serve, program)
    kept = {file.name: names_in(file) for file in served.folder.glob("models/*/**/*.safetensors")}
    assert "adapter_model.safetensors" in kept
    assert "model.safetensors" not in kept
    assert all(".lora_" in name for file, names in kept.items() if file != "optimizer.safetensors" for name in names)
    assert resumed.stop() == 0
    verdicts = verify_served(served.folder, ["s2-0", "s3-0"], print_line=lambda _: None)
    assert [each.line() for each in verdicts] == [f"{name}: equal at all 3 steps (sha256)" for name in ("s2-0", "s3-0")]


@pytest.mark.slow
def test_two_clients_that_sample_at_once_are_in_one_batch_and_get_what_each_gets_alone(serve, program):
    served = serve(text=LORA)
    found = program(served, PROGRAMS / "tenants.py", "rlmux/tiny", 1).line()
    assert found["together"] == found["alone"]
    assert found["alone"][0] != found["alone"][1]
    with LogReader(served.folder) as log:
        shared = [entry.value["tokens"] for entry in log.entries() if entry.type == "shared_batch"]
    assert {tuple(tokens) for tokens in shared if len(tokens) > 1} == {("s0-0", "s1-0")}
    assert sum(sum(tokens.values()) for tokens in shared) > 1000, "most of what two clients asked for at once"


@pytest.mark.slow
def test_a_downloaded_adapter_is_a_folder_of_peft(serve, program, tmp_path):
    program(serve(text=LORA), PROGRAMS / "download.py", "rlmux/tiny", tmp_path).line()
    names = {file.name for file in (tmp_path / "sdk").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"optimizer.safetensors", "state.json"}
    assert all(".lora_" in name for name in names_in(tmp_path / "sdk" / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "sdk" / "adapter_config.json").read_bytes())["r"] == 4


def names_in(file: Path) -> list[str]:
    """Names of a file's tensors."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [name for name in header if name != "__metadata__"]


@pytest.mark.slow
def test_the_sdk_is_told_of_adapters_goes_on_from_them_and_is_refused_other_ranks(serve, program):
    found = program(serve(text=LORA), PROGRAMS / "adapters.py", "rlmux/tiny").line()
    assert found["info"] == {"is_lora": True, "lora_rank": 4}
    assert found["run"] == {"is_lora": True, "lora_rank": 4}
    assert found["weights"] == {"is_lora": True, "lora_rank": 4, "train_attn": True, "train_unembed": False}
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["score_gap"] < 1e-5, "log-probs of a prompt are those of the adapter"
    assert found["base_gap"] > 1e-3, "and the base is another model"
    assert found["resumed_equal"]
    assert found["from_path"], "a session that trains nothing samples another's adapter"
    assert "lora_config.rank is 0: this server trains LoRA adapters; accepted: 1 to 16" in found["refusals"]["none"]
    assert "lora_config.rank is 17" in found["refusals"]["large"]
    assert "an adapter of rank 4 beside q_proj" in found["refusals"]["other"]


@pytest.mark.parametrize(
    ("parameters", "asked", "told"),
    [
        ("lora", None, "rank is 0: this server trains LoRA adapters; accepted: 1 to 128"),
        ("lora", {"rank": -1}, "rank is -1"),
        ("lora", {"rank": 129}, "accepted: 1 to 128"),
        ("refuse-lora", {"rank": 8}, "rank is 8: this server trains all parameters; accepted: 0"),
    ],
)
def test_a_rank_that_is_not_served_is_refused_before_anything_is_kept(parameters, asked, told):
    served = replace(SERVED, parameters=parameters)
    with pytest.raises(UserError, match=told):
        served.adapter(None if asked is None else LoraConfig(**asked))


def test_a_client_chooses_matrices_and_the_models_seed_makes_its_first_numbers():
    served = replace(SERVED, parameters="lora", seed=3)
    attention = served.adapter(LoraConfig(rank=4, train_mlp=False, train_unembed=False))
    assert attention.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (attention.rank, attention.alpha) == (4, 32.0)
    made = served.training("m", attention, seed=-7)
    assert (made.seed, made.model_seed) == (2**63 - 7, 3), "the base has the served model's seed"
    assert replace(SERVED, parameters="refuse-lora").adapter(LoraConfig(rank=0)) is None


def test_a_server_of_whole_models_tells_that_ranks_are_ignored_and_one_of_adapters_does_not(tmp_path):
    async def told(parameters: str) -> str | None:
        place = Place(tmp_path / parameters, served=replace(SERVED, parameters=parameters))
        return (await place.post("create_session", as_json())).json()["warning_message"]

    assert "rank is ignored" in (asyncio.run(told("full")) or "")
    assert asyncio.run(told("lora")) is None


def test_a_model_that_adapters_do_not_go_with_is_refused_with_its_line(tmp_path):
    experts = "experts: 4, experts_per_token: 2, moe_intermediate_size: 8, architecture: qwen3_moe, hidden_size: 16"
    with pytest.raises(UserError, match="rlmux/tiny cannot be served: parameters: lora does not go with a 'qwen3_moe'"):
        parsed(LORA.replace("hidden_size: 16", experts), tmp_path)


def test_the_base_that_all_share_is_taken_from_the_machines_memory_once(tmp_path, monkeypatch):
    monkeypatch.setattr(model_serving, "visible_gpus", list)
    spec = parsed(LORA, tmp_path)
    there_is, left = (
        with_bases(each.cluster, each.serve).pools["train"].host_memory_bytes for each in (parsed(FILE, tmp_path), spec)
    )
    assert there_is == math.inf, "run_pipelines deals it out"
    whole = with_machine_memory(spec.cluster).pools["train"].host_memory_bytes
    base = base_bytes(spec.serve.models["rlmux/tiny"].model)
    assert whole - left == pytest.approx(base / 2), "two devices have equal parts"


def test_a_server_of_adapters_without_peft_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(model_serving, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="parameters: lora needs peft; accepted: pip install"):
        Serving(parsed(LORA, tmp_path), tmp_path)


def parsed(text: str, folder: Path) -> ServeSpec:
    lanes = parse_service_file(text, source="serve.yaml", folder=folder, base=folder, policies=["rollmux"])
    (lane,) = lanes.values()
    assert lane.serve is not None
    return ServeSpec(cluster=lane.spec.cluster, policy=lane.spec.policy, serve=lane.serve)

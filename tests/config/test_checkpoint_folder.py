"""A checkpoint that cannot be trained is refused from its small files and headers: one line, the file named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.checkpoints import CONFIG, SHAPES, write_checkpoint, write_weights

from rlmux.config import Purpose, checkpoint_folder
from rlmux.rl.config import ARCHITECTURES, ModelConfig
from rlmux.rl.memory.footprint import footprint_of

ESTIMATE = "pipelines.*.estimate={rollout_s: 1, train_s: 1}"
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 97, "n_positions": 128}

MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EXPERTS = {"qwen3_moe": {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 8}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder ckpt with a good checkpoint."""
    return write_checkpoint(tmp_path / "ckpt")


@pytest.fixture
def refusal(complaint, good):
    """The line that a file with this checkpoint is refused with, without its place; overrides may follow."""

    def refuse(*overrides: str, **options: object) -> str:
        return complaint(good, *overrides, replace=[("steps: 60", "model: {path: ckpt}")], **options)

    return refuse


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            GPT2,
            "config.json has model_type 'gpt2', which our own rollout engine does not compute; accepted: qwen3, llama",
        ),
        ({"model_type": "qwen3_moe"}, "config.json has num_experts None; accepted: a whole number, 1 or more"),
        (MOE | {"mlp_only_layers": [0]}, "config.json has mlp_only_layers [0]; accepted: [], experts in every layer"),
        ({"hidden_size": None}, "config.json has hidden_size None; accepted: a whole number, 1 or more"),
        ({"num_hidden_layers": "2"}, "config.json has num_hidden_layers '2'; accepted: a whole number"),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_scaling with rope_type 'dynamic'; accepted: default, linear",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling with rope_type 'longrope'; accepted: default, linear"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters with rope_type 'dynamic'; accepted: default"),
        ({"attention_bias": True}, "config.json has attention_bias True; accepted: false"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act 'gelu'; accepted: silu"),
        ({"sliding_window": "64"}, "config.json has sliding_window '64'; accepted: a whole number, 1 or more"),
        ({"quantization_config": {"bits": 4}}, "config.json has a quantization_config; accepted: weights in F32"),
        ({"vocab_size": 96}, "tensor model.embed_tokens.weight of shape [98, 16]"),
        ({"num_hidden_layers": 3}, "the weights have no tensor model.layers.2.self_attn.q_proj.weight"),
        ({"tie_word_embeddings": False}, "the weights have no tensor lm_head.weight"),
    ],
)
@pytest.mark.parametrize("purpose", Purpose)
def test_a_checkpoint_of_another_kind_is_refused(refusal, folder, changes, text, purpose):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    message = refusal(ESTIMATE, purpose=purpose)
    assert message.startswith("two.yaml:6: pipelines.sort.model.path is 'ckpt': ")
    assert text in message
    assert str(folder) in message


def test_an_architecture_of_others_is_accepted_where_a_server_samples(complaint, good, load, folder):
    gemma = {"model_type": "gemma3_text", "sliding_window": 16, "rope_scaling": {"rope_type": "dynamic"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | gemma))
    given = [("steps: 60", "model: {path: ckpt}"), ("slots: 32", "engine: {name: vllm, python: python}")]
    everywhere = "pipelines.*.rollout.engine={name: vllm, python: python}"
    load(good.replace(*given[0]), everywhere)
    line = complaint(good, replace=given)  # the other pipeline has our own engine
    assert "pipelines.reverse.model.path is 'ckpt'" in line
    assert "model_type 'gemma3_text', which our own rollout engine does not compute; accepted: qwen3, llama" in line
    assert line.endswith("; vLLM and SGLang serve others (rollout.engine)")
    line = complaint(good, everywhere, "pipelines.*.rollout.max_new_tokens=65", replace=given[:1])
    assert line.endswith(f"accepted: up to 128, max_position_embeddings of {folder}")
    (folder / "config.json").write_text(json.dumps(GPT2 | {"n_embd": 16}))
    line = complaint(good, everywhere, replace=given[:1])
    assert line.endswith("config.json has hidden_size None; accepted: a whole number, 1 or more")


@pytest.mark.parametrize("text", ["{", "[]", "", "[" * 100_000])
def test_a_damaged_config_is_named(refusal, folder, text):
    (folder / "config.json").write_text(text)
    assert f"{folder / 'config.json'} is " in refusal()


@pytest.mark.parametrize("length", [0, 5, 8, 100, -1])
def test_truncated_weights_are_named(refusal, folder, length):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    message = refusal()
    assert f"{weights} is truncated" in message


def test_weights_that_are_no_safetensors_are_named(refusal, folder):
    weights = folder / "model.safetensors"
    weights.write_bytes((20).to_bytes(8, "little") + b"x" * 100)
    assert f"{weights} has a damaged header" in refusal()
    weights.write_bytes(weights.read_bytes()[:8] + b'{"a": {"dtype": "F32"}}')
    assert f"{weights} has a damaged header" in refusal()
    write_weights(weights, SHAPES, dtype="F8_E4M3")
    assert f"{weights} has tensors of F8_E4M3; accepted: F32, F16" in refusal()


def test_a_missing_shard_of_the_weights_is_named(refusal, load, good, folder):
    names = list(SHAPES)
    write_weights(folder / "model-00001-of-00002.safetensors", {name: SHAPES[name] for name in names[:1]})
    write_weights(folder / "model-00002-of-00002.safetensors", {name: SHAPES[name] for name in names[1:]})
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal()
    weight_map = {name: f"model-0000{1 if name == names[0] else 2}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load(good.replace("steps: 60", "model: {path: ckpt}"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert f"{folder / 'model-00002-of-00002.safetensors'} is missing" in refusal()


def test_a_head_beside_tied_embeddings_is_a_copy_of_them_or_refused(refusal, load, good, folder):
    head = {"lm_head.weight": SHAPES["model.embed_tokens.weight"]}
    weights = folder / "model.safetensors"
    write_weights(weights, SHAPES | head)
    load(good.replace("steps: 60", "model: {path: ckpt}"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for served in ((), ("pipelines.*.rollout.engine={name: vllm, python: python}",)):
        message = refusal(*served)
        assert "a tensor lm_head.weight that differs from the embedding" in message
        assert f"({folder}); accepted: the same values, no such tensor, or tie_word_embeddings: false" in message
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    load(good.replace("steps: 60", "model: {path: ckpt}"))


def test_weights_beside_an_index_of_other_files_are_refused(refusal, load, good, folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "model.safetensors")}))
    load(good.replace("steps: 60", "model: {path: ckpt}"))
    write_weights(folder / "model-00001-of-00001.safetensors", SHAPES)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(SHAPES, "model-00001-of-00001.safetensors")}))
    message = refusal()
    assert "has model.safetensors beside model.safetensors.index.json, which names other files" in message
    assert message.endswith("accepted: one of them")


def test_a_context_beyond_the_positions_is_refused_at_the_key_that_is_given(refusal, complaint, good, load, folder):
    load(good.replace("steps: 60", "model: {path: ckpt}"), "pipelines.*.rollout.max_new_tokens=64")
    line = refusal("pipelines.*.rollout.max_new_tokens=65")
    assert line == (
        "--set pipelines.*.rollout.max_new_tokens=65: pipelines.sort.rollout.max_new_tokens is 65: with "
        "max_prompt_tokens 64 a sequence has up to 129 tokens; accepted: up to 128, max_position_embeddings of "
        f"{folder}"
    )
    line = refusal("pipelines.*.rollout.max_prompt_tokens=100")
    assert "pipelines.sort.rollout.max_prompt_tokens is 100: with max_new_tokens 32 a sequence has up to 132" in line
    line = complaint(good, replace=[("slots: 32", "max_new_tokens: 8192")])
    assert line.startswith("two.yaml:11: pipelines.sort.rollout.max_new_tokens is 8192: with max_prompt_tokens 64 ")
    assert line.endswith("accepted: up to 8192, a new model's positions")


@pytest.mark.parametrize("changes", [{"use_sliding_window": True}, {"model_type": "mistral"}])
def test_a_context_beyond_a_sliding_window_is_refused(refusal, good, load, folder, changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"sliding_window": 100} | changes))
    load(good.replace("steps: 60", "model: {path: ckpt}"), "pipelines.*.rollout.max_new_tokens=36")
    line = refusal("pipelines.*.rollout.max_new_tokens=37")
    assert line.endswith(f"a sequence has up to 101 tokens; accepted: up to 100, sliding_window of {folder}")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_that_transformers_wrote_is_accepted(load, good, tmp_path, architecture, is_tied):
    from rlmux.engines.model.model_io import build_model

    model = build_model(ModelConfig(architecture=architecture, **EXPERTS.get(architecture, {})), 97, 0)
    if not is_tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.clone())
    model.save_pretrained(tmp_path / "ckpt", max_shard_size="100KB" if is_tied else "5GB")
    load(good.replace("steps: 60", "model: {path: ckpt}"))


def test_an_adapter_of_a_mixture_of_experts_stands_beside_its_attention(complaint, good, load):
    model = "model: {architecture: qwen3_moe, experts: 4, experts_per_token: 2, moe_intermediate_size: 8}"
    adapter = "\n  adapter: {rank: 2, alpha: 4, targets: [q_proj, %s]}"
    line = complaint(good, replace=[("steps: 60", model + adapter % "up_proj")])
    accepted = "[q_proj, k_proj, v_proj, o_proj, lm_head]"
    assert f"adapter.targets includes up_proj, which a 'qwen3_moe' model lacks; accepted: {accepted}" in line
    load(good.replace("steps: 60", model + adapter % "o_proj"))


def test_a_checkpoint_of_two_pipelines_is_read_once_until_it_changes(load, complaint, good, folder, monkeypatch):
    read: Counter[str] = Counter()

    def counted(function):
        def call(path: Path):
            read[path.name] += 1
            return function(path)

        return call

    monkeypatch.setattr(Path, "read_bytes", counted(Path.read_bytes))
    monkeypatch.setattr(checkpoint_folder, "_read_header", counted(checkpoint_folder._read_header))
    text = good.replace("steps: 60", "model: {path: ckpt}")
    for pipeline in load(text).pipelines:
        footprint_of(pipeline.config)
    assert read == {"config.json": 1, "model.safetensors": 1}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_act": "gelu"}))
    assert "config.json has hidden_act 'gelu'; accepted: silu" in complaint(text)

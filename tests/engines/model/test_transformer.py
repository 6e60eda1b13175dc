from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedModel

from rlmux.core.errors import UserError
from rlmux.engines.model import transformer
from rlmux.engines.model.decoder_shape import DecoderShape, check_window
from rlmux.engines.model.transformer import (
    DecodePlan,
    DecoderWeights,
    KvCache,
    PositionTables,
    prefill,
)
from rlmux.rl.config import ARCHITECTURES

CPU = torch.device("cpu")


def model(architecture: str, *, num_kv_heads: int = 2, is_tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            architecture,
            sliding_window=None,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            vocab_size=41,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            head_dim=16,
            tie_word_embeddings=is_tied,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made.eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("is_tied", [True, False])
@torch.inference_mode()
def test_logits_equal_the_hugging_face_forward(architecture: str, num_kv_heads: int, is_tied: bool) -> None:
    reference_model = model(architecture, num_kv_heads=num_kv_heads, is_tied=is_tied)
    shape = DecoderShape.of(reference_model)
    weights = DecoderWeights(shape, CPU)
    weights.refresh(reference_model.state_dict())
    cache, tables = KvCache(shape, 4, 48, CPU), PositionTables(reference_model, 48, CPU)
    tokens = torch.randint(41, (4, 30), generator=torch.Generator().manual_seed(2))
    reference = reference_model(tokens).logits
    for slot, kv in enumerate(prefill(weights, tables, tokens[:, :16])):
        cache.write(slot, kv)
    plan = DecodePlan(weights, cache, tables, 4, 48)
    for position in range(16, 30):
        logits = plan.step(tokens[:, position], torch.full((4,), position))
        assert (logits - reference[:, position]).abs().max() < 1e-4


@torch.inference_mode()
def test_what_is_read_from_a_cache_slot_can_be_written_to_another() -> None:
    shape = DecoderShape.of(model("qwen3"))
    cache = KvCache(shape, 3, 16, CPU)
    cache.keys.normal_()
    cache.values.normal_()
    kv = cache.read(0, 9)
    assert kv.shape == (3, 2, 2, 9, 16)
    cache.write(2, kv)
    assert torch.equal(cache.keys[:, 2, :, :, :9], cache.keys[:, 0, :, :, :9])
    assert torch.equal(cache.values[:, 2, :, :9], cache.values[:, 0, :, :9])
    assert not torch.equal(cache.values[:, 2, :, 9:], cache.values[:, 0, :, 9:])


@torch.inference_mode()
def test_masks_of_long_contexts_equal_the_table_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    some_model = model("qwen3")
    positions = torch.tensor([0, 3, 15, 31])
    from_table = PositionTables(some_model, 32, CPU).mask(positions, 32)
    monkeypatch.setattr(transformer, "_MAX_MASK_TABLE", 0)
    computed = PositionTables(some_model, 32, CPU).mask(positions, 32)
    assert torch.equal(from_table, computed)
    assert (from_table == 0).sum(dim=-1).squeeze(1).tolist() == [1, 4, 16, 32]


@torch.inference_mode()
def test_a_weight_file_with_a_missing_tensor_is_refused_and_changes_nothing() -> None:
    some_model = model("qwen3")
    weights = DecoderWeights(DecoderShape.of(some_model), CPU)
    weights.refresh(some_model.state_dict())
    before = weights.flat.clone()
    other = {name: tensor * 2 for name, tensor in some_model.state_dict().items()}
    del other["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(UserError, match=r"layers\.2\.mlp\.down_proj\.weight is missing"):
        weights.refresh(other)
    other["model.layers.2.mlp.down_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(UserError, match=r"\(3, 3\); the model needs \(64, 96\)"):
        weights.refresh(other)
    assert torch.equal(weights.flat, before)


def test_models_that_the_step_does_not_compute_are_refused() -> None:
    some_model = model("qwen3")
    some_model.config.attention_bias = True
    with pytest.raises(UserError, match="biases"):
        DecoderShape.of(some_model)
    with pytest.raises(UserError, match=r"does not compute a 'gpt2' model; accepted: qwen3, llama"):
        DecoderShape.of(AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=41)))
    mixed = model("qwen3_moe")
    mixed.config.mlp_only_layers = [1]
    with pytest.raises(UserError, match="layers without experts"):
        DecoderShape.of(mixed)


def test_a_sliding_window_that_no_sequence_exceeds_is_none() -> None:
    windowed = model("mistral")
    windowed.config.sliding_window = 48
    check_window(windowed, 48)
    with pytest.raises(UserError, match="sliding_window 48 is not supported; accepted: null, or no sequence longer"):
        check_window(windowed, 49)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
@torch.inference_mode()
def test_scaled_rotations_are_those_of_the_model(rope_type: str) -> None:
    made = model("llama")
    config = made.config
    config.rope_parameters = {
        "rope_type": rope_type,
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    scaled = AutoModelForCausalLM.from_config(config).eval()
    scaled.load_state_dict(made.state_dict())
    tables = PositionTables(scaled, 48, CPU)
    cosines, sines = scaled.model.rotary_emb(torch.zeros(1), torch.arange(48)[None])
    torch.testing.assert_close(tables.rotations.real, cosines[0, :, :8])
    torch.testing.assert_close(tables.rotations.imag, sines[0, :, :8])

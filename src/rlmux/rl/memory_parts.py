"""The bytes that a worker holds when it holds most, part by part, from its pipeline's config alone.

    train worker     weights, gradients, two moments, reference  +  the fullest of
                         a micro-batch's backward, at its begin        activations, logits
                         the same, in the first layer it reaches       activations, gradients of layer and embedding
                         the same, at its end                          gradients of the embedding
                         the optimizer step                            the sum and the optimizer's scratch
                     the first three with partial gradient sums, the new leaf among them: allocators keep the blocks of
                     activations while the leaf is made
    rollout worker   fused weights, KV cache, slots, tables      +  the fullest of
                         weights being loaded                          the file's tensors, one matrix transposed
                         prompts being prefilled                       their KV twice, one layer's activations
                         a decode step                                 logits, probabilities, their cumulative sum
                         a probe                                       KV of two layers

float32 throughout. Activations are those that autograd keeps in transformers' Qwen3 and Llama. They are counted for
the longest sequences that the config allows.
"""

from __future__ import annotations

import math

from rlmux.rl.config import TrainingConfig
from rlmux.rl.model_shape import ModelShape, adapter_parameters, shape_of

Parts = dict[str, float]
"""Bytes by the name of a part."""

FLOAT_BYTES = 4
CUDA_CONTEXT_BYTES = 0.6e9
"""Bytes that a process takes on a GPU before its first tensor: CUDA's context and the kernels of torch and cuBLAS, with
their workspaces. An assumption: no GPU was measured. `benchmarks/memory.py --device cuda` prints the true figure."""

_HEAP_SLACK = 0.25
"""Part of the activations by which the allocator's heap is larger: blocks of many sizes come and go there. Measured on
CPU by `benchmarks/memory.py`: 0.2 to 0.35."""

# What the engines do, which is not in the config; their tests compare these with the engines' own.
PREFILL_BUCKET = 16
MAX_PREFILL_TOKENS = 4096
MAX_MASK_TABLE = 1024
NUM_PROBED_LAYERS = 2


def total(parts: Parts) -> float:
    """Bytes of all parts."""
    return sum(parts.values())


def train_parts(config: TrainingConfig, *, has_flash: bool = True, has_base: bool = True) -> Parts:
    """What a train worker holds on its device at its fullest moment.

    Without `has_flash` attention keeps the probabilities of every pair of tokens. Without `has_base` the frozen base of
    an adapter is counted elsewhere: it lies once in memory for several workers.
    """
    shape = shape_of(config.model)
    weights = weights_bytes(config)
    resident = {"weights": weights, "gradients": weights, "moments": 2 * weights}
    if config.algorithm.kl_coef > 0:
        resident["reference"] = weights
    if config.adapter is not None and has_base:
        resident["base"] = shape.num_parameters * FLOAT_BYTES
    return resident | max(_train_moments(config, shape, has_flash=has_flash), key=total)


def train_state_bytes(config: TrainingConfig) -> float:
    """Bytes of a trainer's state between two steps: what a checkpoint and an offload copy."""
    return (4 if config.algorithm.kl_coef > 0 else 3) * weights_bytes(config)


def weights_bytes(config: TrainingConfig) -> float:
    """Bytes of one version of what is trained, the model or its adapter, as it is published."""
    shape = shape_of(config.model)
    num_trained = shape.num_parameters if config.adapter is None else adapter_parameters(shape, config.adapter)
    return num_trained * FLOAT_BYTES


def _train_moments(config: TrainingConfig, shape: ModelShape, *, has_flash: bool) -> list[Parts]:
    weights = weights_bytes(config)
    moments: list[Parts] = [{"gradient sum": weights, "optimizer scratch": weights}]
    algorithm, warmup = config.algorithm, config.sft_warmup
    num_sequences = algorithm.prompts_per_step * algorithm.group_size // algorithm.num_minibatches
    batches = [(num_sequences, min(num_sequences, algorithm.micro_batch_size))]
    if warmup.num_updates:
        batches.append((warmup.batch_size, min(warmup.batch_size, algorithm.micro_batch_size)))
    for num, size in batches:
        num_leaves = -(-num // algorithm.micro_batch_size)
        num_held = (-(-num_leaves // config.train.num_workers)).bit_length()  # of a rank's own, the new one among them
        for moment in _backward_moments(config, shape, size, has_flash=has_flash):
            moments.append({"gradient sums": num_held * weights, **moment})
    return moments


def _backward_moments(config: TrainingConfig, shape: ModelShape, size: int, *, has_flash: bool) -> list[Parts]:
    """The fullest moments of one micro-batch of `size` sequences."""
    rollout = config.rollout
    length = rollout.max_prompt_tokens + rollout.max_new_tokens - 1
    num_tokens, num_sampled = size * length, size * rollout.max_new_tokens
    activations = num_tokens * _activations_of_token(shape, length, has_flash=has_flash) * FLOAT_BYTES
    activations += num_sampled * shape.hidden_size * FLOAT_BYTES
    kept = {"activations": activations, "heap between activations": _HEAP_SLACK * activations}
    logits = min(num_sampled, config.train.rows_of_chunk(shape.vocab_size)) * shape.vocab_size * FLOAT_BYTES
    embedding = shape.embedding * FLOAT_BYTES if config.adapter is None else 0
    in_a_layer = num_tokens * (3 * shape.intermediate_size + 2 * shape.hidden_size) * FLOAT_BYTES
    if not has_flash:
        in_a_layer = max(in_a_layer, 2 * num_tokens * shape.num_heads * length * FLOAT_BYTES)
    return [
        {**kept, "logits": 3 * logits},
        {**kept, "embedding gradients": embedding, "gradients of a layer": in_a_layer},
        {"embedding gradients": (2 if shape.is_tied else 1) * embedding},
    ]


def _activations_of_token(shape: ModelShape, length: int, *, has_flash: bool) -> float:
    """Values that autograd keeps for one token of a sequence of this length."""
    norm = 2 * shape.hidden_size + 1
    query, kv = shape.query_size, shape.kv_size
    projected = 2 * shape.hidden_size + 4 * shape.intermediate_size  # what the norms give to the projections, the MLP
    if has_flash:
        attention = 3 * query + 2 * kv + shape.num_heads  # queries, outputs twice, keys, values, sums of exponents
    else:
        attention = 4 * query + shape.num_heads * length  # keys and values repeated for every query head
    head_norms = 2 * (query + kv) + shape.num_heads + shape.num_kv_heads if shape.has_head_norms else 0
    return shape.num_layers * (2 * norm + projected + attention + head_norms) + norm


def rollout_parts(config: TrainingConfig, *, has_base: bool = True) -> Parts:
    """What a rollout worker holds on its device at its fullest moment. `has_base`: as in `train_parts`."""
    shape = shape_of(config.model)
    rollout = config.rollout
    max_len = _up_to(rollout.max_prompt_tokens + rollout.max_new_tokens + 1, PREFILL_BUCKET)
    fused = (shape.num_layers * shape.layer_matrices + 2 * shape.embedding) * FLOAT_BYTES
    tables = 8 * max_len * (shape.head_dim // 2 + 1) + (max_len**2 * FLOAT_BYTES if max_len <= MAX_MASK_TABLE else 0)
    weights: Parts = {"weights": fused}
    if config.adapter is not None:
        weights = {"weights": weights_bytes(config), **({"base": fused} if has_base else {})}
    resident = {
        **weights,
        "KV cache": rollout.num_slots * max_len * _kv_of_token(shape),
        "slots": rollout.num_slots * max_len * 20.0,
        "tables": tables,
    }
    being_built = {**weights, "weights being loaded": _loading_bytes(config, shape)}
    return max([resident | moment for moment in _rollout_moments(config, shape, max_len)] + [being_built], key=total)


def _rollout_moments(config: TrainingConfig, shape: ModelShape, max_len: int) -> list[Parts]:
    rollout = config.rollout
    num_slots = rollout.num_slots
    # Logits, log-probs and probabilities in float32, the cumulative sum in float64.
    logits = num_slots * shape.vocab_size * (3 * FLOAT_BYTES + 8)
    hidden = shape.hidden_size + shape.query_size + 2 * shape.kv_size + 3 * shape.intermediate_size
    scratch = num_slots * (hidden + shape.num_heads * max_len) * FLOAT_BYTES
    num_probed = min(NUM_PROBED_LAYERS, shape.num_layers)
    probed = num_slots * max_len * _kv_of_token(shape) * num_probed / shape.num_layers
    prompt = _up_to(rollout.max_prompt_tokens, PREFILL_BUCKET)
    num_prompts = min(num_slots, config.algorithm.prompts_per_step)
    num_rows = min(num_prompts, max(1, MAX_PREFILL_TOKENS // prompt))
    prefilled = num_prompts * prompt * _kv_of_token(shape)
    stacked = num_rows * prompt * (_kv_of_token(shape) + hidden * FLOAT_BYTES)
    return [
        {"weights being loaded": _loading_bytes(config, shape), "decode scratch": scratch, "logits": logits},
        {"prefilled KV": prefilled, "prefill scratch": stacked},
        {"decode scratch": scratch, "logits": logits},
        {"decode scratch": scratch, "logits": logits, "probe": probed},
    ]


def _loading_bytes(config: TrainingConfig, shape: ModelShape) -> float:
    """The tensors of a file, and a copy of the largest of them: hashed, then times a norm's gains."""
    if config.adapter is not None:
        return 2 * weights_bytes(config)
    largest = max(shape.embedding, 2 * shape.hidden_size * shape.intermediate_size)
    return (shape.num_parameters + largest) * FLOAT_BYTES


def _kv_of_token(shape: ModelShape) -> float:
    """Bytes of keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.kv_size * FLOAT_BYTES


def _up_to(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple

"""A worker's peak bytes, part by part, from its pipeline's config alone.

    train worker     weights, gradients, two moments, reference  +  the fullest of    (sharded: `_sharded_parts`)
                         a micro-batch's backward, at its begin        activations, logits
                         the same, in the first layer it reaches       activations, gradients of layer and embedding
                         the same, at its end                          gradients of the embedding
                         the optimizer step                            the sum and the optimizer's scratch
                     the first three with partial gradient sums, the new leaf among them: allocators keep the blocks of
                     activations while the leaf is made
    rollout worker   fused weights, KV cache, slots, tables, on
                     a CPU KV that left a bounded cache          +  the fullest of
                         weights being built                           a whole float32 model, or as loaded
                         weights being loaded                          one tensor of the file, products with gains
                         prompts being prefilled                       their KV twice, one layer's activations
                         a decode step                                 logits, probabilities, their cumulative sum
                         a probe                                       KV of two layers

float32, and with `train.dtype: bfloat16` all that training computes with: working weights, gradients, reference and
activations, beside float32 weights and moments; with `rollout.dtype: bfloat16` all of a rollout worker but its logits.
Activations are those that autograd keeps in transformers' Qwen, Llama
and Mistral; of a layer that is checkpointed, its input. They are counted for the longest sequences that the config
allows.
"""

from __future__ import annotations

import math
from pathlib import Path

from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.model_shape import BYTES, ModelShape, adapter_parameters, shape_of

Parts = dict[str, float]
"""Bytes by the name of a part."""

FLOAT_BYTES = 4
CUDA_CONTEXT_BYTES = 0.9e9
"""Bytes that a process takes on a GPU besides its own tensors: CUDA's context with the kernels of torch and cuBLAS, 0.7
GB, and cuBLAS's workspaces, 0.1 to 0.2 GB with CUDA graphs. Measured on one H200 (`benchmarks/memory.py`)."""

_LARGE = 10**9
"""Trained parameters from which not every step has a checkpoint by default."""

_HEAP_SLACK = 0.25
"""Part of the activations by which the allocator's heap is larger: blocks of many sizes come and go there. Measured on
CPU by `benchmarks/memory.py`: 0.2 to 0.35."""

# What the engines do, which is not in the config; their tests compare these with the engines' own.
PREFILL_BUCKET = 16
MAX_PREFILL_TOKENS = 4096
MAX_MASK_TABLE = 1024
FUSED_AT_ONCE = 2**22
NUM_PROBED_LAYERS = 2
PART_SIZE = 2**20
BLOCK_SIZE = 256


def total(parts: Parts) -> float:
    """Bytes of all parts."""
    return sum(parts.values())


def train_parts(config: TrainingConfig, *, has_flash: bool = True, has_base: bool = True) -> Parts:
    """A train worker's device bytes at its peak.

    Without `has_flash` attention keeps the probabilities of every pair of tokens. Without `has_base` the frozen base of
    an adapter is counted elsewhere: it lies once in memory, in float32, for several workers.
    """
    shape = shape_of(config.model)
    if config.train.is_sharded:
        return _sharded_parts(config, shape, has_flash=has_flash)
    computed_with = weights_bytes(config)
    weights = _master_bytes(config)
    resident = {"weights": weights, "gradients": computed_with, "moments": _device_moments_bytes(config)}
    if computed_with != weights:
        resident["working weights"] = computed_with
    if config.algorithm.kl_coef > 0:
        resident["reference"] = computed_with
    if config.adapter is not None and (has_base or config.train.dtype != "float32"):
        resident["base"] = shape.num_parameters * _compute_bytes(config)
    return resident | max(_train_moments(config, shape, has_flash=has_flash), key=total)


def _sharded_parts(config: TrainingConfig, shape: ModelShape, *, has_flash: bool) -> Parts:
    """What each of several ranks holds that have parts of one model: its own, and what is gathered for a moment.

    The embeddings stay whole from forward to backward, and two layers: one that computes, and the next being gathered.
    Gradients are copied before they are summed over the ranks, in float32.
    """
    own = _master_bytes(config) / config.train.num_workers
    resident = {"weights": own, "gradients": own, "moments": _device_moments_bytes(config)}
    if config.algorithm.kl_coef > 0:
        resident["reference"] = own
    embeddings = (1 if shape.is_tied else 2) * shape.embedding
    resident["gathered weights"] = (embeddings + 2 * shape.layer_matrices) * _compute_bytes(config)
    num_with_gradient = (shape.layer_matrices, embeddings)
    if config.adapter is not None:
        resident["base"] = shape.num_parameters * FLOAT_BYTES / config.train.num_workers
        num_with_gradient = (adapter_parameters(shape, config.adapter) // shape.num_layers, 0)
    moments = []
    for _, size in _micro_batches_of_updates(config):
        first, *others = _backward_moments(config, shape, size, has_flash=has_flash)
        summed = num_with_gradient[0] * (_compute_bytes(config) + FLOAT_BYTES)
        moments += [first, *({**moment, "gradients being summed": summed} for moment in others[:-1])]
        moments.append({**others[-1], "gradients being summed": num_with_gradient[1] * FLOAT_BYTES})
    return resident | max(moments, key=total)


def train_state_bytes(config: TrainingConfig) -> float:
    """Bytes of a trainer's state between two steps, of all ranks with parts together: what a checkpoint copies, and an
    offload of a rank that has it."""
    of_reference = _master_bytes(config) if config.train.is_sharded else weights_bytes(config)
    reference = of_reference if config.algorithm.kl_coef > 0 else 0.0
    return _master_bytes(config) + reference + _moments_bytes(config)


def host_moments_bytes(config: TrainingConfig) -> float:
    """Bytes of a rank's moments that lie in host memory whatever the device is."""
    return _moments_bytes(config) / config.train.num_parts if config.train.optimizer_state == "cpu" else 0.0


def num_trained(config: TrainingConfig) -> int:
    """Parameters that are trained: the model's, or its adapter's."""
    shape = shape_of(config.model)
    return shape.num_parameters if config.adapter is None else adapter_parameters(shape, config.adapter)


def usual_checkpoint_interval(config: TrainingConfig) -> int:
    """Default of `checkpoint_every`, in steps: 1, and 10 from 1B trained parameters on, of which one has 12 GB."""
    return 1 if num_trained(config) < _LARGE else 10


def _device_moments_bytes(config: TrainingConfig) -> float:
    return 0.0 if config.train.optimizer_state == "cpu" else _moments_bytes(config) / config.train.num_parts


def _moments_bytes(config: TrainingConfig) -> float:
    """Bytes of both moments of all that is trained: float32, or a byte each and a float32 for each block."""
    of_each = 1 + FLOAT_BYTES / BLOCK_SIZE if config.train.optimizer_state == "8bit" else FLOAT_BYTES
    return 2 * num_trained(config) * of_each


def whole_model_bytes(config: TrainingConfig) -> float:
    """Bytes of the float32 model that the first rank builds for all, where ranks cannot read their rows of its files.

    transformers converts the tensors of experts, and of files that are not safetensors.
    """
    shape, path = shape_of(config.model), config.model.path
    is_read_by_rows = path is not None and any(Path(path).glob("*.safetensors")) and not shape.num_experts
    return 0.0 if is_read_by_rows else shape.num_parameters * FLOAT_BYTES


def largest_parameter_bytes(config: TrainingConfig) -> float:
    """Bytes of the largest trained parameter."""
    shape = shape_of(config.model)
    largest = max(shape.embedding, shape.mlp_matrices * (2 if shape.num_experts else 1) // 3)
    return min(largest * FLOAT_BYTES, _master_bytes(config))


def weights_bytes(config: TrainingConfig) -> float:
    """Bytes of one version of what is trained, the model or its adapter, as it is computed with and published."""
    return _master_bytes(config) / FLOAT_BYTES * _compute_bytes(config)


def _master_bytes(config: TrainingConfig) -> float:
    """Bytes of what is trained in float32, which is updated."""
    return num_trained(config) * FLOAT_BYTES


def _compute_bytes(config: TrainingConfig) -> int:
    """Bytes of a number that training computes with."""
    return BYTES[config.train.dtype]


def _train_moments(config: TrainingConfig, shape: ModelShape, *, has_flash: bool) -> list[Parts]:
    weights = _master_bytes(config)
    scratch = weights
    if config.train.optimizer_state != "device":  # moments of a part, its denominators, and with 8 bits their rounding
        scratch = min(weights, PART_SIZE * FLOAT_BYTES) * (3 if config.train.optimizer_state == "cpu" else 10)
    moments: list[Parts] = [{"gradient sum": weights, "optimizer scratch": scratch}]
    for num, size in _micro_batches_of_updates(config):
        num_leaves = -(-num // size)
        num_held = 1
        if config.train.is_equal_across_ranks(int(weights / FLOAT_BYTES)):  # of a rank's own, the new one among them
            num_held = (-(-num_leaves // config.train.num_workers)).bit_length()
        for moment in _backward_moments(config, shape, size, has_flash=has_flash):
            moments.append({"gradient sums": num_held * weights, **moment})
    return moments


def _micro_batches_of_updates(config: TrainingConfig) -> list[tuple[int, int]]:
    """(sequences of an update, sequences of its largest micro-batch) of a step, and of the SFT warm-up."""
    algorithm, warmup = config.algorithm, config.sft_warmup
    num_sequences = algorithm.prompts_per_step * algorithm.group_size // algorithm.num_minibatches
    batches = [(num_sequences, min(num_sequences, _sequences_of_micro_batch(config)))]
    if warmup.num_updates:
        batches.append((warmup.batch_size, min(warmup.batch_size, algorithm.sequences_per_pass)))
    return batches


def _sequences_of_micro_batch(config: TrainingConfig) -> int:
    """Sequences of the largest length that go forward and backward together in a step."""
    max_tokens = config.train.tokens_per_micro_batch
    if max_tokens is None:
        return config.algorithm.sequences_per_pass
    return max(1, max_tokens // (config.rollout.max_prompt_tokens + config.rollout.max_new_tokens))


def _backward_moments(config: TrainingConfig, shape: ModelShape, size: int, *, has_flash: bool) -> list[Parts]:
    """The fullest moments of one micro-batch of `size` sequences."""
    rollout = config.rollout
    length = rollout.max_prompt_tokens + rollout.max_new_tokens - 1
    num_tokens, num_sampled = size * length, size * rollout.max_new_tokens
    size_of = _compute_bytes(config)
    in_layers, in_a_layer = _activations_of_token(shape, length, size_of, has_flash=has_flash)
    recomputed = 0.0
    if config.train.activation_checkpointing:
        in_layers, recomputed = shape.num_layers * shape.hidden_size * size_of, num_tokens * in_a_layer
    activations = num_tokens * (in_layers + _norm_of_token(shape, size_of))
    activations += num_sampled * shape.hidden_size * size_of
    kept = {"activations": activations, "heap between activations": _HEAP_SLACK * (activations + 2 * recomputed)}
    logits = min(num_sampled, config.train.rows_of_chunk(shape.vocab_size)) * shape.vocab_size
    has_chunks = num_sampled > config.train.rows_of_chunk(shape.vocab_size)
    embedding = shape.embedding * size_of if config.adapter is None else 0
    of_a_layer = num_tokens * (3 * _mlp_width(shape) + 2 * shape.hidden_size) * size_of
    if not has_flash:
        of_a_layer = max(of_a_layer, 2 * num_tokens * shape.num_heads * length * size_of)
    # In float32 the distribution, its gradient and that of the logits; with bfloat16 also their bfloat16.
    of_logits = (3 * FLOAT_BYTES + (size_of if size_of < FLOAT_BYTES else 0)) * logits
    between_chunks = {}
    if has_chunks:  # the head's gradient so far, that of the chunk, and their sum
        between_chunks = {
            "embedding gradients": 3 * embedding,
            "heap between chunks": _HEAP_SLACK * (of_logits + 3 * embedding),
        }
    return [
        {**kept, "logits": of_logits} | between_chunks,
        {
            **kept,
            "embedding gradients": embedding,
            "recomputed activations": 2 * recomputed,  # the allocator keeps the blocks of the layer before
            "gradients of a layer": of_a_layer,
        },
        {"embedding gradients": (2 if shape.is_tied else 1) * embedding},
    ]


def _mlp_width(shape: ModelShape) -> int:
    """Width of a token's feed-forward layer, its experts' together."""
    return shape.intermediate_size * max(1, shape.num_picked)


def _norm_of_token(shape: ModelShape, size_of: int) -> float:
    """Bytes that autograd keeps of a norm over the hidden size: computed in float32, its result in the dtype."""
    return shape.hidden_size * (FLOAT_BYTES + size_of) + FLOAT_BYTES


def _activations_of_token(shape: ModelShape, length: int, size_of: int, *, has_flash: bool) -> tuple[float, float]:
    """Bytes that autograd keeps for one token of a sequence of this length, in all layers and in one."""
    query, kv = shape.query_size, shape.kv_size
    projected = 2 * shape.hidden_size + 4 * _mlp_width(shape)  # what the norms give to the projections, the MLP
    if shape.num_experts:  # each expert's own rows and what it makes of them; two tables of probabilities
        projected += 2 * shape.hidden_size * shape.num_picked - shape.hidden_size + 2 * shape.num_experts
    if has_flash:
        attention = 3 * query + 2 * kv + shape.num_heads  # queries, outputs twice, keys, values, sums of exponents
    else:
        attention = 4 * query + shape.num_heads * length  # keys and values repeated for every query head
    head_norms = 0.0
    if shape.has_head_norms:
        head_norms = (query + kv) * (FLOAT_BYTES + size_of) + (shape.num_heads + shape.num_kv_heads) * FLOAT_BYTES
    of_a_layer = 2 * _norm_of_token(shape, size_of) + head_norms + (projected + attention) * size_of
    return shape.num_layers * of_a_layer, of_a_layer


def rollout_parts(config: TrainingConfig, *, is_gpu: bool = False, has_base: bool = True) -> Parts:
    """A rollout worker's device bytes at its peak. `has_base`: as in `train_parts`.

    Weights that are built or loaded lie in host memory until they are fused, so a GPU has none of them.
    """
    shape = shape_of(config.model)
    rollout = config.rollout
    size_of = BYTES[rollout.dtype]
    max_len = rollout.slot_tokens
    fused = float(shape.num_layers * shape.layer_matrices + 2 * shape.embedding) * size_of
    tables = 8 * max_len * (shape.head_dim // 2 + 1) + (max_len**2 * size_of if max_len <= MAX_MASK_TABLE else 0)
    weights: Parts = {"weights": fused}
    if config.adapter is not None:
        own = adapter_parameters(shape, config.adapter) * size_of
        weights = {"weights": own, **({"base": fused} if has_base else {})}
    resident = {
        **weights,
        "KV cache": rollout.cached_tokens * _kv_of_token(shape, size_of),
        "slots": rollout.num_slots * max_len * 20.0,
        "tables": tables,
    }
    moments = [resident | moment for moment in _rollout_moments(config, shape)]
    if not is_gpu:
        evicted = {"evicted KV": evicted_bytes(config)}
        moments = [moment | evicted for moment in moments]
        moments.append({**weights, "weights being built": building_bytes(config)})
        moments.append(resident | {"weights being loaded": loading_bytes(config)})
    return max(moments, key=total)


def evicted_bytes(config: TrainingConfig) -> float:
    """Host bytes of KV evicted from the cache if every answer reaches its limit."""
    rollout = config.rollout
    tokens = rollout.cached_tokens * math.log(rollout.num_slots * rollout.slot_tokens / rollout.cached_tokens)
    return tokens * _kv_of_token(shape_of(config.model), BYTES[rollout.dtype])


def _rollout_moments(config: TrainingConfig, shape: ModelShape) -> list[Parts]:
    rollout = config.rollout
    num_slots, size_of = rollout.num_slots, BYTES[rollout.dtype]
    kv_of_token = _kv_of_token(shape, size_of)
    # Logits, log-probs and probabilities in float32, the cumulative sum in float64.
    logits = num_slots * shape.vocab_size * (3 * FLOAT_BYTES + 8)
    hidden = shape.hidden_size + shape.query_size + 2 * shape.kv_size + 3 * _mlp_width(shape)
    scratch = (num_slots * hidden + shape.num_heads * rollout.cached_tokens) * size_of
    num_probed = min(NUM_PROBED_LAYERS, shape.num_layers)
    probed = rollout.cached_tokens * kv_of_token * num_probed / shape.num_layers
    prompt = _up_to(rollout.max_prompt_tokens, PREFILL_BUCKET)
    num_prompts = min(num_slots, config.algorithm.prompts_per_step)
    num_rows = min(num_prompts, max(1, MAX_PREFILL_TOKENS // prompt))
    prefilled = num_prompts * prompt * kv_of_token
    stacked = num_rows * prompt * (kv_of_token + hidden * size_of)
    return [
        {"prefilled KV": prefilled, "prefill scratch": stacked},
        {"decode scratch": scratch, "logits": logits},
        {"decode scratch": scratch, "logits": logits, "probe": probed},
    ]


def building_bytes(config: TrainingConfig) -> float:
    """Bytes of the first weights while they are fused: one tensor of a folder at a time, or a whole float32 model."""
    shape = shape_of(config.model)
    if config.model.path is not None and not shape.num_experts:
        return _fusing_bytes(shape, FLOAT_BYTES)
    return float(shape.num_parameters + min(_largest_tensor(shape), FUSED_AT_ONCE)) * FLOAT_BYTES


def loading_bytes(config: TrainingConfig) -> float:
    """Bytes of a published file while it is fused."""
    if config.adapter is not None:
        return weights_bytes(config)
    return _fusing_bytes(shape_of(config.model), BYTES[config.train.dtype])


def _fusing_bytes(shape: ModelShape, size_of: int) -> float:
    """Bytes of a file's largest tensor, mapped, and of the products of a part with a norm's gains."""
    largest = _largest_tensor(shape)
    return float(largest * size_of + min(largest, FUSED_AT_ONCE) * FLOAT_BYTES)


def _largest_tensor(shape: ModelShape) -> int:
    """Numbers of a file's largest tensor."""
    return max(shape.embedding, shape.mlp_matrices * 2 // 3 if shape.num_experts else shape.mlp_matrices // 3)


def _kv_of_token(shape: ModelShape, size_of: int) -> float:
    """Bytes of keys and values of one token in all layers; `size_of`: bytes of a number."""
    return 2 * shape.num_layers * shape.kv_size * size_of


def _up_to(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple

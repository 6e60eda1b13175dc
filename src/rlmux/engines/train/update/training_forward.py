"""What a model gives the sampled tokens of a micro-batch: their log-probabilities, and each one's entropy.

    input_tokens [T] ──model──▶ hidden [T, width] ──sources──▶ [R, width] ──head, a chunk of rows at a time──▶ [R], [R]

Any causal model of transformers goes this way. One whose attention can be replaced computes the sequences packed in one
row (`packed_attention`), any other one padded to a rectangle; which of the two gives what the model's own forward gives
is known for the architectures below, and measured for others when the engine is built.

The logits of a chunk, [rows, vocab], are the largest tensors of training. They are computed once for the loss and once
more for the gradient, so that no more than one chunk of them is ever held. A micro-batch that is one chunk computes
them once.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlmux.core.errors import UserError
from rlmux.engines.model.packed_attention import is_packed, pack_attention, packed_inputs
from rlmux.engines.train.update.micro_batches import MicroBatch, TrainingSequence, cut
from rlmux.engines.train.update.router_loss import router_loss, router_loss_coef, with_gradient_of
from rlmux.rl.config import TrainConfig

PACKED = (
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Values of `model_type` whose packed forward equals the model's own, as tests check."""
_TOLERANCE = 1e-3
"""Largest difference in nats between the model's own forward and the training forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """A model's scores of the R sampled tokens of a micro-batch."""

    logprobs: Tensor
    """Log-probability [R] of each target, float32, with a gradient."""
    entropies: Tensor
    """Entropy [R] in nats of the distribution that each target is from, without a gradient."""


def score_tokens(model: Any, batch: MicroBatch, temperature: float, *, train: TrainConfig | None = None) -> TokenScores:
    """Scores under log-softmax of logits / temperature, the distribution that rollout samples from.

    The model is one that `prepare_forward` or `pack_attention` was called for. `train` has the size of a chunk. The
    gradient of the log-probs brings along that of the router's auxiliary loss, where the model and `train` have one.
    """
    train = train or TrainConfig()
    coef = router_loss_coef(model.config, train)
    outputs = _hidden(model, batch, {"output_router_logits": True} if coef else {})
    scores = score_hidden(model, outputs.hidden, batch, temperature, train)
    if not coef:
        return scores
    balance = router_loss(outputs.router_logits, model.config)
    logprobs = with_gradient_of(coef * batch.token_share * balance, scores.logprobs)
    return TokenScores(logprobs=logprobs, entropies=scores.entropies)


def hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """Last hidden state [T, width] of each input token, for `score_hidden`."""
    return _hidden(model, batch, {}).hidden


def score_hidden(model: Any, hidden: Tensor, batch: MicroBatch, temperature: float, train: TrainConfig) -> TokenScores:
    """Scores that the head of a model gives the hidden states [T, width] of a micro-batch."""
    chosen = hidden.index_select(0, batch.sources)
    logprobs, entropies = _score_by_chunks(model, chosen, batch.targets, temperature, train)
    return TokenScores(logprobs=logprobs, entropies=entropies)


def prepare_forward(model: PreTrainedModel, train: TrainConfig) -> None:
    """Make a model on the CPU ready for `score_tokens`.

    Raises UserError for a model whose log-probs the training forward does not give.
    """
    if model.config.model_type in PACKED:
        pack_attention(model)
    else:
        _choose_forward(model)
    if train.activation_checkpointing:
        _checkpoint_layers(model)


# --- the model up to its head -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    hidden: Tensor
    """Last hidden state [T, width], in the order of the batch's tokens."""
    router_logits: Sequence[Tensor]
    """Router logits [T, experts] of each layer with experts; empty unless requested."""


def _hidden(model: Any, batch: MicroBatch, options: dict[str, Any]) -> _Outputs:
    if is_packed(model):
        outputs = model.base_model(
            input_ids=batch.input_tokens[None],
            position_ids=batch.positions[None],
            **packed_inputs(model, batch.runs, batch.input_tokens.device),
            use_cache=False,
            **options,
        )
        return _outputs(outputs, outputs.last_hidden_state[0], None)
    is_token = _is_token(batch)
    tokens, positions = (
        torch.zeros(is_token.shape, dtype=each.dtype, device=each.device).masked_scatter_(is_token, each)
        for each in (batch.input_tokens, batch.positions)
    )
    inputs = {"input_ids": tokens, "attention_mask": is_token.long(), "position_ids": positions, "use_cache": False}
    accepted = inspect.signature(model.base_model.forward).parameters
    outputs = model.base_model(**{key: value for key, value in inputs.items() if key in accepted}, **options)
    return _outputs(outputs, outputs.last_hidden_state[is_token], is_token)


def _outputs(outputs: Any, hidden: Tensor, is_token: Tensor | None) -> _Outputs:
    logits = getattr(outputs, "router_logits", None) or ()
    by_layer = [each.reshape(-1, each.shape[-1]) for each in logits]
    if is_token is not None:
        by_layer = [each[is_token.flatten()] for each in by_layer]
    return _Outputs(hidden=hidden, router_logits=by_layer)


def _is_token(batch: MicroBatch) -> Tensor:
    """Where [sequences, longest] the batch's tokens stand once each sequence has a row of its own."""
    lengths = [length for count, length in batch.runs for _ in range(count)]
    device = batch.input_tokens.device
    ones = [torch.ones(length, dtype=torch.bool, device=device) for length in lengths]
    return pad_sequence(ones, batch_first=True)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Have each layer keep its input alone and compute the rest again for the gradient.

    The model stays in evaluation mode, without dropout: only its layers are set to training mode, as transformers
    requires.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise UserError(
            f"train.activation_checkpointing: transformers has none for a {model.config.model_type!r} model; "
            "accepted: false"
        )
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        layer.training = True


# --- the head ---------------------------------------------------------------------------------------------------


def _score_by_chunks(
    model: Any, hidden: Tensor, targets: Tensor, temperature: float, train: TrainConfig
) -> tuple[Tensor, Tensor]:
    num_rows = train.rows_of_chunk(model.get_output_embeddings().weight.shape[0])
    if len(hidden) <= num_rows:
        return _score_rows(model, hidden, targets, temperature)
    scored = [
        checkpoint(_score_rows, model, *rows, temperature, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(torch.split(hidden, num_rows), torch.split(targets, num_rows), strict=True)
    ]
    logprobs, entropies = map(torch.cat, zip(*scored, strict=True))
    return logprobs, entropies


def _score_rows(model: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each row of `hidden` [rows, width]."""
    logits = _logits(model, hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    del logits
    logprobs = distribution.gather(1, targets.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropies = -(distribution.exp().mul_(distribution)).sum(dim=-1)
    return logprobs, entropies


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """What a model's head makes of hidden states, by the names that transformers' configs have for it."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config
    if getattr(config, "logit_scale", None) is not None:
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:
        logits = logits / config.logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


# --- other architectures -----------------------------------------------------------------------------------------


@torch.no_grad()
def _choose_forward(model: PreTrainedModel) -> None:
    """Pack where that gives the log-probs of the model's own forward, else leave it for padding where that does."""
    own_attention = model.config._attn_implementation
    (batch,) = cut([_sequence(model, length) for length in (3, 6)], 2)
    expected = torch.cat([_own_logprobs(model, _sequence(model, length)) for length in (3, 6)])
    if model._supports_attention_backend:
        pack_attention(model)
        if _gives(model, batch, expected):
            return
        model.set_attn_implementation(own_attention)
    if not _gives(model, batch, expected):
        raise UserError(
            "model.path: the training forward does not give the log-probs of the forward of a "
            f"{model.config.model_type!r} model; accepted: a causal model that it does, such as {', '.join(PACKED)}"
        )


def _gives(model: PreTrainedModel, batch: MicroBatch, expected: Tensor) -> bool:
    try:
        found = score_tokens(model, batch, 1.0).logprobs
    except (TypeError, ValueError, AttributeError, RuntimeError):  # it does not take what it would have to
        return False
    return bool(((found - expected).abs() <= _TOLERANCE * (1 + expected.abs())).all())


def _sequence(model: PreTrainedModel, length: int) -> TrainingSequence:
    vocab_size = model.config.get_text_config().vocab_size
    tokens = [(7 * length + 13 * place) % vocab_size for place in range(length + 1)]
    return TrainingSequence(prompt_tokens=tokens[:1], tokens=tokens[1:], is_sampled=[True] * length, weight=1.0)


def _own_logprobs(model: Any, sequence: TrainingSequence) -> Tensor:
    tokens = torch.tensor([[*sequence.prompt_tokens, *sequence.tokens]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None]).squeeze(1)

"""Losses of training requests that bring their own targets, log-probs and advantages: one row for each.

    lp = log-prob of each target now    q = `logprobs`    A = `advantages`    r = exp(lp - q)    w = `weights`

| name                  | loss of a datum                                        | inputs beside `target_tokens`       |
|-----------------------|-----------------------------------------------------|-------------------------------------|
| `cross_entropy`       | -Σ w lp                                                | `weights` (1 where absent)          |
| `importance_sampling` | -Σ r A                                                 | `logprobs`, `advantages`            |
| `ppo`                 | -Σ min(r A, clip(r, low, high) A)                      | the same                            |
| `cispo`               | -Σ sg(clip(r, low, high)) lp A                         | the same                            |
| `gspo`                | PPO's, with s = exp(mean over mask of (sg(lp) - q)),   | the same, and `sequence_ratio_mask` |
|                       | r = s · exp(lp - sg(lp))                               |                                     |

sg: no gradient flows. All are sums over positions; a position with advantage or weight 0 carries no loss. `low` and
`high` bound the ratio itself: keys `clip_low_threshold` (0.8) and `clip_high_threshold` (1.2) of the loss's config.
Sources: arXiv 1707.06347 (PPO), 2506.13585 (CISPO), 2507.18071 (GSPO, token form).

The losses use methods of the tensors they are given: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmux.core.errors import UserError
from rlmux.rl.algorithms import clamped_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

TARGETS = "target_tokens"
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_POLICY = ("logprobs", "advantages")
_CLIPS = {_LOW: 0.8, _HIGH: 1.2}

Inputs = Mapping[str, "Tensor"]
"""Tensors [T] of one datum by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumLoss:
    """One row of the table above."""

    loss: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor]
    """(log-probs [T] of the targets, inputs, config) to the loss [T] of each position."""
    needed: tuple[str, ...] = _POLICY
    """Inputs that a datum must bring beside its targets."""
    optional: tuple[str, ...] = ()
    """Inputs that a datum may bring."""
    config: Mapping[str, float] | None = None
    """Keys of the config with their default values; None: it has none."""

    def check(self, name: str, inputs: frozenset[str], config: Mapping[str, object]) -> dict[str, float]:
        """The complete config. Raises UserError for unknown inputs or keys."""
        accepted = {TARGETS, *self.needed, *self.optional}
        missing, unknown = sorted({TARGETS, *self.needed} - inputs), sorted(inputs - accepted)
        if missing or unknown:
            found = f"no {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)}"
            raise UserError(f"loss_fn_inputs of {name!r}: {found}; accepted: {', '.join(sorted(accepted))}")
        keys = self.config or {}
        whole = dict(keys)
        for key, value in config.items():
            if key not in keys or not isinstance(value, float | int):
                known = ", ".join(keys) or "none"
                raise UserError(f"loss_fn_config of {name!r}: {key}={value!r}; accepted: numbers for {known}")
            whole[key] = float(value)
        return whole


def _cross_entropy(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    return -(logprobs * inputs["weights"]) if "weights" in inputs else -logprobs


def _importance_sampling(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    return -(clamped_log_ratio(logprobs, inputs["logprobs"]).exp() * inputs["advantages"])


def _ppo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    return _clipped(clamped_log_ratio(logprobs, inputs["logprobs"]).exp(), inputs["advantages"], config)


def _cispo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    ratio = clamped_log_ratio(logprobs, inputs["logprobs"]).exp().clamp(config[_LOW], config[_HIGH])
    return -(ratio.detach() * logprobs * inputs["advantages"])


def _gspo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    mask = inputs["sequence_ratio_mask"]
    fixed = logprobs.detach()
    log_ratio = (clamped_log_ratio(fixed, inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1.0)
    return _clipped(log_ratio.exp() * (logprobs - fixed).exp(), inputs["advantages"], config)


def _clipped(ratio: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    return -(ratio * advantages).minimum(ratio.clamp(config[_LOW], config[_HIGH]) * advantages)


DATUM_LOSSES: Mapping[str, DatumLoss] = {
    "cross_entropy": DatumLoss(loss=_cross_entropy, needed=(), optional=("weights",)),
    "importance_sampling": DatumLoss(loss=_importance_sampling),
    "ppo": DatumLoss(loss=_ppo, config=_CLIPS),
    "cispo": DatumLoss(loss=_cispo, config=_CLIPS),
    "gspo": DatumLoss(loss=_gspo, needed=(*_POLICY, "sequence_ratio_mask"), config=_CLIPS),
}


def datum_loss(name: str) -> DatumLoss:
    """The loss of this name. Raises UserError, with the accepted names, for an unknown one."""
    if name in DATUM_LOSSES:
        return DATUM_LOSSES[name]
    accepted = ", ".join(DATUM_LOSSES)
    why = "; its formula is not published: run with loss_fn=importance_sampling" if name == "stable_reinforce" else ""
    raise UserError(f"loss_fn {name!r} is not served{why}; accepted: {accepted}")

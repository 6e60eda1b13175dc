"""Requests of a client's program to its on-demand pipeline: frozen values that cross processes.

    for its train worker, in the order of the model's requests     for its rollout workers, in any order

    ForwardBackward*  ─▶ OptimizerStep  ─▶ weights of a new version   SampleRequest ─▶ SampledSequence*
    WriteWeights, SaveState, LoadState                                with the weights of one file

An answer is a value of this module, or a UserError, which belongs to the request alone. A front may have workers read
requests and write answers in its clients' format: it passes functions of its own module, which cross processes by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmux.rl.types import TrajectoryRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence with the numbers that its loss reads."""

    tokens: Any
    """Input tokens [T], int64 array. Position i predicts `target_tokens[i]`."""
    inputs: Mapping[str, Any]
    """Arrays [T] by name: int64 `target_tokens`, float32 the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Add the gradient of a loss, or only compute it."""

    datums: Sequence[Datum]
    loss: str
    """Name of a row of rl/datum_losses.py."""
    config: Mapping[str, float | str]
    is_forward_only: bool
    complaint: str | None = None
    """Error found before the request reached an engine; None without one."""

    @property
    def num_tokens(self) -> int:
        """Input tokens of all datums."""
        return sum(len(datum.tokens) for datum in self.datums)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardDone:
    """The answer to ForwardBackward."""

    logprobs: Sequence[Any]
    """Log-prob of each target, one float32 array [T] for each datum, in their order."""
    loss: float
    """Sum over all positions of all datums."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoss:
    """A ForwardBackward in the form in which its client sent it."""

    body: bytes
    read: Callable[[bytes], ForwardBackward]
    """Reads the body. Errors go to the request's `complaint` and are never raised."""
    write: Callable[[ForwardBackwardDone], bytes]
    """Makes the answer that is sent back."""
    is_forward_only: bool
    num_tokens: int
    """Input tokens of all datums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Clip the summed gradients, make one update with these numbers, and clear the gradients."""

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    grad_clip: float
    """Largest norm of the gradient; 0: not clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepDone:
    """The answer to OptimizerStep."""

    grad_norm: float
    """Norm of the gradient before it was clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWeights:
    """Write the weights for rollout workers. Answered with their hash."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Write a checkpoint. Answered with the hash of the weights."""

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Load the weights of a checkpoint, optionally its moments. Answered with the hash of the weights."""

    folder: Path
    with_optimizer: bool


Loss = ForwardBackward | PackedLoss
TrainRequest = Loss | OptimizerStep | WriteWeights | SaveState | LoadState


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Sequences to sample from one prompt, and optionally the prompt's own log-probs."""

    id: str
    """Name of the request; unlike all others of its pipeline."""
    trajectories: Sequence[TrajectoryRequest]
    prompt_tokens: Sequence[int]
    num_scored: int = 0
    """Tokens at the end of the prompt whose log-probs are requested."""
    write: Callable[[SampleDone], Any] | None = None
    """Makes the answer that is sent back; None: it is the SampleDone."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens that it may sample, at most."""
        return sum(each.max_new_tokens for each in self.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    """`stop` or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDone:
    """The answer to SampleRequest."""

    id: str
    sequences: Sequence[SampledSequence] = field(default_factory=tuple)
    prompt_logprobs: Sequence[float] = ()
    """Requested log-probs of the prompt's last tokens."""

"""How long answers are: quantiles of real runs, to draw rollouts from without the bulk data.

    data/length_quantiles.csv ──> length_distribution("gsm8k_qwen3_4b") ──sample(rng, ...)──> lengths
    data/rollout_finish_times.csv ──> finish_curve("7B") ──> when each request of a real rollout ended

The answers to one prompt resemble each other: `group_correlation` is the correlation of their normal scores,
and sampling keeps it (a Gaussian copula), so groups and tails come out as lumpy as they were measured.
Invariant: sampling depends on the generator alone, and no sampled length exceeds the run's own maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from rlmux.core.errors import UserError
from rlmux.sim import data_tables

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

PROBABILITIES = (
    *(
        0.0,
        0.005,
        0.01,
        0.02,
        0.05,
        0.1,
        0.15,
        0.2,
        0.25,
        0.3,
        0.35,
        0.4,
        0.45,
        0.5,
        0.55,
        0.6,
        0.65,
        0.7,
        0.75,
    ),
    *(0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.993, 0.996, 0.998, 0.999, 1.0),
)
"""Probabilities of the quantiles that are kept: close together in the tail, which decides when a rollout ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthDistribution:
    """Response tokens of one run, all steps together."""

    name: str
    quantiles: tuple[float, ...]
    """Tokens at each of `PROBABILITIES`."""
    group_correlation: float = 0.0
    """Correlation of the normal scores of two answers to one prompt; 0 draws them independently."""
    prompt_tokens: float = 100.0
    """Mean tokens of a prompt."""
    group_size: int = 4
    mean_extra_turns: float = 0.0
    """Mean turns of a sequence beyond the first."""

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(PROBABILITIES) or list(self.quantiles) != sorted(self.quantiles):
            raise UserError(
                f"length distribution {self.name!r} needs {len(PROBABILITIES)} quantiles in rising order, "
                f"not {len(self.quantiles)}"
            )
        if not 0.0 <= self.group_correlation <= 1.0:
            raise UserError(f"length distribution {self.name!r}: group_correlation must be in [0, 1]")

    @classmethod
    def from_lengths(
        cls, name: str, lengths: npt.ArrayLike, *, group_size: int = 1, prompt_tokens: float = 100.0
    ) -> LengthDistribution:
        """Summarise observed lengths; consecutive `group_size` of them answer one prompt."""
        sizes = np.asarray(lengths, dtype=np.float64)
        if not sizes.size:
            raise UserError(f"length distribution {name!r}: no lengths given")
        return cls(
            name=name,
            quantiles=tuple(float(q) for q in np.quantile(sizes, PROBABILITIES)),
            group_correlation=group_correlation(sizes, group_size),
            prompt_tokens=prompt_tokens,
            group_size=group_size,
        )

    @property
    def mean(self) -> float:
        """Tokens of an average response: the area under the quantile curve."""
        heights = np.array(self.quantiles)
        return float(np.dot(np.diff(PROBABILITIES), (heights[1:] + heights[:-1]) / 2))

    def quantile(self, probability: FloatArray) -> FloatArray:
        return np.asarray(np.interp(probability, PROBABILITIES, self.quantiles))

    def sample(self, rng: np.random.Generator, num_sequences: int, group_size: int | None = None) -> IntArray:
        """Lengths of `num_sequences` answers in prompt order, whole groups together."""
        size = group_size or self.group_size
        num_groups = -(-num_sequences // size)
        return self.answers(rng, rng.standard_normal(num_groups), size)[:num_sequences]

    def answers(self, rng: np.random.Generator, prompt_scores: FloatArray, group_size: int) -> IntArray:
        """Lengths of `group_size` answers to each prompt, by the normal score of each prompt."""
        prompt = np.repeat(prompt_scores, group_size)
        own = rng.standard_normal(len(prompt))
        scores = sqrt(self.group_correlation) * prompt + sqrt(1.0 - self.group_correlation) * own
        return np.maximum(np.rint(self.quantile(_normal_cdf(scores))), 1).astype(np.int64)


def length_distribution(run: str) -> LengthDistribution:
    """One of the embedded runs, by name."""
    if run not in _embedded():
        raise UserError(f"no length distribution {run!r}; known: {', '.join(_embedded())}")
    return _embedded()[run]


def length_distribution_names() -> tuple[str, ...]:
    return tuple(_embedded())


def group_correlation(lengths: FloatArray, group_size: int) -> float:
    """Intraclass correlation of the normal scores of lengths, at least 0."""
    num_groups = lengths.size // group_size
    if group_size < 2 or num_groups < 2:
        return 0.0
    used = lengths[: num_groups * group_size]
    ranks = np.empty(used.size)
    ranks[np.argsort(used, kind="stable")] = np.arange(used.size)
    scores = _normal_inverse((ranks + 0.5) / used.size).reshape(num_groups, group_size)
    between = group_size * scores.mean(axis=1).var(ddof=1)
    within = scores.var(axis=1, ddof=1).mean()
    return float(max(0.0, (between - within) / (between + (group_size - 1) * within)))


@cache
def finish_curve(model: str) -> tuple[float, ...]:
    """When each of the 128 requests of a real rollout ended, as a fraction of the rollout, rising to 1.0."""
    rows = [float(row["finish_s"]) for row in data_tables.rows("rollout_finish_times") if row["model"] == model]
    if not rows:
        known = sorted({row["model"] for row in data_tables.rows("rollout_finish_times")})
        raise UserError(f"no finish times for {model!r}; known: {', '.join(known)}")
    return tuple(sorted(seconds / max(rows) for seconds in rows))


@cache
def _embedded() -> dict[str, LengthDistribution]:
    return {
        row["run"]: LengthDistribution(
            name=row["run"],
            quantiles=tuple(float(row[f"q{p:g}"]) for p in PROBABILITIES),
            group_correlation=float(row["group_correlation"]),
            prompt_tokens=float(row["prompt_tokens"]),
            group_size=int(row["group_size"]),
            mean_extra_turns=float(row["mean_extra_turns"]),
        )
        for row in data_tables.rows("length_quantiles")
    }


_SCORES = np.linspace(-6.0, 6.0, 2401)
_CDF = np.array([NormalDist().cdf(score) for score in _SCORES])


def _normal_cdf(scores: FloatArray) -> FloatArray:
    return np.asarray(np.interp(scores, _SCORES, _CDF))


def _normal_inverse(probabilities: FloatArray) -> FloatArray:
    return np.asarray(np.interp(probabilities, _CDF, _SCORES))

"""How rollouts of 256 responses on a node of eight GPUs end: by the finish times that RollMux's authors measured.

    128 responses on 8 GPUs, each with its end ─▶ two of each: 256 ─▶ at 32, 16, 8, ... left: the moment, and how
                                                                      much later the last one ends on a single GPU

They were measured for Qwen2.5-7B and 14B at a cap of 8,192 tokens; at 4,096 the same responses are cut. Of other models
and caps no lengths are known, so their rollouts keep their nodes. How much slower one GPU decodes what eight had before
is estimated (`MeasuredPace`), and so is what becomes of the KV caches: they are copied inside the node, or computed
again, as the authors' own system does it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from rlmux.core.model import RolloutTail, TailPoint
from rlmux.sim import data_tables
from rlmux.sim.models.costs import RolloutCosts, rollout_costs
from rlmux.sim.models.decoder import Decoder, Unfinished, copy_s, recompute_s

NUM_GPUS = 8
"""GPUs of a node."""
COST_MODELS: Mapping[str, str] = {"7B": "qwen2.5-7b", "14B": "qwen2.5-14b"}
"""Model whose decode costs are taken, by the models that were measured."""
TAIL_FRACTION = 1.0 / NUM_GPUS
"""Part of its node that a tail keeps: one GPU, as in the authors' ablation."""
NUMBERS_LEFT = (32, 16, 8, 6, 4, 2)
"""Responses of 256 that are left when a tail may leave: an eighth at most, as in the authors' ablation."""
_RESPONSES_FOR_EACH = 2
"""Responses of a batch of 256 that a measured one stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPace:
    """Seconds of decode iterations: the measured ones, longer or shorter as a GPU decodes more or fewer responses than
    it did when they were measured."""

    costs: RolloutCosts
    tokens_per_s: float
    """Tokens of one response in a second, in the measurement."""
    finish_s: tuple[float, ...]
    """Seconds from the begin of the rollout to the end of each response, on all eight GPUs, ascending."""

    def decode_span_s(self, active: float, context: float, num_iterations: float) -> float:
        middle = context + num_iterations / 2
        num_left = len(self.finish_s) - bisect_right(self.finish_s, middle / self.tokens_per_s)
        measured = self.costs.decode_step_s(max(1.0, num_left / NUM_GPUS), middle)
        return num_iterations / self.tokens_per_s * self.costs.decode_step_s(active, middle) / measured

    def prefill_s(self, tokens: float) -> float:
        return 0.0

    def unfinished(self, at_s: float) -> list[Unfinished]:
        """What is left of the responses that have not ended by then."""
        rate = self.tokens_per_s
        return [Unfinished((end_s - at_s) * rate, at_s * rate) for end_s in self.finish_s if end_s > at_s]


def measured_pace(model: str, limit_tokens: int, *, responses_for_each: int = 1) -> MeasuredPace:
    """The measured rollout of `7B` or `14B`, its responses cut at a limit."""
    rows = [row for row in data_tables.rows("rollout_finish_times") if row["model"] == model]
    tokens_per_s = max(float(row["response_tokens"]) for row in rows) / max(float(row["finish_s"]) for row in rows)
    ends_s = [float(row["finish_s"]) * min(1.0, limit_tokens / float(row["response_tokens"])) for row in rows]
    return MeasuredPace(
        costs=rollout_costs(COST_MODELS[model], "H20-96GB-SXM", 1),
        tokens_per_s=tokens_per_s,
        finish_s=tuple(sorted(ends_s * responses_for_each)),
    )


@cache
def measured_tail(
    profile: str,
    *,
    copies_kv: bool,
    responses_for_each: int = _RESPONSES_FOR_EACH,
    numbers_left: tuple[int, ...] = NUMBERS_LEFT,
) -> RolloutTail | None:
    """How rollouts of a profile such as `7B_8k` end; None where nothing was measured."""
    model, _, cap = profile.partition("_")
    if model not in COST_MODELS or cap not in ("4k", "8k"):
        return None
    pace = measured_pace(model, 4096 if cap == "4k" else 8192, responses_for_each=responses_for_each)
    points = [_point(pace, num_left, copies_kv=copies_kv) for num_left in numbers_left]
    frees = [point for point in points if (1.0 - point.begins) * (1.0 - TAIL_FRACTION) > point.growth]
    return RolloutTail(points=tuple(frees), device_fraction=TAIL_FRACTION) if frees else None


def _point(pace: MeasuredPace, num_left: int, *, copies_kv: bool) -> TailPoint:
    """The moment at which so many are left, if all of them go on on one GPU."""
    rollout_s, at_s = pace.finish_s[-1], pace.finish_s[-num_left - 1]
    moved = pace.unfinished(at_s)
    on_one_gpu = Decoder(pace, [], slots=len(pace.finish_s))
    on_one_gpu.give(moved, copy_s(pace.costs, moved) if copies_kv else recompute_s(pace.costs, moved))
    later_s = on_one_gpu.seconds_left - (rollout_s - at_s)
    return TailPoint(num_left=num_left, begins=at_s / rollout_s, growth=max(0.0, later_s / rollout_s))

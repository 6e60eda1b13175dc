"""Workloads by name.

    weave            200 production pipelines with measured phase means       (RollMux section 8.6)
    bl rh th mixed   300 synthetic pipelines over Philly arrivals             (8.7, Table 6)
    bl-s, rh-m ...   the same of one size: s, m or l
    micro-a b c      the three micro-benchmarks                               (8.4)
    drift-*          weave with durations that drift: up, down, mixed         (8.8)
    pair             two recorded pipelines at the grain of sub-stages        (JigsawRL)
    FILE.csv         a trace of one's own, a pipeline a row: `trace_csv.py`
    FILE.yaml        a file with cluster and pipelines: `spec_file.py`
    module:function  one of the user's own, or a name that an installed package adds: `plugins.py`

Every one takes `noise`, by which steps vary (`noise.py`): NAME:noise=0.1, FILE.csv:noise=measured.

A workload is a frozen value: built once from (name, seed, parameters), simulated under any number of
policies. SLOs and durations come from generators seeded by `seed` alone, in the order of arrival.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from rlmux import plugins
from rlmux.core.errors import UserError
from rlmux.core.model import DEFAULT_SLO_PROBABILITY, MEAN, PhaseSeconds, Pipeline, PipelineId, Stage
from rlmux.sim import data_tables
from rlmux.sim.workloads import substage_pairs, trace_csv
from rlmux.sim.workloads.arrivals import (
    SYNCED,
    Arrival,
    PhaseProfile,
    Workload,
    h20_h800_cluster,
    profiled_arrival,
    profiles,
    switch_seconds,
    sync_seconds,
)
from rlmux.sim.workloads.noise import with_noise
from rlmux.sim.workloads.rollout_tails import measured_tail
from rlmux.sim.world import NO_SWITCH, STEADY, Drifting, TrueSeconds, Variation, drift_curve

__all__ = ["Arrival", "Workload", "build", "load", "micro_gpus", "names", "params_of"]


def load(text: str, *, seed: int = 0) -> Workload:
    """A workload as a user names it: a .csv or .yaml file, a name, or NAME:key=value,key=value.

    A name is built in, one that an installed package adds, or `module:function`.
    """
    path, noise = file_and_noise(text)
    if path is not None and path.suffix == ".csv":
        return with_noise(trace_csv.load(path), noise, seed=seed)
    if path is not None:
        from rlmux.sim.workloads import spec_file  # brings pydantic and YAML along

        return with_noise(spec_file.load(path), noise, seed=seed)
    name, assignments = name_and_params(text)
    return build(name, seed=seed, **_typed(name, assignments))


def file_and_noise(text: str) -> tuple[Path | None, float | str]:
    """(path, noise) of FILE or FILE:noise=0.1; (None, 0.0) for a text that names no .csv or .yaml file.

    Raises UserError for another parameter than noise.
    """
    path, _, assignments = (text, "", "") if Path(text).suffix in _FILES else text.rpartition(":")
    if Path(path).suffix not in _FILES:
        return None, 0.0
    params = _typed(path, assignments)
    unknown = [key for key in params if key != "noise"]
    if unknown:
        raise UserError(f"workload {path!r} has no parameter {unknown[0]!r}; accepted: noise")
    return Path(path), params.get("noise", 0.0)


def _typed(name: str, assignments: str) -> dict[str, Any]:
    return dict(_param(name, item) for item in assignments.split(",") if item)


def name_and_params(text: str) -> tuple[str, str]:
    """(name, parameters as they were typed) of NAME or NAME:key=value,key=value."""
    first, _, rest = text.partition(":")
    second, _, others = rest.partition(":")
    if first not in _BUILDERS and plugins.is_reference(f"{first}:{second}"):
        return f"{first}:{second}", others
    return first, rest


def _param(workload: str, item: str) -> tuple[str, Any]:
    key, sign, value = item.partition("=")
    if not sign:
        raise UserError(f"workload {workload!r}: {item!r} is no parameter; accepted: key=value")
    for parse in (int, float):
        try:
            return key, parse(value)
        except ValueError:
            continue
    return key, {"true": True, "false": False}.get(value.lower(), value)


def build(name: str, *, seed: int = 0, **params: Any) -> Workload:
    """The workload of that name. Unknown names and parameters are refused with what there is."""
    if name not in _BUILDERS and plugins.is_plugin("workload", name):
        return _of_user(name, seed, params)
    builder, noise = _BUILDERS.get(name), params.pop("noise", 0.0)
    if builder is None:
        near = get_close_matches(name, _BUILDERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"workload {name!r} is neither the path of a .csv or .yaml file, nor module:function, nor built in: "
            f"{', '.join(_BUILDERS)}{hint}"
        )
    unknown = [key for key in params if key not in params_of(name)]
    if unknown:
        accepted = ", ".join((*params_of(name), "noise"))
        raise UserError(f"workload {name!r} has no parameter {unknown[0]!r}; accepted: {accepted}")
    return with_noise(builder(seed=seed, **params), noise, seed=seed)


def _of_user(name: str, seed: int, params: dict[str, Any]) -> Workload:
    builder = plugins.find("workload", name, names())
    known = _params_of(builder)
    noise = 0.0 if "noise" in known else params.pop("noise", 0.0)
    unknown = [key for key in params if key not in known]
    if unknown:
        raise UserError(f"workload {name!r} has no parameter {unknown[0]!r}; accepted: {', '.join((*known, 'noise'))}")
    try:
        made = builder(seed=seed, **params)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"workload {name!r} with seed {seed} raised {plugins.described(error)}") from error
    if not isinstance(made, Workload):
        raise UserError(f"workload {name!r} returned {made!r}; accepted: an rlmux.sim.workloads.arrivals.Workload")
    return with_noise(made, noise, seed=seed)


def names() -> tuple[str, ...]:
    return tuple(_BUILDERS)


# ------------------------------------------------------------------ the production trace


def weave(
    *,
    seed: int = 0,
    train_nodes_32b: int = 2,
    slo: tuple[float, float] = (1.1, 2.0),
    departure: str = "work",
    costs: bool = True,
    host_memory_gb: float | None = None,
    drift: str = "none",
    slo_probability: float | str = DEFAULT_SLO_PROBABILITY,
    tails: str = "none",
) -> Workload:
    """The 200 production pipelines.

    `train_nodes_32b=1` charges a 32B pipeline one training node, as the published $/h does; it needs 2.
    `departure` is `work` (after as many steps as it would have done alone in the time that it was in the original
    cluster, so every policy does the same work and a slower one keeps it longer) or `wall` (it leaves when it did
    there, so a slower policy does less). `costs=False` leaves switches and weight sync out.
    `host_memory_gb` gives nodes that much and pipelines their footprints; without it the cap on a group
    stands in.
    `drift` is none, up, down or mixed (section 8.8).
    `slo_probability`: of every pipeline, or mean: they are planned with the means of their steps. The trace has no data
    on steps at the token limit; twice the mean is taken.
    `tails`: whether the tail of a rollout can leave seven of its node's eight GPUs to another pipeline
    (`rollout_tails.py`): none, as the published replay has it; copied or recomputed, by what becomes of its KV caches.
    """
    low, high = _slo_range(slo)
    probability = _probability(slo_probability)
    _require_choice("train_nodes_32b", train_nodes_32b, (1, 2))
    _require_choice("departure", departure, _DEPARTURES)
    _require_choice("costs", costs, (True, False))
    _require_choice("drift", drift, ("none", "up", "down", "mixed"))
    _require_choice("tails", tails, ("none", "copied", "recomputed"))
    generator = random.Random(seed)
    drift_generator = random.Random(f"{seed}/drift")
    by_name = profiles()
    arrivals = []
    for row in data_tables.rows("weave_jobs"):
        profile = by_name[row["profile"]]
        submit_s, duration_s = float(row["submit_s"]), float(row["duration_s"])
        arrivals.append(
            profiled_arrival(
                row["job"],
                profile,
                submit_s=submit_s,
                depart_s=submit_s + duration_s if departure == "wall" else None,
                num_steps=_steps_within(duration_s, profile.disaggregated) if departure == "work" else None,
                slo_slowdown=generator.uniform(low, high),
                num_train_nodes=train_nodes_32b if profile.model == "32B" else 1,
                costs=costs,
                has_footprint=host_memory_gb is not None,
                variation=_drift(drift, profile.model, duration_s / profile.disaggregated.solo_s, drift_generator),
                slo_probability=probability,
                tail=None if tails == "none" else measured_tail(profile.name, copies_kv=tails == "copied"),
            )
        )
    return Workload(
        name="weave",
        cluster=h20_h800_cluster(host_memory_gb=host_memory_gb),
        arrivals=tuple(arrivals),
        seed=seed,
        about=f"200 production pipelines, SLO U({low:g}, {high:g}), 32B trains on {train_nodes_32b} node(s), "
        f"{_terms(departure, costs)}{'' if tails == 'none' else f', tails of rollouts are {tails}'}",
    )


# ------------------------------------------------------------------ synthetic mixes over Philly arrivals

_TABLE_6: Mapping[str, Mapping[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "bl": {
        "s": ((50, 100), (50, 100)),
        "m": ((100, 200), (100, 200)),
        "l": ((200, 300), (200, 300)),
    },
    "rh": {
        "s": ((100, 200), (25, 50)),
        "m": ((200, 400), (50, 100)),
        "l": ((400, 600), (100, 200)),
    },
    "th": {
        "s": ((25, 50), (100, 200)),
        "m": ((50, 100), (200, 400)),
        "l": ((100, 200), (400, 600)),
    },
}
"""Uniform ranges of rollout and training seconds: balanced, rollout-heavy, training-heavy (Table 6)."""
_MODEL_OF_SIZE: Mapping[str, str] = {"s": "4B", "m": "7B", "l": "14B"}
"""Model whose measured switches and sync stand in for a size: our choice, the paper names no models here."""


def synthetic(
    *,
    sizes: tuple[tuple[str, str], ...],
    name: str,
    seed: int = 0,
    slo: tuple[float, float] = (1.0, 2.0),
    num_pipelines: int = 300,
    departure: str = "work",
    costs: bool = True,
) -> Workload:
    """Pipelines of these (mix, size) pairs, equally likely, that come and go as Philly's training jobs do.

    `departure` and `costs` as in `weave`; switches and sync are those of a model whose phases are about as long.
    Up to 300 of them come from the embedded sample (mean 10.6 h; the paper's own sample had 14.4 h).
    """
    low, high = _slo_range(slo)
    _require_choice("departure", departure, _DEPARTURES)
    _require_choice("costs", costs, (True, False))
    table = data_tables.rows("philly_arrivals")
    if not 1 <= num_pipelines <= len(table):
        raise UserError(f"workload {name!r}: num_pipelines is {num_pipelines}; accepted: 1 to {len(table)}")
    generator = random.Random(seed)
    arrivals = []
    for index, row in enumerate(table[:num_pipelines]):
        mix, size = generator.choice(sizes)
        rollout, train = _TABLE_6[mix][size]
        arrivals.append(
            _synthetic_arrival(
                f"{mix}-{size}-{index}",
                _MODEL_OF_SIZE[size],
                PhaseSeconds(rollout_s=generator.uniform(*rollout), train_s=generator.uniform(*train)),
                submit_s=float(row["submit_s"]),
                duration_s=float(row["duration_s"]),
                slo_slowdown=generator.uniform(low, high),
                departure=departure,
                costs=costs,
            )
        )
    return Workload(
        name=name,
        cluster=h20_h800_cluster(),
        arrivals=tuple(arrivals),
        seed=seed,
        about=f"{num_pipelines} synthetic pipelines over Philly arrivals, SLO U({low:g}, {high:g}), "
        f"{_terms(departure, costs)}",
    )


def _synthetic_arrival(
    name: str,
    model: str,
    phases: PhaseSeconds,
    *,
    submit_s: float,
    duration_s: float,
    slo_slowdown: float,
    departure: str,
    costs: bool,
) -> Arrival:
    """A pipeline with the switches and sync of `model`, where they cost."""
    sync_s = sync_seconds(model) if costs else 0.0
    switch = switch_seconds(model) if costs else NO_SWITCH
    return Arrival(
        submit_s=submit_s,
        depart_s=submit_s + duration_s if departure == "wall" else None,
        pipeline=Pipeline(
            id=PipelineId(name),
            num_steps=_steps_within(duration_s, phases) if departure == "work" else None,
            stages=SYNCED if costs else (Stage.GENERATE, Stage.UPDATE),
            estimate=replace(phases, sync_s=sync_s),
            slo_slowdown=slo_slowdown,
            switch=switch.estimate if costs else None,
        ),
        world=TrueSeconds.of_phases(phases, sync_s=sync_s),
        switch=switch,
        model=model,
    )


# ------------------------------------------------------------------ micro-benchmarks

MICRO_TYPES: Mapping[str, PhaseProfile] = {
    "A": PhaseProfile(
        name="7B_8k",
        disaggregated=PhaseSeconds(rollout_s=133.8, train_s=112.8),
        colocated=PhaseSeconds(rollout_s=159.6, train_s=98.2),
    ),
    "B": PhaseProfile(
        name="14B_8k",
        disaggregated=PhaseSeconds(rollout_s=238.6, train_s=197.4),
        colocated=PhaseSeconds(rollout_s=182.4, train_s=173.6),
    ),
    "C": PhaseProfile(
        name="32B_8k",
        disaggregated=PhaseSeconds(rollout_s=267.6, train_s=271.333),
        colocated=PhaseSeconds(rollout_s=277.0, train_s=271.333),
    ),
    "D": PhaseProfile(
        name="8B_8k",
        disaggregated=PhaseSeconds(rollout_s=310.125, train_s=120.5),
        colocated=PhaseSeconds(rollout_s=189.0, train_s=119.333),
    ),
    "E": PhaseProfile(
        name="14B_16k",
        disaggregated=PhaseSeconds(rollout_s=652.0, train_s=108.7),
        colocated=PhaseSeconds(rollout_s=497.0, train_s=107.5),
    ),
}
"""Table 3. A to D are profile rows (D's ratio 2.6 is the paper's 'about 2.5'). E has no row: Qwen3-14B, 16K,
batch 64. Its training is 8B-16k's 241.0 s scaled by batch (64 / 256) and parameters (14.77 / 8.19) = 108.7 s;
its rollout is 'about 6x' of that = 652 s. Its colocated times keep 14B-8k's ratio for rollout (0.764) and
8B-16k's for training.
"""

_MICRO_CASES: Mapping[str, tuple[tuple[str, ...], int, int]] = {
    "micro-a": (("A", "A"), 1, 1),
    "micro-b": (("D", "D", "E"), 3, 1),
    "micro-c": (("C", "D", "D"), 2, 2),
}
"""Types, rollout nodes and training nodes RollMux has: 8+8, 24+8 and 16+16 GPUs."""


def micro(
    *,
    case: str,
    seed: int = 0,
    num_steps: int = 50,
    slo_slowdown: float = 2.0,
    costs: bool = True,
    unbounded: bool = False,
) -> Workload:
    """One of the three micro-benchmarks on the paper's GPUs; `unbounded` gives a policy all nodes it requests."""
    types, num_rollout, num_train = _MICRO_CASES[case]
    arrivals = tuple(
        profiled_arrival(
            f"{letter.lower()}{index}",
            MICRO_TYPES[letter],
            submit_s=0.0,
            num_steps=num_steps,
            slo_slowdown=slo_slowdown,
            costs=costs,
        )
        for index, letter in enumerate(types)
    )
    cluster = h20_h800_cluster(
        num_rollout_nodes=None if unbounded else num_rollout, num_train_nodes=None if unbounded else num_train
    )
    return Workload(name=case, cluster=cluster, arrivals=arrivals, seed=seed, about=" + ".join(types))


def micro_gpus(case: str) -> tuple[int, int]:
    """Rollout and training nodes of the case."""
    _, num_rollout, num_train = _MICRO_CASES[case]
    return num_rollout, num_train


# ------------------------------------------------------------------ helpers


_DEPARTURES = ("wall", "work")
_FILES = (".csv", ".yaml", ".yml")


def _steps_within(duration_s: float, phases: PhaseSeconds) -> int:
    """Steps that the pipeline alone makes in that time, at least one."""
    return max(1, round(duration_s / phases.solo_s))


def _terms(departure: str, costs: bool) -> str:
    """Definitions of the figures' terms."""
    work = "the same steps under every policy" if departure == "work" else "departures by the clock"
    return f"{work}, {'switches and sync included' if costs else 'switches and sync free'}"


def _slo_range(slo: Any) -> tuple[float, float]:
    """A pair, or one number for all; at least 1."""
    try:
        low, high = (float(slo), float(slo)) if isinstance(slo, int | float) else (float(slo[0]), float(slo[1]))
    except (TypeError, ValueError, IndexError):
        raise UserError(f"slo is {slo!r}; accepted: a slowdown or a pair of them, such as (1.1, 2.0)") from None
    if not 1.0 <= low <= high:
        raise UserError(f"slo is ({low:g}, {high:g}); accepted: 1 <= low <= high, as a step cannot beat its solo time")
    return low, high


def _require_choice(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        raise UserError(f"{name} is {value!r}; accepted: {', '.join(map(str, accepted))}")


def _probability(value: Any) -> float | None:
    """The probability that was asked for; None: the mean was."""
    if value == MEAN:
        return None
    if not (isinstance(value, int | float) and 0.0 < value < 1.0):
        raise UserError(f"slo_probability is {value!r}; accepted: a number above 0 and below 1, or {MEAN}")
    return float(value)


def _drift(direction: str, model: str, num_steps: float, generator: random.Random) -> Variation:
    """One of the seven templates: none, or up or down at 0.5, 1.0 or 1.5 times the measured curve.

    Measured curves fall. A 3B or 4B pipeline drifts half as far. The 88 measured steps span the whole run.
    """
    if direction == "none":
        return STEADY
    templates = {"up": (-0.5, -1.0, -1.5), "down": (0.5, 1.0, 1.5)}
    amplitudes = (0.0, *templates.get(direction, (*templates["up"], *templates["down"])))
    amplitude = generator.choice(amplitudes)
    if model in ("3B", "4B"):
        amplitude /= 2
    curve = drift_curve("14B" if model in ("14B", "32B") else "7B")
    return Drifting(ratios=curve, amplitude=amplitude, steps_per_value=max(1, round(num_steps / len(curve))))


def _synthetic_builders() -> dict[str, Callable[..., Workload]]:
    builders: dict[str, Callable[..., Workload]] = {}
    everything = tuple((mix, size) for mix, ranges in _TABLE_6.items() for size in ranges)
    for mix, ranges in _TABLE_6.items():
        builders[mix] = partial(synthetic, name=mix, sizes=tuple((mix, size) for size in ranges))
        for size in ranges:
            builders[f"{mix}-{size}"] = partial(synthetic, name=f"{mix}-{size}", sizes=((mix, size),))
    builders["mixed"] = partial(synthetic, name="mixed", sizes=everything)
    return builders


_BUILDERS: Mapping[str, Callable[..., Workload]] = {
    "weave": weave,
    **{f"drift-{drift}": partial(weave, drift=drift, slo=(1.5, 1.5)) for drift in ("up", "down", "mixed")},
    **_synthetic_builders(),
    **{case: partial(micro, case=case) for case in _MICRO_CASES},
    "pair": substage_pairs.pair,
}


def params_of(name: str) -> tuple[str, ...]:
    """The parameters that a built-in workload takes: what its builder has default values for, but its name and seed."""
    return _params_of(_BUILDERS[name])


def _params_of(builder: Callable[..., Any]) -> tuple[str, ...]:
    given = signature(builder.func if isinstance(builder, partial) else builder).parameters.values()
    return tuple(each.name for each in given if each.default is not each.empty and each.name not in ("seed", "name"))

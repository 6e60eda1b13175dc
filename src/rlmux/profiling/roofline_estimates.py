"""The estimate of a pipeline that was never run: what its step takes on a named device, by its sizes alone.

    file ── model, algorithm, rollout, train ─┐
    pool ── gpu: H100, or --gpu, the driver's ┴──▶ rollout, training: sim/models/step_costs.py ─┐
            or the cores of this machine           sync, switches, first loads: bytes ──────────┴──▶ Estimated

Answers are as long as those of a public run, as parts of the token limit. The range goes from short answers on a device
that does better to answers at the limit on one that does worse. Waits for environments are not in it. What a file types
stands, and what it leaves out of syncs and switches is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rlmux.config.figures import Estimated, FigureOrigin, StepFigure, figures_of
from rlmux.config.tree import (
    ClusterConfig,
    EstimateConfig,
    PipelineConfig,
    PoolConfig,
    gpus_of_device,
    pool_serving,
)
from rlmux.core.model import Phase
from rlmux.rl.config import TrainingConfig
from rlmux.rl.memory.memory_parts import (
    host_moments_bytes,
    num_trained,
    train_state_bytes,
    usual_checkpoint_interval,
    weights_bytes,
)
from rlmux.rl.memory.model_shape import BYTES, shape_of
from rlmux.runtime.memory.memory_budget import LEAST_GPU_BYTES
from rlmux.sim.models.hardware import ModelSize
from rlmux.sim.models.step_costs import (
    SHORT_ANSWERS,
    USUAL_ANSWERS,
    DeviceSpeed,
    TrainedStep,
    answers_as_in,
    answers_of_mean,
    device_speed,
    engine_costs,
    rollout_seconds,
    train_seconds,
)

_BETTER, _WORSE = 0.7, 2.5
"""How far a device may be off what is computed, in rollouts and in training: public jobs took up to 3 times as long."""
_BYTES_WORSE = 5.0
"""The same for bytes over bandwidth: syncs and switches were measured to take up to so much longer."""
_GIGA = 1e9
_COSTS = ("sync_s", "rollout_switch_s", "train_switch_s", "cold_rollout_switch_s", "cold_train_switch_s")
"""Figures that an estimate may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineEstimates:
    """Estimates on one kind of GPU, where a pool names none."""

    gpu: str | None = None
    """Name of the GPU, as typed or as this machine's driver has it; None: pools that name none have cores."""
    answer_tokens: float | None = None
    """Mean tokens of an answer; None: not known, and as in a public run."""

    def of(
        self, pipeline: PipelineConfig, cluster: ClusterConfig, measured: Estimated | None = None
    ) -> Estimated | None:
        """The estimate of a pipeline, beside what its file gives or was measured; that alone where its model or devices
        are not known.

        Raises UserError for a GPU that no table has.
        """
        training, given = pipeline.training, measured
        if pipeline.estimate is not None:
            given = Estimated(estimate=pipeline.estimate, figures=figures_of(pipeline.estimate, FigureOrigin.TYPED))
        (_, for_rollout), (_, for_train) = (pool_serving(cluster, phase) for phase in (Phase.ROLLOUT, Phase.TRAIN))
        rollout, train = self._speed(for_rollout), self._speed(for_train)
        if training is None or rollout is None or train is None:
            return given
        num_gpus = max(gpus_of_device(for_rollout), training.rollout.tensor_parallel)
        work = _Work(training, rollout, train, num_gpus, self.answer_tokens)
        usual, limit = work.rollout_figures()
        phases = [usual] if pipeline.is_filler else [usual, limit, *work.train_figures()]
        return _merged(given, [*phases, *work.cost_figures(pipeline.checkpoint_every)])

    def _speed(self, pool: PoolConfig) -> DeviceSpeed | None:
        """None where a pool's devices are neither a known GPU nor cores."""
        gpu = pool.gpu or self.gpu
        is_gpu_sized = (pool.device_memory_gb or 0.0) * _GIGA >= LEAST_GPU_BYTES
        if gpu is None and (pool.devices is None or gpus_of_device(pool) > 1 or is_gpu_sized):
            return None
        return device_speed(gpu)


def _merged(given: Estimated | None, computed: Sequence[StepFigure]) -> Estimated:
    """What was computed, or its costs beside an estimate that is given."""
    known = () if given is None else given.figures
    names = {figure.name for figure in known}
    has_costs = any(name in names for name in _COSTS)
    added = [figure for figure in computed if not names or _is_added(figure, has_costs)]
    figures = (*known, *added)
    keys = {figure.name: figure.seconds for figure in figures if figure.name in EstimateConfig.__dataclass_fields__}
    return Estimated(estimate=EstimateConfig(**keys), figures=figures)


def _is_added(figure: StepFigure, has_costs: bool) -> bool:
    """Whether a figure goes beside a given estimate, which has its phases, and of the costs all or none."""
    return figure.name == "checkpoint_s" or (figure.name in _COSTS and not has_costs)


@dataclass(frozen=True, slots=True)
class _Work:
    """One pipeline's step on its devices."""

    config: TrainingConfig
    rollout: DeviceSpeed
    train: DeviceSpeed
    num_gpus: int
    """GPUs of a rollout device."""
    answer_tokens: float | None

    @property
    def _num_answers(self) -> int:
        return self.config.algorithm.prompts_per_step * self.config.algorithm.group_size

    @property
    def _prompt_tokens(self) -> float:
        """Tokens of a prompt: half of the longest one that is accepted."""
        return max(1.0, self.config.rollout.max_prompt_tokens / 2)

    @property
    def _num_copies(self) -> int:
        """Copies of the model behind a device's server."""
        return max(1, self.num_gpus // self.config.rollout.tensor_parallel)

    @property
    def _is_own(self) -> bool:
        return not (self.config.rollout.engine.is_server or self.config.rollout.engine.is_of_user)

    def _lengths(self, run: str | None, number: int) -> Sequence[int]:
        """Tokens of answers as in a public run, or of the known mean; None: all reach the limit."""
        limit = self.config.rollout.max_new_tokens
        if run is None:
            return [limit] * number
        if self.answer_tokens is not None:
            return answers_of_mean(self.answer_tokens, limit, number)
        return answers_as_in(run, limit, number)

    def _range(self, seconds: Callable[[str | None], float]) -> tuple[float, float]:
        """Ends of a phase's range: answers that are short and at the limit, where their mean is not known."""
        longest = None if self.answer_tokens is None else USUAL_ANSWERS
        return _BETTER * seconds(SHORT_ANSWERS), _WORSE * seconds(longest)

    def _mean_tokens(self, run: str | None) -> float:
        return sum(self._lengths(run, self._num_answers)) / self._num_answers

    def _shape(self, bytes_per_weight: float) -> ModelSize:
        shape = shape_of(self.config.model)
        return ModelSize(
            name=self.config.model.path or self.config.model.architecture,
            params=shape.num_parameters,
            layers=shape.num_layers,
            hidden=shape.hidden_size,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            bytes_per_weight=bytes_per_weight,
            active_params=shape.num_active_parameters if shape.num_experts else None,
            num_experts=max(1, shape.num_experts),
            num_picked=max(1, shape.num_picked),
        )

    # ------------------------------------------------------------------ seconds of the two phases

    def rollout_figures(self) -> Iterator[StepFigure]:
        usual, limit = self._rollout_s(USUAL_ANSWERS), self._rollout_s(None)
        engine = "our engine" if self._is_own else self.config.rollout.engine.name
        devices = f"{self.config.rollout.num_workers * self.num_gpus} {self.rollout.name}"
        of_limit = f"{self._num_answers:,} answers of {self.config.rollout.max_new_tokens:,} tokens"
        of_usual = f"{self._num_answers:,} answers of {self._mean_tokens(USUAL_ANSWERS):,.0f} tokens"
        where = f"{engine} on {devices}"
        low, high = self._range(self._rollout_s)
        basis, origin = f"{of_usual}, {where}", FigureOrigin.ROOFLINE
        yield StepFigure(name="rollout_s", seconds=usual, low=low, high=high, origin=origin, basis=basis)
        yield _around("limit_rollout_s", max(limit, usual), f"{of_limit}, {where}")

    def train_figures(self) -> Iterator[StepFigure]:
        usual, limit = self._train_s(USUAL_ANSWERS), self._train_s(None)
        where = f"{self.config.train.num_workers} {self.train.name}"
        low, high = self._range(self._train_s)
        basis = f"{self._train_tokens(USUAL_ANSWERS):,.0f} tokens, {where}"
        yield StepFigure(name="train_s", seconds=usual, low=low, high=high, origin=FigureOrigin.ROOFLINE, basis=basis)
        yield _around("limit_train_s", max(limit, usual), f"{self._train_tokens(None):,.0f} tokens, {where}")

    def _rollout_s(self, run: str | None) -> float:
        rollout = self.config.rollout
        num_engines = rollout.num_workers * self._num_copies
        lengths = self._lengths(run, ceil(self._num_answers / num_engines))
        num_slots = max(1, rollout.num_slots // self._num_copies)
        held = self._prompt_tokens + sum(lengths) / len(lengths)
        num_slots = min(num_slots, max(1, int(rollout.cached_tokens / self._num_copies / held)))
        costs = engine_costs(
            self._shape(BYTES[rollout.dtype]), self.rollout, is_own=self._is_own, num_gpus=rollout.tensor_parallel
        )
        host_s = len(lengths) * self.rollout.constants["answer_ms"] * 1e-3 if self._is_own else 0.0
        host_s += self.rollout.constants["order_ms"] * 1e-3
        return host_s + rollout_seconds(
            costs, lengths, prompt_tokens=self._prompt_tokens, slots=num_slots,
            group_size=self.config.algorithm.group_size,
        )  # fmt: skip

    def _train_tokens(self, run: str | None) -> float:
        return self._num_answers * (self._prompt_tokens + self._mean_tokens(run))

    def _train_s(self, run: str | None) -> float:
        config, algorithm = self.config.computed_on("cuda" if self.train.is_gpu else "cpu"), self.config.algorithm
        of_sequences = algorithm.sequences_per_pass * (self._prompt_tokens + self._mean_tokens(run))
        work = TrainedStep(
            shape=self._shape(BYTES[config.train.dtype]),
            num_trained=num_trained(config),
            tokens=self._train_tokens(run),
            tokens_per_pass=config.train.tokens_per_micro_batch or of_sequences,
            num_ranks=config.train.num_workers,
            is_sharded=config.train.is_sharded,
            num_forward_passes=(algorithm.kl_coef > 0) + algorithm.needs_old_logprobs,
            num_epochs=algorithm.num_epochs,
            num_updates=algorithm.num_updates,
            recomputes=config.train.activation_checkpointing,
            moments_on_host=config.train.optimizer_state == "cpu",
        )
        return self.train.constants["order_ms"] * 1e-3 + train_seconds(work, self.train)

    # ------------------------------------------------------------------ seconds by bytes

    def cost_figures(self, checkpoint_every: int | None) -> Iterator[StepFigure]:
        """Syncs, warm switches, first loads with the start of processes, and a checkpoint's halt."""
        config, rollout, train = self.config, self.rollout, self.train
        version = weights_bytes(config)
        seconds = version / (train.constants["write_gbps"] * _GIGA) + version / (rollout.constants["read_gbps"] * _GIGA)
        yield _by_bytes("sync_s", seconds, f"a version of {_gb(version)} through shared memory")
        sampled = self._shape(BYTES[config.rollout.dtype]).weight_bytes / config.rollout.tensor_parallel
        state = train_state_bytes(config) / config.train.num_parts - host_moments_bytes(config)
        for name, size, device in (("rollout_switch_s", sampled, rollout), ("train_switch_s", state, train)):
            basis = f"{_gb(size)} in, as much out, at {device.host_gbps:g} GB/s"
            yield _by_bytes(name, 2 * size / (device.host_gbps * _GIGA), basis)
        file_bytes = self._shape(2.0).weight_bytes
        read_s = file_bytes / (rollout.constants["checkpoint_read_gbps"] * _GIGA)
        start_s = rollout.constants["process_s"]
        server_s = 0.0
        if not self._is_own:
            billions = self._shape(2.0).params / 1e9
            server_s = rollout.constants["server_start_s"] + billions * rollout.constants["server_start_s_per_b"]
        basis = f"a process{'' if self._is_own else ', its server'}, a checkpoint of {_gb(file_bytes)}"
        yield _around("cold_rollout_switch_s", start_s + max(server_s, read_s), basis)
        basis = f"a process, a checkpoint of {_gb(file_bytes)}"
        yield _around("cold_train_switch_s", train.constants["process_s"] + read_s, basis)
        kept = state + host_moments_bytes(config)
        every = checkpoint_every or usual_checkpoint_interval(config)
        written_s = train_state_bytes(config) / (train.constants["disk_gbps"] * _GIGA)
        basis = (
            f"{_gb(kept)} copied every {'step' if every == 1 else f'{every} steps'}, on disk {written_s:.3g} s later"
        )
        yield _by_bytes("checkpoint_s", kept / (train.host_gbps * _GIGA), basis)


def _around(name: str, seconds: float, basis: str) -> StepFigure:
    low, high = _BETTER * seconds, _WORSE * seconds
    return StepFigure(name=name, seconds=seconds, low=low, high=high, origin=FigureOrigin.ROOFLINE, basis=basis)


def _by_bytes(name: str, seconds: float, basis: str) -> StepFigure:
    return replace(_around(name, seconds, basis), high=_BYTES_WORSE * seconds)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GIGA:.3g} GB"

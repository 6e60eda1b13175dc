"""Trains one pipeline's model, one micro-batch at a time.

    sft_warmup ─▶ version 0 ─┬─▶ begin_step(n) ─▶ reference_logprobs ─▶ old_logprobs ─▶ update ─▶ version n
                             │                       (kl_coef > 0)    (several updates)              │
                             └─────────────────────────────────── n + 1 ◀────────────────────────────┘

    TrainTensors all tensors, and where they lie     SftWarmup, RlStep   the stages
    StageWork    how far a stage is                  TrainSnapshot       what a checkpoint holds

A stage is a generator that stops after each micro-batch; `run_stage` continues it until its time is up, so
every call exceeds its limit by one micro-batch at most.

Invariants: the weights after step n are a function of the config and of the batches 1 .. n, however the stages
were cut into calls, offloaded, or restored in between. Checkpoints and published weights are those of a version:
between two updates of one step there are none.
No optimizer step is made with a loss or gradient that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlmux.core.errors import CheckpointError, DeviceMemoryError, IllegalTransitionError, PipelineError, UserError
from rlmux.core.model import Stage
from rlmux.engines.adapters.shared_base import TenantBase, build_trained_model
from rlmux.engines.model.weight_checksum import CHECKSUM
from rlmux.engines.train.rl_step import RlStep
from rlmux.engines.train.sft_warmup import SftWarmup
from rlmux.engines.train.stage_work import StageWork
from rlmux.engines.train.state.checkpoint import PROMPTS, read_checkpoint, read_state
from rlmux.engines.train.state.model_parts import build_uncut_model
from rlmux.engines.train.state.sharded_state import ShardedState
from rlmux.engines.train.state.snapshot import TrainSnapshot, model_files
from rlmux.engines.train.state.trainer_state import TrainState
from rlmux.engines.train.update.micro_batches import MicroBatch
from rlmux.engines.train.update.ranks import Ranks
from rlmux.engines.train.update.router_loss import has_experts
from rlmux.engines.train.update.train_tensors import TrainTensors
from rlmux.engines.train.update.training_forward import prepare_forward
from rlmux.rl.algorithms import ALGORITHMS
from rlmux.rl.config import TrainingConfig
from rlmux.rl.origin import Origin
from rlmux.rl.prompts.backlog import BACKLOG_FILE
from rlmux.rl.types import TrainingBatch, TrainReport
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary

RL_STAGES = (Stage.REFERENCE_LOGPROBS, Stage.OLD_LOGPROBS, Stage.UPDATE)
"""The stages of one step, in their order. The first is empty without a KL penalty, the second where a step is one
update."""

_MAX_KL = 0.1
"""Largest KL in nats a token from the policy of rollout to that of training, where the file has none."""


class TorchTrainEngine:
    """One rank's training in torch. See the module docstring.

    Ranks         join_ranks, check_ranks, waits_for_ranks
    Learning      begin_step, run_stage, version, is_warm
    Weights       export_weights, weights_checksum, weights_sha256
    Checkpoints   snapshot, save, restore
    Residency     offload, load, leave_cache, resident_bytes
    """

    def __init__(
        self,
        config: TrainingConfig,
        *,
        vocabulary: Vocabulary | None = None,
        device: str = "cpu",
        origin: Origin | None = None,
        bases: Path | None = None,
        base: TenantBase | None = None,
    ) -> None:
        """`vocabulary`: that of `config.model` by default. Raises UserError for an unknown algorithm.

        `bases`: folder in shared memory where the base of adapters lies once for all workers of this machine, in
        float32; on a GPU, and where training computes in bfloat16, it is not used.

        `base`: the base that tenants in this process share, in place of one of the engine's own.

        `origin`: what weights and checkpoints are marked with, and taken over for; None marks and checks nothing.
        """
        if config.algorithm.name not in ALGORITHMS:
            raise UserError(f"algorithm.name: {config.algorithm.name!r}; accepted: {', '.join(ALGORITHMS)}")
        self._config = config = config.computed_on(torch.device(device).type)
        self._origin = origin
        self._marks = {} if origin is None else origin.fields()
        self._vocabulary = load_vocabulary(config.model) if vocabulary is None else vocabulary
        vocab_size = self._vocabulary.vocab_size
        model, is_shared = (
            (build_uncut_model(config, vocab_size), False)
            if config.train.is_sharded
            else build_trained_model(config, vocab_size, device=device, bases=bases, base=base)
        )
        prepare_forward(model, config.train)
        self._model = model
        self._model_config: Any = model.config
        self._device = torch.device(device)
        self._step: RlStep | None = None
        self._version = 0
        self._prompts: dict[str, Any] | None = None
        """The queue of prompts after the step under way, or the last one; None without tail batching."""
        self._backlog: bytes | None = None
        """The backlog after the step under way, or the last one; None without interruptible rollouts."""
        if not self.waits_for_ranks:
            self._take(TrainState(nn.Module.to(model, self._device), config, is_base_shared=is_shared, base=base))
        self._file_by_name: dict[str, bytes] = {}
        """Files that are the same in every checkpoint of the pipeline; empty before the first."""

    def _take(self, state: TrainTensors) -> None:
        self._state = state
        self._sft_warmup = SftWarmup(self._config, self._vocabulary, state)

    @property
    def is_sharded(self) -> bool:
        """Each rank has a part of the tensors: all of them take part in writing weights and checkpoints."""
        return self._config.train.is_sharded

    @property
    def waits_for_ranks(self) -> bool:
        """Its ranks have not been joined, and its tensors are not cut: until then it can do nothing else."""
        return self.is_sharded and not hasattr(self, "_state")

    @property
    def version(self) -> int:
        """Version of the weights: 0 until the first update is done; step n produces version n."""
        return self._version

    @property
    def model(self) -> nn.Module:
        """The model in training."""
        return self._model

    @property
    def state(self) -> TrainTensors:
        """The tensors in training."""
        return self._state

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.vocab_size

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self._device.type

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one forward and backward pass."""
        return self._config.algorithm.sequences_per_pass

    def gradient_of(self, batch: MicroBatch) -> Sequence[Tensor]:
        """This rank's part of the gradient of the weighted log-probs of one micro-batch; nothing is changed."""
        return self._state.gradient_of(batch.to(self._state.device), self._config.rollout.temperature)

    @property
    def is_warm(self) -> bool:
        """The SFT warm-up is over."""
        return self._sft_warmup.is_done

    # --- ranks ----------------------------------------------------------------------------------------------

    def join_ranks(self, ranks: Ranks) -> None:
        """Train together with others from here on; all of them have the same weights and are between two steps.

        Where the model is sharded, each rank keeps its part of it alone.
        """
        if self.waits_for_ranks:
            self._take(ShardedState(self._model, self._config, self.vocab_size, ranks, self._device))
        else:
            self._state.ranks = ranks
            self._sft_warmup.restore(self._sft_warmup.num_updates_done)
        self._step = None

    def check_ranks(self) -> None:
        """Raises PipelineError where the weights of the ranks are not equal, bit for bit."""
        if not self._state.ranks.is_same(self.weights_checksum()):
            raise PipelineError(
                f"pipeline {self._config.name}: the weights of version {self._version} differ between its "
                f"{self._state.ranks.count} training ranks"
            )

    # --- learning -------------------------------------------------------------------------------------------

    def begin_step(self, batch: TrainingBatch, *, max_logprob_gap: float = math.inf) -> None:
        """Take the batch of a step; a token that breaks the staleness bound is a `PipelineError`.

        The step fails where rollout and training disagree about a token by more than `max_logprob_gap` nats, unless
        the config has a bound of its own, or other programs, rounded weights or experts make one token mean nothing.
        """
        config = self._config
        if not self.is_warm or batch.step != self._version + 1:
            raise IllegalTransitionError(
                f"pipeline {config.name}: step {batch.step} was to begin at version {self._version}, "
                f"{self._sft_warmup.num_updates_done} of {config.sft_warmup.num_updates} SFT warm-up updates done"
            )
        expected = config.algorithm.prompts_per_step * config.algorithm.group_size
        if len(batch.trajectories) != expected or len(batch.advantages) != expected:
            raise IllegalTransitionError(
                f"pipeline {config.name}: step {batch.step} came with {len(batch.trajectories)} "
                f"trajectories and {len(batch.advantages)} advantages instead of {expected}"
            )
        self._prompts = None if batch.round is None else dict(batch.round.queue_after)
        self._backlog = batch.backlog
        is_bounded = config.is_sampled_by_trainer and not has_experts(self._model_config)
        is_bounded = is_bounded or config.algorithm.max_logprob_gap is not None
        self._step = RlStep(
            batch,
            config,
            self._state,
            max_logprob_gap=config.algorithm.max_logprob_gap or (max_logprob_gap if is_bounded else math.inf),
            max_kl=config.algorithm.max_mismatch_kl or (math.inf if is_bounded else _MAX_KL),
        )
        self._state.drop_gradients()

    def run_stage(self, stage: Stage, *, max_seconds: float) -> TrainReport:
        """Do micro-batches until the stage is done or `max_seconds` have passed, but at least one.

        Raises IllegalTransitionError for a stage that is not next, PipelineError for a loss that is not finite or
        a device whose memory is too small.
        """
        with self.stage(stage) as work:
            return work.run(max_seconds)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[StageWork]:
        """A stage to continue within the context. Raises as `run_stage` does."""
        self._state.require_loaded()
        try:
            yield self._work(stage)
        except torch.OutOfMemoryError as error:
            number = 0 if self._step is None else self._step.number
            raise DeviceMemoryError(
                f"pipeline {self._config.name} step {number} stage {stage}: out of device memory with "
                f"{self._size_of_pass()}: "
                f"{' '.join(str(error).split())[:160]}"
            ) from error
        if self._step is not None and self._step.is_trained:
            self._version = self._step.number

    def _size_of_pass(self) -> str:
        """The key that decides the size of a micro-batch, and its value."""
        num_tokens = self._config.train.tokens_per_micro_batch
        if num_tokens is not None:
            return f"train.tokens_per_micro_batch {num_tokens}"
        return f"algorithm.micro_batch_size {self._config.algorithm.sequences_per_pass}"

    def _work(self, stage: Stage) -> StageWork:
        if stage == Stage.SFT_WARMUP:
            return self._sft_warmup.work()
        if self._step is None:
            raise IllegalTransitionError(f"pipeline {self._config.name} stage {stage}: no step is under way")
        return self._step.work(stage)

    # --- weights --------------------------------------------------------------------------------------------

    def export_weights(self, path: Path | None) -> int:
        """Write the weights for rollout workers (safetensors, atomically); returns their version.

        None: other ranks write, and this one only gives its part of a sharded model.
        """
        self._require_version()
        self._state.write_weights(path, {"version": str(self._version), **self._marks})
        return self._version

    def weights_checksum(self) -> str:
        """Checksum of the parameters over the version's sample, computed once."""
        return self._state.weights_checksum(self._version)

    def weights_sha256(self) -> str:
        """Hash of all parameters in name order, recomputed; checkpoints store their version's."""
        return self._state.weights_sha256()

    # --- checkpoints ----------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Checkpoint the present version: a Hugging Face model, and what training needs."""
        self.snapshot(folder).write(folder)

    def snapshot(self, folder: Path | None = None) -> TrainSnapshot:
        """A checkpoint's content, in host memory of its own.

        `folder`: of the checkpoint. A model in parts needs it, and that all ranks call this together: each has its
        rows to write. Raises OSError where it cannot be begun.
        """
        self._require_version()
        metadata = {"version": str(self._version), **self._marks}
        rows = self._state.row_files(folder, metadata) if folder and isinstance(self._state, ShardedState) else None
        return TrainSnapshot(
            state={
                "pipeline": self._config.name,
                "version": self._version,
                "sft_warmup_updates": self._sft_warmup.num_updates_done,
                "optimizer_updates": self._state.num_updates,
                CHECKSUM: self.weights_checksum(),
                **({} if self._prompts is None else {PROMPTS: self._prompts}),
            },
            files={**self._small_files(), **({} if self._backlog is None else {BACKLOG_FILE: self._backlog})},
            marks=self._marks,
            tensors=self._state.copies(folder, metadata) if rows is None else {},
            weights_file=self._state.weights_file,
            rows=rows,
            is_of_first=not self.is_sharded or self._state.ranks.rank == 0,
        )

    def restore(self, folder: Path, *, is_verified: bool = False) -> None:
        """Take over a checkpoint; what was under way is dropped, and the next step repeats bit for bit.

        `is_verified`: its checksums were found to hold. Raises CheckpointError for one that is damaged, of another
        origin or of another model.
        """
        self._state.require_loaded()
        state = read_state(folder) if is_verified else read_checkpoint(folder)
        complaint = None if self._origin is None else self._origin.complaint_about(state)
        if complaint is not None:
            raise CheckpointError(f"{folder} is {complaint}")
        # Format 1 calls the SFT warm-up a warm start.
        warmup_updates = int(state["warm_start_updates" if state["format"] == 1 else "sft_warmup_updates"])
        is_warm = warmup_updates == self._config.sft_warmup.num_updates
        self._state.restore(
            folder,
            num_updates=int(state["optimizer_updates"]),
            needs_reference=is_warm and self._config.algorithm.kl_coef > 0,
        )
        self._sft_warmup.restore(warmup_updates)
        self._step = None
        self._version = int(state["version"])
        self._prompts = state.get(PROMPTS)
        self._backlog = (folder / BACKLOG_FILE).read_bytes() if BACKLOG_FILE in state["files"] else None

    def _require_version(self) -> None:
        if self._step is not None and self._step.is_half_trained:
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {self._step.number} is between two of its updates"
            )

    def _small_files(self) -> Mapping[str, bytes]:
        """The model's config, or the adapter's, and the tokenizer, as Hugging Face and peft read them."""
        if not self._file_by_name:
            self._file_by_name = model_files(self._model_config, self._model, self._vocabulary, self._config)
        return self._file_by_name

    # --- residency ------------------------------------------------------------------------------------------

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host, or to disk under this name; a stage under way goes along. Does nothing when offloaded."""
        self._state.offload(spill_to=spill_to)

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        self._state.load()

    def leave_cache(self) -> None:
        """Drop the system's cache of a spilled file, so that a measured load reads the disk."""
        self._state.leave_cache()

    def resident_bytes(self) -> int:
        """Device bytes of weights, gradients, moments, reference and partial sums."""
        return self._state.resident_bytes()

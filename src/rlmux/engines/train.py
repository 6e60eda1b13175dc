"""Trains one pipeline's model, one micro-batch at a time.

    sft_warmup ─▶ version 0 ─┬─▶ begin_step(n) ─▶ reference_logprobs ─▶ old_logprobs ─▶ update ─▶ version n
                             │                       (kl_coef > 0)                                   │
                             └─────────────────────────────────── n + 1 ◀────────────────────────────┘

A stage is a generator that stops after each micro-batch; `run_stage` lets it go on until its time is up, so
every call is bounded by one micro-batch more than asked.

Invariants: the weights after step n are a function of the config and of the batches 1 .. n, however the stages
were cut into calls, offloaded, or restored in between. A checkpoint holds what the last optimizer step left.
No optimizer step is made with a loss or gradient that is not finite.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from rlmux.core.errors import CheckpointError, IllegalTransitionError, PipelineError, UserError
from rlmux.engines.adamw import AdamW
from rlmux.engines.checkpoint import read_checkpoint
from rlmux.engines.flat_parameters import FlatParameters
from rlmux.engines.micro_batches import MicroBatch, TrainingSequence, cut, token_logprobs
from rlmux.engines.model_io import build_model
from rlmux.engines.residency import Offloaded, give_back
from rlmux.engines.snapshot import TrainSnapshot
from rlmux.engines.tree_sum import TreeSum
from rlmux.engines.weights import own_copies, read_tensors, weights_sha256, write_tensors
from rlmux.rl.algorithms import ALGORITHMS, clipped_surrogate, kl_k3
from rlmux.rl.config import TrainingConfig
from rlmux.rl.demonstrations import demonstration_batch
from rlmux.rl.tasks import make_task
from rlmux.rl.types import TrainingBatch, TrainReport, Trajectory
from rlmux.rl.vocabulary import Vocabulary, load_vocabulary

SFT_WARMUP, REFERENCE_LOGPROBS, OLD_LOGPROBS, UPDATE = STAGES = (
    "sft_warmup",
    "reference_logprobs",
    "old_logprobs",
    "update",
)


@dataclass(slots=True, kw_only=True)
class _Work:
    """A stage under way."""

    micro_batches: Iterator[int]
    """Does one micro-batch per item, and yields its tokens."""
    total: int
    done: int = 0
    is_done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Step:
    """The batch under way and what its stages found, one tensor [R] per micro-batch."""

    number: int
    micro_batches: list[MicroBatch]
    old_logprobs: list[Tensor] = field(default_factory=list)
    reference_logprobs: list[Tensor] = field(default_factory=list)
    work_by_stage: dict[str, _Work] = field(default_factory=dict)


class TorchTrainEngine:
    """One rank's `TrainEngine` in torch, float32."""

    def __init__(self, config: TrainingConfig, *, vocabulary: Vocabulary | None = None, device: str = "cpu") -> None:
        if config.algorithm.name not in ALGORITHMS:
            raise UserError(f"algorithm.name: {config.algorithm.name!r}; accepted: {', '.join(ALGORITHMS)}")
        self._config = config
        self._device = torch.device(device)
        self._vocabulary = load_vocabulary(config.model) if vocabulary is None else vocabulary
        model: nn.Module = build_model(config.model, self._vocabulary.vocab_size, config.seed)
        self._model = model.to(self._device)
        self._flat = FlatParameters(self._model)
        self._optimizer = AdamW(
            self._flat.weights,
            betas=config.algorithm.adam_betas,
            weight_decay=config.algorithm.weight_decay,
        )
        self._reference: Tensor | None = None
        """Weights of version 0, once the warm start is over; only with a KL penalty."""
        self._gradient_sum = TreeSum()
        self._version = 0
        self._sft_warmup_updates = 0
        self._warm_start: _Work | None = None
        self._step: _Step | None = None
        self._offloaded: Offloaded | None = None
        self._sha256: tuple[tuple[int, int], str] | None = None
        """Of the weights that so many updates left: wanted by whoever publishes them and by whoever keeps them."""
        self._file_by_name: dict[str, bytes] = {}
        if config.sft_warmup.num_updates == 0:
            self._end_warm_start()

    @property
    def version(self) -> int:
        """Of the weights: 0 until the first update is done; step n produces version n."""
        return self._version

    @property
    def is_warm(self) -> bool:
        """The warm start is over."""
        return self._sft_warmup_updates == self._config.sft_warmup.num_updates

    def begin_step(self, batch: TrainingBatch) -> None:
        """Take the batch of a step; a token that breaks the staleness bound is a `PipelineError`."""
        if not self.is_warm or batch.step != self._version + 1:
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {batch.step} was to begin at version {self._version}, "
                f"{self._sft_warmup_updates} of {self._config.sft_warmup.num_updates} warm-start updates done"
            )
        expected = self._config.algorithm.prompts_per_step * self._config.algorithm.group_size
        if len(batch.trajectories) != expected or len(batch.advantages) != expected:
            raise IllegalTransitionError(
                f"pipeline {self._config.name}: step {batch.step} came with {len(batch.trajectories)} "
                f"trajectories and {len(batch.advantages)} advantages instead of {expected}"
            )
        sequences = [
            self._sequence_of(trajectory, advantage)
            for trajectory, advantage in zip(batch.trajectories, batch.advantages, strict=True)
        ]
        self._gradient_sum = TreeSum()
        self._step = _Step(
            number=batch.step,
            micro_batches=cut(sequences, self._config.algorithm.micro_batch_size, self._vocabulary.pad_token),
        )

    def run_stage(self, stage: str, *, max_seconds: float) -> TrainReport:
        """Do micro-batches until the stage is done or `max_seconds` have passed, but at least one."""
        self._require_resident()
        started = perf_counter()
        work = self._work_of(stage)
        tokens = 0
        while not work.is_done:
            try:
                done_tokens = next(work.micro_batches, None)
            except torch.OutOfMemoryError as error:
                raise PipelineError(
                    f"{self._place(stage)}: out of device memory with algorithm.micro_batch_size "
                    f"{self._config.algorithm.micro_batch_size}: {' '.join(str(error).split())[:160]}"
                ) from error
            if done_tokens is None:
                work.is_done = True
                break
            tokens += done_tokens
            work.done += 1
            if work.done < work.total and perf_counter() - started >= max_seconds:
                break
        return TrainReport(
            is_done=work.is_done,
            micro_batches_done=work.done,
            micro_batches_total=work.total,
            tokens=tokens,
            seconds=perf_counter() - started,
            metrics=dict(work.metrics) if work.is_done else {},
        )

    def export_weights(self, path: Path) -> int:
        """Write the weights for rollout workers (safetensors, atomically); returns their version."""
        self._require_resident()
        write_tensors(path, self._flat.named(), {"version": str(self._version)})
        return self._version

    def weights_sha256(self) -> str:
        """Hash of all parameters in name order."""
        self._require_resident()
        updates = (self._sft_warmup_updates, self._version)
        if self._sha256 is None or self._sha256[0] != updates:
            self._sha256 = updates, weights_sha256(self._flat.named())
        return self._sha256[1]

    def save(self, folder: Path) -> None:
        """Checkpoint what the last optimizer step left: a Hugging Face model, and what training needs."""
        self.snapshot().write(folder)

    def snapshot(self) -> TrainSnapshot:
        """A checkpoint's content, in host memory of its own."""
        self._require_resident()
        moments = {"first_moment": self._optimizer.first_moment, "second_moment": self._optimizer.second_moment}
        tensors = {"model.safetensors": self._flat.named(), "optimizer.safetensors": moments}
        if self._reference is not None:
            tensors["reference.safetensors"] = self._flat.named(self._reference)
        return TrainSnapshot(
            state={
                "pipeline": self._config.name,
                "version": self._version,
                "warm_start_updates": self._sft_warmup_updates,
                "optimizer_updates": self._optimizer.num_updates,
                "weights_sha256": self.weights_sha256(),
            },
            files=self._small_files(),
            tensors={name: own_copies(each) for name, each in tensors.items()},
        )

    def restore(self, folder: Path) -> None:
        """Take over a checkpoint; what was under way is dropped, and the next step repeats bit for bit."""
        self._require_resident()
        state = read_checkpoint(folder)
        weights, _ = read_tensors(folder / "model.safetensors")
        moments, _ = read_tensors(folder / "optimizer.safetensors")
        mine = {name: tensor.shape for name, tensor in self._flat.named().items()}
        if {name: tensor.shape for name, tensor in weights.items()} != mine:
            raise CheckpointError(f"{folder} holds another model than pipeline {self._config.name} trains")
        self._flat.copy_from(weights)
        self._sha256 = None
        self._optimizer.first_moment.copy_(moments["first_moment"])
        self._optimizer.second_moment.copy_(moments["second_moment"])
        self._optimizer.num_updates = int(state["optimizer_updates"])
        self._version = int(state["version"])
        self._sft_warmup_updates = int(state["warm_start_updates"])
        self._warm_start = self._step = None
        self._gradient_sum = TreeSum()
        self._restore_reference(folder / "reference.safetensors")

    def load(self) -> None:
        """Back to the device. Does nothing when already there."""
        if self._offloaded is None:
            return
        scratch = self._flat.gradients
        scratch.untyped_storage().resize_(scratch.numel() * scratch.element_size())
        for tensor in self._device_tensors():
            tensor.untyped_storage().resize_(tensor.nbytes)
        self._offloaded.copy_to(self._device_tensors())
        self._offloaded = None

    def prefetch(self) -> None:
        """Begin to read ahead what was spilled; does nothing for what was not. Returns at once."""
        if self._offloaded is not None:
            self._offloaded.prefetch()

    def offload(self, *, spill_to: Path | None = None) -> None:
        """Device to host, or to disk under this name: the device storage is given back, a stage under way included."""
        if self._offloaded is not None:
            return
        self._offloaded = Offloaded(self._device_tensors(), spill_to=spill_to)
        for tensor in [*self._device_tensors(), self._flat.gradients]:
            tensor.untyped_storage().resize_(0)
        give_back(self._device)

    def resident_bytes(self) -> int:
        """Device bytes of weights, gradients, moments, reference and partial sums."""
        tensors = [*self._device_tensors(), self._flat.gradients]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    # The stages.

    def _work_of(self, stage: str) -> _Work:
        if stage == SFT_WARMUP:
            if self._warm_start is None:
                self._warm_start = self._begin_warm_start()
            return self._warm_start
        step = self._step
        if step is None or stage not in STAGES:
            raise IllegalTransitionError(f"{self._place(stage)}: no step is under way, or no such stage")
        if stage not in step.work_by_stage:
            stages: dict[str, Callable[[_Step, dict[str, float]], Iterator[int]]] = {
                REFERENCE_LOGPROBS: self._run_reference_logprobs,
                OLD_LOGPROBS: self._run_old_logprobs,
                UPDATE: self._run_update,
            }
            metrics: dict[str, float] = {}
            is_skipped = stage == REFERENCE_LOGPROBS and self._reference is None
            step.work_by_stage[stage] = _Work(
                micro_batches=stages[stage](step, metrics),
                total=0 if is_skipped else len(step.micro_batches),
                metrics=metrics,
            )
        return step.work_by_stage[stage]

    def _begin_warm_start(self) -> _Work:
        config = self._config.sft_warmup
        per_update = -(-config.batch_size // self._config.algorithm.micro_batch_size)
        metrics: dict[str, float] = {}
        return _Work(
            micro_batches=self._run_warm_start(metrics),
            total=per_update * config.num_updates,
            done=per_update * self._sft_warmup_updates,
            metrics=metrics,
        )

    def _run_warm_start(self, metrics: dict[str, float]) -> Iterator[int]:
        """Cross-entropy on demonstrations; every sampled token of an update weighs the same."""
        if self.is_warm:
            return
        config = self._config
        task = make_task(config.task, seed=config.seed, vocabulary=self._vocabulary)
        while not self.is_warm:
            update = self._sft_warmup_updates
            demonstrations = demonstration_batch(config, task, self._vocabulary, update)
            num_sampled = sum(sum(each.is_sampled) for each in demonstrations)
            sequences = [
                TrainingSequence(
                    prompt_tokens=each.prompt_tokens,
                    tokens=each.answer_tokens,
                    is_sampled=each.is_sampled,
                    weight=1 / num_sampled,
                )
                for each in demonstrations
            ]
            batches = cut(sequences, config.algorithm.micro_batch_size, self._vocabulary.pad_token)
            total_loss = 0.0
            for place, batch in enumerate(batches):
                on_device = batch.to(self._device)
                logprobs, _ = token_logprobs(self._model, on_device, 1.0)
                total_loss += self._add_gradient(-(logprobs * on_device.weights).sum(), SFT_WARMUP)
                if place == len(batches) - 1:
                    rate = _sft_warmup_rate(config.sft_warmup.learning_rate, update, config.sft_warmup.num_updates)
                    metrics["grad_norm"] = self._optimizer_step(rate, SFT_WARMUP)
                    metrics["loss"] = total_loss
                    self._sft_warmup_updates += 1
                    if self.is_warm:
                        self._end_warm_start()
                yield batch.num_tokens

    def _end_warm_start(self) -> None:
        self._optimizer.reset()
        if self._config.algorithm.kl_coef > 0:
            self._reference = self._flat.weights.clone()

    def _run_reference_logprobs(self, step: _Step, metrics: dict[str, float]) -> Iterator[int]:
        if self._reference is None:
            return
        for batch in step.micro_batches:
            with torch.no_grad(), self._flat.using(self._reference):
                logprobs, _ = self._forward(batch.to(self._device))
            step.reference_logprobs.append(logprobs.cpu())
            yield batch.num_tokens

    def _run_old_logprobs(self, step: _Step, metrics: dict[str, float]) -> Iterator[int]:
        """By the training forward, so that an on-policy ratio is 1 to the last bit."""
        gap = entropy_sum = 0.0
        num_sampled = sum(len(batch.targets) for batch in step.micro_batches)
        for batch in step.micro_batches:
            on_device = batch.to(self._device)
            with torch.no_grad():
                logprobs, distribution = self._forward(on_device)
                entropy_sum -= float((distribution.exp() * distribution).sum())
                gaps = (logprobs - on_device.sampled_logprobs).abs().masked_fill(on_device.is_stale, 0.0)
                gap = max(gap, float(gaps.max()))
            step.old_logprobs.append(logprobs.cpu())
            yield batch.num_tokens
        metrics["entropy"] = entropy_sum / num_sampled
        metrics["logprob_gap"] = gap

    def _run_update(self, step: _Step, metrics: dict[str, float]) -> Iterator[int]:
        """Gradients of all micro-batches, summed as a tree, then one optimizer step."""
        for needed in (REFERENCE_LOGPROBS, OLD_LOGPROBS):
            is_skipped = needed == REFERENCE_LOGPROBS and self._reference is None
            if not is_skipped and not (needed in step.work_by_stage and step.work_by_stage[needed].is_done):
                raise IllegalTransitionError(f"{self._place(UPDATE)}: {needed} is not done")
        algorithm = self._config.algorithm
        totals = dict.fromkeys(("loss", "kl", "clip_fraction", "stale_token_share"), 0.0)
        num_sampled = sum(len(batch.targets) for batch in step.micro_batches)
        for place, batch in enumerate(step.micro_batches):
            on_device = batch.to(self._device)
            logprobs, _ = self._forward(on_device)
            # A stale token is corrected towards the policy that sampled it. For the others that is this
            # policy, and its log-prob comes from the same kernels as the new one.
            recomputed = step.old_logprobs[place].to(self._device)
            old_logprobs = torch.where(on_device.is_stale, on_device.sampled_logprobs, recomputed)
            losses, is_clipped = clipped_surrogate(
                logprobs,
                old_logprobs,
                on_device.advantages,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
            )
            if self._reference is not None:
                kl = kl_k3(logprobs, step.reference_logprobs[place].to(self._device))
                losses = losses + algorithm.kl_coef * kl
                totals["kl"] += float(kl.detach().sum()) / num_sampled
            totals["loss"] += self._add_gradient((losses * on_device.weights).sum(), UPDATE)
            totals["clip_fraction"] += float(is_clipped.sum()) / num_sampled
            totals["stale_token_share"] += float(on_device.is_stale.sum()) / num_sampled
            if place == len(step.micro_batches) - 1:
                rate = _warmed_up(algorithm.learning_rate, self._optimizer.num_updates, algorithm.lr_warmup_steps)
                metrics["grad_norm"] = self._optimizer_step(rate, UPDATE)
                metrics["learning_rate"] = rate
                metrics.update(totals)
                metrics.update(step.work_by_stage[OLD_LOGPROBS].metrics)
                self._version = step.number
            yield batch.num_tokens

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(self._model, batch, self._config.rollout.temperature)

    def _add_gradient(self, loss: Tensor, stage: str) -> float:
        """Backward of one micro-batch; its gradient becomes the tree's next leaf."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise PipelineError(f"{self._place(stage)}: the loss is {value}; the weights are left as they were")
        self._flat.gradients.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self._gradient_sum.add(self._flat.gradients.clone())
        return value

    def _optimizer_step(self, learning_rate: float, stage: str) -> float:
        """Clip the summed gradient and step; returns the norm before clipping."""
        gradients = self._gradient_sum.total()
        norm = float(torch.linalg.vector_norm(gradients))
        if not math.isfinite(norm):
            raise PipelineError(f"{self._place(stage)}: the gradient norm is {norm}; the weights are left as they were")
        if norm > self._config.algorithm.grad_clip:
            gradients.mul_(self._config.algorithm.grad_clip / norm)
        self._optimizer.update(self._flat.weights, gradients, learning_rate)
        return norm

    # What the above stands on.

    def _sequence_of(self, trajectory: Trajectory, advantage: float) -> TrainingSequence:
        algorithm = self._config.algorithm
        newest = self._version
        oldest = newest - algorithm.staleness
        for version, is_sampled in zip(trajectory.versions, trajectory.is_sampled, strict=True):
            if is_sampled and not oldest <= version <= newest:
                raise PipelineError(
                    f"pipeline {self._config.name}: {trajectory.id} has a token of weight version {version}; "
                    f"step {self._version + 1} accepts {oldest} to {newest} (algorithm.staleness "
                    f"{algorithm.staleness})"
                )
        return TrainingSequence(
            prompt_tokens=trajectory.prompt_tokens,
            tokens=trajectory.tokens,
            is_sampled=trajectory.is_sampled,
            weight=ALGORITHMS[algorithm.name].trajectory_weight(
                algorithm.prompts_per_step * algorithm.group_size,
                sum(trajectory.is_sampled),
                self._config.rollout.max_new_tokens,
            ),
            advantage=advantage,
            logprobs=trajectory.logprobs,
            is_stale=[version < newest for version in trajectory.versions],
        )

    def _device_tensors(self) -> list[Tensor]:
        """What has to survive an offload; the gradient buffer is scratch."""
        tensors = [self._flat.weights, self._optimizer.first_moment, self._optimizer.second_moment]
        if self._reference is not None:
            tensors.append(self._reference)
        return [*tensors, *self._gradient_sum.tensors]

    def _require_resident(self) -> None:
        if self._offloaded is not None:
            raise IllegalTransitionError(f"pipeline {self._config.name}: the train engine is offloaded")

    def _small_files(self) -> Mapping[str, bytes]:
        """The same in every checkpoint of the pipeline."""
        if not self._file_by_name:
            config: Any = self._model.config
            config.architectures = [type(self._model).__name__]
            config.eos_token_id = self._vocabulary.eos_token
            config.pad_token_id = self._vocabulary.pad_token
            with tempfile.TemporaryDirectory(prefix="rlmux-") as folder:
                config.save_pretrained(folder)
                self._vocabulary.save_pretrained(Path(folder))
                self._file_by_name = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        return self._file_by_name

    def _restore_reference(self, path: Path) -> None:
        self._reference = None
        if not self.is_warm or self._config.algorithm.kl_coef == 0:
            return
        if not path.is_file():
            raise CheckpointError(f"{path} is absent, but algorithm.kl_coef needs the reference weights")
        tensors, _ = read_tensors(path)
        self._reference = torch.zeros_like(self._flat.weights)
        self._flat.copy_from(tensors, self._reference)

    def _place(self, stage: str) -> str:
        number = self._step.number if self._step is not None else 0
        return f"pipeline {self._config.name} step {number} stage {stage}"


def _warmed_up(learning_rate: float, num_updates: int, num_warmup: int) -> float:
    """Rises evenly over the first updates, then stays."""
    return learning_rate * min(1.0, (num_updates + 1) / (num_warmup + 1))


def _sft_warmup_rate(learning_rate: float, update: int, num_updates: int) -> float:
    """Rises over the first tenth, then falls along half a cosine to a tenth: the next phase starts small."""
    risen = _warmed_up(learning_rate, update, num_updates // 10)
    return risen * (0.55 + 0.45 * math.cos(math.pi * update / num_updates))

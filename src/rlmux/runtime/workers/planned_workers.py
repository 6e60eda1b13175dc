"""The objects inside worker processes: thin shells that put an engine behind bounded calls.

    EnvWorker       prompts, environments, rewards          one per pipeline
    RolloutWorker   a rollout engine                        one per (pipeline, rollout device), some in one process
                                                            (tenant_hosts.py)
    TrainWorker     a train engine                          one per training rank

Every method is one bounded call, made by the drivers (rollout_driver.py, train_driver.py); workers do not call each
other. The controller forwards the env worker's batches as bytes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlmux import plugins
from rlmux.core.errors import PipelineError, StorageError
from rlmux.engines.train.state.checkpoint import STEP_NOTE
from rlmux.log.notes import StepNote, encode
from rlmux.rl.batch_metrics import batch_metrics
from rlmux.rl.config import TrainingConfig
from rlmux.rl.determinism_class import ProbeReport
from rlmux.rl.origin import Origin
from rlmux.rl.packed_turns import PackedTurns
from rlmux.rl.prompts.backlog import Backlog
from rlmux.rl.types import (
    ChunkReport,
    PartialTrajectory,
    TrainingBatch,
    TrainReport,
    TrajectoryId,
    TrajectoryRequest,
    TurnReply,
)
from rlmux.runtime.records.filler_outputs import AnswerFile
from rlmux.runtime.records.sample_archive import SampleKeeper
from rlmux.runtime.weights.checkpoints import (
    CheckpointWriter,
    Written,
    backlog_of,
    damage_of,
    mark_latest,
    prune,
    queue_of,
)
from rlmux.runtime.workers.heartbeat import beat, beating
from rlmux.runtime.workers.packed_partials import packed, unpacked
from rlmux.runtime.workers.worker_calls import (
    HandOut,
    RolloutChunk,
    RolloutChunkResult,
    StepBatch,
    StepOver,
    TrainCall,
    TrainCallResult,
)

if TYPE_CHECKING:
    from rlmux.engines.rollout.protocol import RolloutEngine
    from rlmux.engines.train.train_engine import TorchTrainEngine
    from rlmux.engines.train.update.ranks import RankStore


class EnvWorker:
    """The process that holds a pipeline's prompts, environments and rewards: the user's code."""

    def __init__(
        self,
        config: TrainingConfig,
        origin: Origin | None = None,
        samples: Path | None = None,
        code_folder: Path | None = None,
        answers: Path | None = None,
        restore_from: Path | None = None,
    ) -> None:
        """`samples`: file of trajectories; `answers`: file of a filler's answers; None: not kept. `code_folder`: first
        search folder of the user's modules. `restore_from`: checkpoint to resume from, with the prompt queue of tail
        batching or the backlog of interruptible rollouts."""
        if code_folder is not None:
            plugins.look_in(code_folder, is_first=True)
        from rlmux.rl.user_code.pipeline_env import PipelineEnv

        self._origin = origin
        prompts = None if restore_from is None else queue_of(restore_from, config)
        self._backlog = Backlog() if restore_from is None else backlog_of(restore_from, config)
        self._env = PipelineEnv(
            config, on_answer=beat, prompts=prompts, clock=self._backlog.clock, code_folder=code_folder
        )
        self._keeper = None if samples is None else SampleKeeper(samples, self._env.vocabulary)
        self._answers = None if answers is None else AnswerFile(answers, self._env.vocabulary)

    def verify(self, checkpoints: Sequence[Path]) -> list[tuple[Path, str]]:
        """(damaged checkpoint, reason) pairs; reads every byte."""
        with beating():
            checked = [(checkpoint, damage_of(checkpoint)) for checkpoint in checkpoints]
        return [(checkpoint, damage) for checkpoint, damage in checked if damage is not None]

    def begin_step(self, step: int) -> tuple[list[TrajectoryRequest], bool]:
        """Returns (the step's requests, whether the task is single-turn)."""
        return self._env.begin_step(step), self._env.is_single_turn

    def on_turns(
        self, finished: Sequence[PackedTurns], patience_s: float
    ) -> tuple[list[TurnReply], list[TrajectoryId]]:
        return self._env.on_turns([turn for packed in finished for turn in packed.unpack()], patience_s)

    def take_backlog(self) -> Backlog:
        """Remove and return the backlog from which interruptible rollouts continue."""
        backlog, self._backlog = self._backlog, Backlog()
        return backlog

    def finish_step(self, step: int, over: StepOver | None = None) -> StepBatch:
        """Make the step's batch. `over`: from interruptible rollouts; None for others."""
        batch = replace(self._env.finish_step(step, None if over is None else over.ids), origin=self._origin)
        if over is not None:
            batch = replace(batch, backlog=over.backlog)
        if self._answers is not None:
            self._answers.write(batch)
        payload = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        finished = StepBatch(payload=payload, metrics=batch_metrics(batch))
        if self._keeper is not None:  # last: its thread would take turns with this one, and a device waits for the step
            self._keeper.keep(batch)
        return finished


def make_rollout_engine(
    config: TrainingConfig, vocab_size: int, is_single_turn: bool, device: str, bases: Path | None
) -> RolloutEngine:
    """Our engine in this process, the user's, or one behind a server that ends with it."""
    if config.rollout.engine.is_server:
        from rlmux.engines.servers.factory import make_server_engine

        return make_server_engine(
            config, vocab_size=vocab_size, is_single_turn=is_single_turn, device=device, on_wait=beat
        )
    if config.rollout.engine.is_of_user:
        from rlmux.engines.user_engine import make_user_engine

        return make_user_engine(config, vocab_size=vocab_size, is_single_turn=is_single_turn, device=device)
    from rlmux.engines.rollout.slot_engine import SlotRolloutEngine

    return SlotRolloutEngine(
        config.model,
        config.rollout,
        vocab_size=vocab_size,
        seed=config.model_seed,
        staleness=config.algorithm.staleness,
        is_single_turn=is_single_turn,
        device=device,
        adapter=config.adapter,
        bases=bases,
        trained_dtype=config.train.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInputs:
    """What a rollout worker did with the inputs of a chunk, before it decodes."""

    load_s: float
    """Seconds of loading state and weights."""
    input_s: float
    """Seconds of taking in requests, replies and migrated trajectories."""
    partials: Sequence[PartialTrajectory] | None
    loaded: str | None
    """Both as in RolloutChunkResult."""

    def result(self, report: ChunkReport) -> RolloutChunkResult:
        """The chunk's result, with the engine's report."""
        return RolloutChunkResult(
            report=replace(report, finished=()),
            turns=PackedTurns.pack(report.finished),
            load_s=self.load_s,
            input_s=self.input_s,
            partials=self.partials,
            loaded=self.loaded,
        )


class RolloutWorker:
    """A rollout engine in its own process, or a tenant's in a shared one (tenant_hosts.py)."""

    _server: Any = None
    """The engine, where it is a server of others."""
    _num_probed = 0
    """Trajectories that its probe samples at least. A GPU's batch is that of the run: it chooses kernels by size."""

    @beating()
    def __init__(self, config: TrainingConfig, origin: Origin | None = None, bases: Path | None = None) -> None:
        """`bases`: folder in shared memory for the base of adapters."""
        import torch

        from rlmux.engines.device_fraction import fraction_setter
        from rlmux.rl.tasks import make_task
        from rlmux.rl.vocabulary import load_vocabulary

        torch.set_num_threads(config.train.num_threads)
        device = device_in_use()
        vocabulary = load_vocabulary(config.model)
        task = make_task(config.task, seed=config.seed, vocabulary=vocabulary)
        self._engine = make_rollout_engine(config, vocabulary.vocab_size, task.is_single_turn, device, bases)
        self._server: Any = self._engine if config.rollout.engine.is_server else None
        self._reports_checksum = not (config.rollout.engine.is_server or config.rollout.engine.is_of_user)
        if device == "cuda" and self._reports_checksum:
            self._num_probed = config.rollout.num_slots
        self._origin = origin
        self._fraction = fraction_setter(device)

    @classmethod
    def over(cls, engine: RolloutEngine, origin: Origin | None) -> RolloutWorker:
        """A worker over an engine of ours that is there already, for `take_inputs` and calls without a chunk."""
        worker = cls.__new__(cls)
        worker._engine, worker._origin, worker._reports_checksum = engine, origin, True
        return worker

    def probe(self) -> ProbeReport | None:
        """Compare the engine's results under different schedules; None if it has work or is offloaded."""
        from rlmux.engines.determinism_probe import NUM_TRAJECTORIES, probe_rollout

        if not self._engine.is_unused:
            return None
        with beating():
            report = probe_rollout(self._engine, num_trajectories=max(NUM_TRAJECTORIES, self._num_probed))
        return report if self._server is None else replace(report, server=self._server.described())

    def run_chunk(self, chunk: RolloutChunk) -> RolloutChunkResult:
        """Raises PipelineError for weights or trajectories of another run or plan."""
        self._fraction.set(chunk.device_fraction)
        inputs = self.take_inputs(chunk)
        report = self._engine.run_chunk(max_decode_steps=chunk.max_decode_steps, max_seconds=chunk.max_seconds)
        return inputs.result(report)

    def take_inputs(self, chunk: RolloutChunk) -> ChunkInputs:
        """Everything of a chunk but the decoding. Raises as `run_chunk` does."""
        start, loaded = time.perf_counter(), None
        with beating():
            if chunk.weights is not None:  # before the state, whose older weights then stay behind
                loaded = self._load_weights(*chunk.weights, chunk.published)
            if chunk.is_load_needed:
                self._engine.load()
        load_s = time.perf_counter() - start
        start = time.perf_counter()
        handed_back = self.take_partials(copies_kv=False) if chunk.hands_back else None
        if chunk.cut:
            self._engine.take_partials(chunk.cut, with_kv=False)
        if chunk.requests:  # before the replies: a session waits for one from its start
            self._engine.submit(chunk.requests)
        if chunk.partials:  # these may wait for one, too
            for partial in chunk.partials:
                _check_samples(partial.origin, self._origin)
            self._engine.continue_from([unpacked(partial) for partial in chunk.partials])
        if chunk.replies or chunk.released:
            self._engine.reply(chunk.replies, chunk.released)
        input_s = time.perf_counter() - start
        return ChunkInputs(load_s=load_s, input_s=input_s, partials=handed_back, loaded=loaded)

    def _load_weights(self, path: Path, version: int, published: str | None) -> str | None:
        """Returns the checksum that the engine verified; None for an engine that reports none."""
        checksum = None
        if self._origin is not None:
            from rlmux.engines.model.weights import check_weights

            checksum = check_weights(path, version, self._origin, published)
        self._engine.load_weights(path, version)
        return checksum if self._reports_checksum else None

    def take_partials(self, copies_kv: bool) -> list[PartialTrajectory]:
        taken = self._engine.take_partials(None, with_kv=copies_kv)
        return [replace(packed(partial), origin=self._origin) for partial in taken]

    def offload(self, spill_to: Path | None = None) -> int:
        """Leave the device, for host memory or for a file; returns the device bytes still held."""
        return offload_engine(self._engine, spill_to)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """What a TrainCall needed before it trained."""

    load_s: float
    """Seconds of loading state."""
    input_s: float
    """Seconds of taking in the step's batch."""


class TrainWorker:
    """A train engine in its own process, or a tenant's in a shared one (tenant_hosts.py)."""

    @beating()
    def __init__(
        self,
        config: TrainingConfig,
        restore_from: Path | None,
        origin: Origin | None = None,
        bases: Path | None = None,
    ) -> None:
        """`restore_from`: a checkpoint that was verified. `bases`: folder in shared memory for the base of adapters."""
        import torch

        from rlmux.engines.device_fraction import fraction_setter
        from rlmux.engines.train.train_engine import TorchTrainEngine

        torch.set_num_threads(config.train.num_threads)
        device = device_in_use()
        self._fraction = fraction_setter(device)
        self._take(TorchTrainEngine(config, device=device, origin=origin, bases=bases), origin, restore_from)

    @classmethod
    def over(cls, engine: TorchTrainEngine, origin: Origin | None, restore_from: Path | None) -> TrainWorker:
        """A worker over a tenant's engine, for `take_inputs`, `result` and calls without a stage."""
        worker = cls.__new__(cls)
        worker._take(engine, origin, restore_from)
        return worker

    def _take(self, engine: TorchTrainEngine, origin: Origin | None, restore_from: Path | None) -> None:
        from rlmux.engines.train.update.ranks import Ranks

        self._engine = engine
        self._origin = origin
        self._checkpoints = CheckpointWriter()
        self._store: RankStore | None = None
        self._ranks = Ranks()
        self._restore_from = restore_from
        if not engine.waits_for_ranks:
            self._restore()

    def _restore(self) -> None:
        if self._restore_from is not None:
            self._engine.restore(self._restore_from, is_verified=True)

    def probe(self) -> ProbeReport:
        """Compare what the engine computes with itself."""
        from rlmux.engines.determinism_probe import probe_training

        return probe_training(self._engine)

    def open_rank_store(self, host: str) -> tuple[str, int]:
        """Open the rank store in the first rank's process; returns its address."""
        from rlmux.engines.train.update.ranks import RankStore

        self._store = RankStore(host)
        return self._store.address

    def join_ranks(self, store: tuple[str, int], rank: int, count: int, host: str) -> None:
        """Join the other ranks; returns once all have joined. `host`: this rank's address for them."""
        from rlmux.engines.train.update.ranks import join_ranks

        with beating():
            self._ranks = join_ranks(self._store or store, rank, count, host=host)
            waits = self._engine.waits_for_ranks
            self._engine.join_ranks(self._ranks)
            if waits:
                self._restore()

    def run_stage(self, call: TrainCall) -> TrainCallResult:
        """Begin the step of the given batch, continue a stage, and hand out the weights at its end if requested.

        Raises PipelineError for a batch of another run or plan, and errors of writing a checkpoint.
        """
        self._fraction.set(call.device_fraction)
        inputs = self.take_inputs(call)
        return self.result(call, inputs, self._engine.run_stage(call.stage, max_seconds=call.max_seconds))

    def take_inputs(self, call: TrainCall) -> StageInputs:
        """Everything of a call before it trains. Raises PipelineError as `run_stage` does."""
        start = time.perf_counter()
        if call.payload is not None:
            batch: TrainingBatch = pickle.loads(call.payload)
            _check_samples(batch.origin, self._origin)
            self._engine.begin_step(batch, max_logprob_gap=call.max_logprob_gap)
        input_s = time.perf_counter() - start
        start = time.perf_counter()
        if call.is_load_needed:
            with beating():
                self._engine.load()
        return StageInputs(load_s=time.perf_counter() - start, input_s=input_s)

    def result(self, call: TrainCall, inputs: StageInputs, report: TrainReport) -> TrainCallResult:
        """The call's result, with the engine's report; hands out the weights at the stage's end if requested."""
        start = time.perf_counter()
        checksum = file_checksum = None
        if report.is_done and call.hand_out is not None:
            with beating():
                checksum, file_checksum = self._hand_out(call.hand_out, report)
        return TrainCallResult(
            report=report,
            load_s=inputs.load_s,
            input_s=inputs.input_s,
            hand_out_s=time.perf_counter() - start,
            weights_checksum=checksum,
            file_checksum=file_checksum,
            written=self._checkpoints.written(),
        )

    def _hand_out(self, hand_out: HandOut, report: TrainReport) -> tuple[str | None, str | None]:
        """Write the weights for rollout workers, and begin to write a checkpoint beside later work.

        The first rank writes the checkpoint, after a check that all ranks have the same weights; ranks with parts of a
        model write their own rows, and the first ends it. `run_stage` and `finish_checkpoint` report the durable
        checkpoint with the weights' SHA-256, computed by the writing thread. Returns (checksum of the weights, checksum
        in the file); None on other ranks. Raises PipelineError if ranks have different weights.
        """
        from rlmux.engines.model.weight_checksum import CHECKSUM
        from rlmux.engines.model.weights import read_metadata

        is_sharded = self._engine.is_sharded
        if hand_out.checkpoint is not None and not is_sharded:
            self._engine.check_ranks()
        is_first, is_writer = self._ranks.rank == 0, self._ranks.rank in hand_out.writers
        if not is_writer and not is_sharded:
            return None, None
        with _storing(hand_out.weights):
            self._engine.export_weights(hand_out.weights if is_writer else None)
        checksum = file_checksum = note = None
        if is_first:
            checksum, file_checksum = self._engine.weights_checksum(), read_metadata(hand_out.weights)[CHECKSUM]
            note = hand_out.whole_note(report, checksum, file_checksum)
        if hand_out.checkpoint is not None and (is_first or is_sharded):
            self._checkpoints.begin(
                hand_out.checkpoint,
                partial(self._snapshot, hand_out.checkpoint, hand_out.num_kept, note),
                is_well_everywhere=self._is_well_everywhere if is_sharded else bool,
            )
        return checksum, file_checksum

    def _is_well_everywhere(self, is_well: bool) -> bool:
        return self._ranks.is_same(str(is_well)) and is_well

    def finish_checkpoint(self) -> list[Written]:
        """Wait for the pending checkpoint. Returns durable checkpoints since the last report."""
        with beating():
            self._checkpoints.wait()
        return self._checkpoints.written()

    def _snapshot(self, folder: Path, keep: int, note: StepNote | None) -> Callable[[Path], str | None]:
        with _storing(folder):
            snapshot = self._engine.snapshot(folder)
        if note is not None:
            snapshot = replace(snapshot, state={**snapshot.state, STEP_NOTE: encode(note)})

        def write(folder: Path) -> str | None:
            with _storing(folder):
                sha256 = snapshot.write(folder)
                if sha256 is not None:
                    mark_latest(folder)
                    prune(folder.parent, keep)
            return sha256

        return write

    def resident_bytes(self) -> int:
        """Device bytes of the engine's state."""
        return self._engine.resident_bytes()

    def offload(self, spill_to: Path | None = None) -> int:
        """Leave the device, for host memory or for a file; returns the device bytes still held."""
        return offload_engine(self._engine, spill_to)


def _check_samples(found: Origin | None, expected: Origin | None) -> None:
    """Raises PipelineError for samples of another run or plan."""
    if expected is not None and found != expected:
        complaint = expected.complaint_about({} if found is None else found.fields())
        raise PipelineError(f"pipeline {expected.pipeline}: it was handed samples {complaint}")


_EXACT_PINNED_BLOCKS = "pinned_max_round_threshold_mb:64"
"""Larger blocks of pinned host memory are not rounded up to powers of two: 9 GB would take 17."""

_FIRST_WITH_EXACT_BLOCKS = (2, 13)
"""Version of torch that is known to read it; an older one would refuse to start."""


def device_in_use() -> str:
    """`cuda` for the GPU that this process was given, `cpu` for the core that it is pinned to.

    A GPU sums in a fixed order only if this is set before its first call.
    """
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    is_known = tuple(map(int, torch.__version__.split(".")[:2])) >= _FIRST_WITH_EXACT_BLOCKS
    if is_known and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = _EXACT_PINNED_BLOCKS
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing here reads memory before it is written, and filling a pinned copy takes seven times as long as the copy.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return "cuda"


class SwitchedEngine(Protocol):
    """An engine that leaves its device and comes back."""

    def offload(self, *, spill_to: Path | None = None) -> None: ...

    def resident_bytes(self) -> int: ...


def offload_engine(engine: SwitchedEngine, spill_to: Path | None) -> int:
    """Leave the device, for host memory or for a file; returns the device bytes still held.

    Raises StorageError for a file that cannot be written.
    """
    with beating(), _storing(spill_to) if spill_to else contextlib.nullcontext():
        engine.offload(spill_to=spill_to)
    return engine.resident_bytes()


@contextlib.contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Raises StorageError for a file that cannot be written: a full disk is not the pipeline's fault."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error

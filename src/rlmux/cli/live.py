"""Shows a run while it goes on: each pipeline's step and reward, and what holds each device.

    on a terminal     two small tables, redrawn at most four times a second
    elsewhere         a line per pipeline and step, at most one every two seconds per pipeline

All of it goes to stderr, so that stdout stays for results. A listener of the controller: it is called in the
controller's loop, so it only takes notes; drawing is rich's own thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rlmux.cli.output import check_is_read
from rlmux.config import Spec
from rlmux.core.actions import Action, ExpectSteps, MigrateShard, ReportPolicyFault, RunStage
from rlmux.core.events import (
    ChunkFinished,
    Event,
    PipelineFailed,
    PipelineRestarted,
    PipelineSubmitted,
    StageFinished,
    StagePaused,
    WorkerLost,
)
from rlmux.core.model import DeviceId, OrderId, Pipeline, PipelineId, Stage
from rlmux.log.notes import (
    DeterminismNote,
    InputsNote,
    LossNote,
    NeighbourNote,
    Note,
    RetriedNote,
    StepNote,
    WarningNote,
)
from rlmux.report.slos import probability_words
from rlmux.report.timeline.records import try_text
from rlmux.rl.config import TrainingConfig
from rlmux.rl.determinism_class import DeterminismClass

if TYPE_CHECKING:
    from rich.live import Live as RichLive
    from rich.table import Table

_LINE_EVERY_S = 2.0
_REDRAWS_PER_S = 4


@dataclass(slots=True)
class _PipelineRow:
    num_steps: int
    num_updates: int = 0
    """Updates of the SFT warm-up, 0 where they are not known."""
    micro_batches_per_update: int = 1
    num_left: int | None = None
    """Micro-batches of the SFT warm-up that are left; None before the first report."""
    step: int = 0
    reward_first: float | None = None
    reward: float | None = None
    tokens_per_s: float = 0.0
    doing: str = "starting"
    last_step_s: float = 0.0
    last_line_s: float = -_LINE_EVERY_S
    slo_reason: str = ""
    slo_probability: float | None = None


class Live:
    """A context manager around a run, and its listener."""

    def __init__(self, spec: Spec, *, is_quiet: bool, is_resuming: bool = False) -> None:
        """`is_resuming`: print the step from which each pipeline resumes."""
        self._is_quiet = is_quiet
        self._is_resuming = is_resuming
        self._rows = {given.pipeline.id: _row(given.config) for given in spec.pipelines}
        self._holder_by_device: dict[str, str] = {
            f"{pool.name}-{node}.{device}": ""
            for pool in spec.cluster.pools.values()
            for node in range(pool.num_nodes or 0)
            for device in range(pool.devices_per_node)
        }
        self._size = {
            pool.name: f" ({pool.gpus_per_device} GPUs)"
            for pool in spec.cluster.pools.values()
            if pool.gpus_per_device > 1
        }
        self._orders: dict[OrderId, RunStage] = {}
        self._policy = spec.policy
        self._now_s = 0.0
        self._reported_s = time.monotonic()
        """Moment at which `_now_s` was reported, by this process's monotonic clock."""
        self._display: RichLive | None = None

    def __enter__(self) -> Live:
        if not self._is_quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live as RichLive

            self._display = RichLive(
                console=Console(stderr=True),
                get_renderable=self.tables,
                refresh_per_second=_REDRAWS_PER_S,
                transient=True,
            )
            self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            with suppress(OSError):  # its terminal was closed
                self._display.stop()

    def update(self, now_s: float, events: Sequence[Event], actions: Sequence[Action], notes: Sequence[Note]) -> None:
        """Raises BrokenPipeError where nothing reads what this process prints."""
        check_is_read()
        self._now_s, self._reported_s = now_s, time.monotonic()
        for event in events:
            self._take_event(event)
        for action in actions:
            if isinstance(action, RunStage):
                self._begin(action)
            elif isinstance(action, MigrateShard):
                self._rows[action.pipeline].doing = "migrating"
            elif isinstance(action, ExpectSteps):
                self._take_expectation(action)
            elif isinstance(action, ReportPolicyFault):
                self._print_line(f"rlmux: {_fault_words(action)}")
        for note in notes:
            self._take_note(note)

    def _take_event(self, event: Event) -> None:
        match event:
            case PipelineSubmitted():
                self._take_submission(event.pipeline)
            case StageFinished() | StagePaused():
                self._end(event.order)
            case WorkerLost():
                self._end_all(event.pipeline, event.device)
            case PipelineRestarted():
                self._end_all(event.pipeline)
                self._rows[event.pipeline].doing = f"again from step {max(event.restored_step, 0)}"
            case PipelineFailed():
                self._end_all(event.pipeline)
                self._rows[event.pipeline].doing = f"failed: {event.reason}"
                self._print_line(f"{event.pipeline}: failed: {event.reason}")
            case ChunkFinished():
                action = self._orders.get(event.order)
                if action is not None and action.stage is Stage.SFT_WARMUP:
                    self._rows[action.pipeline].num_left = event.num_active
                    self._print_warmup(action.pipeline)
                elif action is not None:
                    row = self._rows[action.pipeline]
                    row.doing = (
                        f"{_words(action)}, {event.num_active + event.num_waiting + event.num_waiting_for_env} open"
                    )

    def _take_expectation(self, action: ExpectSteps) -> None:
        row = self._rows[action.pipeline]
        if action.reason and not row.slo_reason:
            self._print_line(f"{action.pipeline}: {action.reason}")
        elif row.slo_reason and not action.reason:
            self._print_line(f"{action.pipeline}: its SLO can be kept from now on")
        if action.probability not in (None, row.slo_probability):
            self._print_line(f"{action.pipeline}: {probability_words(action.probability)}")
        row.slo_reason, row.slo_probability = action.reason, action.probability

    def _take_submission(self, pipeline: Pipeline) -> None:
        row = self._rows.setdefault(pipeline.id, _PipelineRow(num_steps=pipeline.num_steps or 0))
        row.step = pipeline.first_step - 1
        if self._is_resuming:
            begins = "goes on" if row.step else "begins"
            self._print_line(f"{pipeline.id}: {begins} at step {pipeline.first_step} of {row.num_steps}")

    def _print_warmup(self, pipeline: PipelineId) -> None:
        row = self._rows[pipeline]
        row.doing = "SFT warm-up"
        if row.num_updates:
            num_left = -(-(row.num_left or 0) // row.micro_batches_per_update)
            num_done = 0 if row.num_left is None else row.num_updates - num_left
            row.doing = f"SFT warm-up, update {num_done} of {row.num_updates}"
        elif row.num_left is not None:  # it was submitted while the run went on
            row.doing = f"SFT warm-up, {row.num_left} micro-batches left"
        if self._display is None and self._now_s - row.last_line_s >= _LINE_EVERY_S:
            row.last_line_s = self._now_s
            self._print_line(f"{self._now_s:7.1f} s  {pipeline}: {row.doing}")

    def _begin(self, action: RunStage) -> None:
        self._orders[action.order] = action
        self._rows[action.pipeline].doing = _words(action)
        if action.stage is Stage.SFT_WARMUP:
            self._print_warmup(action.pipeline)
        for device in action.devices:
            self._holder_by_device[str(device)] = f"{action.pipeline}: {_words(action)}"

    def _end(self, order: OrderId) -> None:
        action = self._orders.pop(order, None)
        if action is None:
            return
        self._rows[action.pipeline].doing = "waiting"
        for device in action.devices:
            self._holder_by_device[str(device)] = ""

    def _end_all(self, pipeline: PipelineId, device: DeviceId | None = None) -> None:
        for order, action in list(self._orders.items()):
            if action.pipeline == pipeline and (device is None or device in action.devices):
                self._end(order)

    def _take_note(self, note: Note) -> None:
        match note:
            case StepNote():
                self._take_step(note)
            case NeighbourNote():
                self._print_line(f"rlmux: {note.reason}")
            case DeterminismNote():
                self._print_line(f"{note.pipeline}: promise {note.promise}{_unequal(note)}{_measured(note)}")
            case InputsNote() if note.changed:
                self._print_line(f"{note.pipeline}: its files are not what they were: {', '.join(note.changed)}")
            case RetriedNote():
                self._rows[note.pipeline].doing = ""
                self._print_line(f"{note.pipeline}: {try_text(note.number, note.of, note.reason)}")
            case WarningNote() | LossNote():
                self._print_line(f"{note.pipeline}: {note.reason}")

    def _take_step(self, note: StepNote) -> None:
        pipeline, metrics = note.pipeline, note.metrics
        row = self._rows[pipeline]
        row.step = note.step
        row.reward = metrics["reward_mean"]
        row.reward_first = row.reward if row.reward_first is None else row.reward_first
        row.tokens_per_s = (metrics["tokens"] or 0.0) / max(self._now_s - row.last_step_s, 1e-6)
        row.last_step_s = self._now_s
        is_last = row.step == row.num_steps
        if is_last:
            row.doing = "done"
        if self._display is None and (is_last or self._now_s - row.last_line_s >= _LINE_EVERY_S):
            row.last_line_s = self._now_s
            self._print_line(
                f"{self._now_s:7.1f} s  {pipeline}: step {row.step}/{row.num_steps}  "
                f"reward {row.reward:.3f}  {row.tokens_per_s:,.0f} tokens/s"
            )

    def _print_line(self, text: str) -> None:
        if self._display is not None:
            self._display.console.print(text, markup=False, highlight=False)
        elif not self._is_quiet:
            print(text, file=sys.stderr, flush=True)

    def tables(self) -> Table:
        from rich.table import Table

        pipelines = Table("pipeline", "step", "reward", "tokens/s", "doing", box=None, pad_edge=False)
        for name, row in self._rows.items():
            reward = "" if row.reward is None else f"{row.reward_first:.3f} → {row.reward:.3f}"
            step = f"{row.step}/{row.num_steps}" if row.num_steps else str(row.step)  # a client has no number of steps
            pipelines.add_row(name, step, reward, f"{row.tokens_per_s:,.0f}", row.doing)
        devices = Table("device", "held by", box=None, pad_edge=False)
        for device, holder in self._holder_by_device.items():
            devices.add_row(device + self._size.get(device.rpartition("-")[0], ""), holder)
        both = Table.grid(padding=(1, 0))
        now_s = self._now_s + time.monotonic() - self._reported_s
        both.add_row(f"policy {self._policy}, {now_s:.0f} s")
        both.add_row(pipelines)
        both.add_row(devices)
        return both


def _row(config: TrainingConfig) -> _PipelineRow:
    return _PipelineRow(
        num_steps=config.num_steps,
        num_updates=config.sft_warmup.num_updates,
        micro_batches_per_update=-(-config.sft_warmup.batch_size // config.algorithm.sequences_per_pass),
    )


def _words(action: RunStage) -> str:
    stage = action.stage.value.replace("_", " ")
    return f"{stage} {action.step}" if action.step else stage


def _fault_words(action: ReportPolicyFault) -> str:
    failed = f"policy {action.policy} failed in {action.method}"
    return f"{failed}, and the plain order of work stands in: {action.error}"


def _unequal(note: DeterminismNote) -> str:
    """Why a probe found less than `exact`, in brackets; empty where it found that."""
    unequal = [name for name, is_equal in note.checks.items() if not is_equal]
    return f" (other bits: {', '.join(unequal)})" if note.promise != DeterminismClass.EXACT else ""


def _measured(note: DeterminismNote) -> str:
    """What a version and a switch cost with a server of others; empty without one."""
    server = note.server
    if not server:
        return ""
    how = "takes" if server["reloads"] else "restarts it,"
    asleep = f", asleep it frees {server['freed_bytes'] / 1e9:.1f} GB" if server["frees_memory"] else ""
    return f"; {server['name']} {server['version']}: a version {how} {server['load_s']:.2f} s{asleep}"

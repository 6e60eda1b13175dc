"""Steps of a run for other people's trackers: W&B, MLflow, trackio. Of a run that is over, and while it goes on.

    rows of steps ── figures_of ─▶ {"reward/mean": ...} ── Tracker.add ─▶ its library ─▶ its own files, or its server
                        steps that the files have ◀── Tracker.known

The tracker's files are the only record of exported steps, so an interrupted export never duplicates one. An export is a
process beside the run that reads its log; its failure does not affect training. Only the chosen tracker's library is
imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlmux.config.tree import MlflowConfig, TrackersConfig, WandbConfig
from rlmux.core.errors import RlmuxError, UserError
from rlmux.log.folder_lock import living_owner
from rlmux.report.timeline.step_rows import StepRowsReader
from rlmux.runtime.launch import spec_of
from rlmux.runtime.records.metrics_writer import tag_of

TRACKERS = ("wandb", "mlflow", "trackio")
_PROJECT = "rlmux"
"""Name of trackio's project."""
_LOOK_EVERY_S = 2.0
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
"""Package to install, by tracker."""
_FOLDERS = {"wandb": "", "mlflow": "mlruns"}
"""Folder of a tracker's files within the run's, where it is written while the run goes on."""


class RunOrigin(NamedTuple):
    """Metadata of a pipeline for a tracker."""

    run_id: str
    """Id of the run, of its log's header."""
    created: str
    """Time at which the run was begun, RFC 3339."""
    pipeline: str
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The same for the same pipeline of the same run, in letters and digits."""
        return hashlib.sha256(f"{self.run_id} {self.pipeline}".encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"{self.pipeline}-{self.run_id[:6]}"

    def time_ms(self, at_s: float) -> int:
        """A second of the run's clock, in milliseconds since 1970."""
        return int((datetime.fromisoformat(self.created).timestamp() + at_s) * 1000)


class Tracker(Protocol):
    """One pipeline in a tracker's files."""

    def known(self) -> set[int]:
        """Steps that the files have, whole."""

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write steps that the files have not."""

    def close(self) -> None:
        """Nothing more comes for now."""


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a step by the names that its TensorBoard events have, with its seconds and those of its stages.

    `row`: of the table of steps. What does not exist is left out; what is not finite stays.
    """
    seconds = row["seconds"]
    tokens = row["metrics"].get("tokens")
    named = {
        **{tag_of(name): value for name, value in row["metrics"].items()},
        "perf/step_s": seconds,
        "perf/solo_s": row["solo_s"],
        "perf/slowdown": row["slowdown"],
        "perf/tokens_per_s": tokens / seconds if tokens is not None and seconds else None,
        "time/end_s": row["end_s"],
        **{f"time/{stage}_s": spent_s for stage, spent_s in row["stages"].items()},
    }
    return {name: float(value) for name, value in named.items() if value is not None}


def check_installed(to: str) -> None:
    """Raises UserError where the tracker's library is not here."""
    if find_spec(to) is None:
        raise UserError(f"--to {to}: it is not installed; accepted: pip install {_PACKAGES[to]}")


def tracker_of(to: str, out: str | None, origin: RunOrigin, options: TrackersConfig | None = None) -> Tracker:
    """`out`: where its files lie; None: where the tracker itself would put them. `options`: those of the file."""
    options = options or TrackersConfig()
    match to:
        case "wandb":
            return _Wandb(out, origin, options.wandb or WandbConfig())
        case "mlflow":
            return _Mlflow(out, origin, options.mlflow or MlflowConfig())
        case _:
            return _Trackio(out, origin)


def follow_run(folder: Path, to: str, out: str | None, name: str | None = None) -> int:
    """Write the steps of a run, of one pipeline or of all, as they come, until it is over; returns how many.

    Takes the project, the address and the mode from the run's file, where it names this tracker.
    """
    feeds: dict[str, tuple[Tracker, set[int]]] = {}
    num = 0
    with contextlib.closing(StepRowsReader(folder)) as reader, contextlib.ExitStack() as opened:
        has_file = "resolved" in (reader.header.get("spec") or {})
        written = spec_of(folder).trackers if has_file else TrackersConfig()
        if out is None:
            uri = getattr(getattr(written, to, None), "uri", None)
            out = uri or (None if to == "trackio" else str(folder / _FOLDERS[to]))
        while True:
            is_going_on = living_owner(folder) is not None  # before the log: nothing may come between the two
            for pipeline, rows in reader.read().items():
                if not rows or name not in (None, pipeline):
                    continue
                if pipeline not in feeds:
                    tracker = tracker_of(to, out, _origin_of(reader.header, pipeline), written)
                    opened.callback(tracker.close)
                    feeds[pipeline] = tracker, tracker.known()
                tracker, known = feeds[pipeline]
                new = [row for row in rows if row["step"] not in known]
                if new:
                    tracker.add(new)
                known.update(row["step"] for row in new)
                num += len(new)
            if reader.is_over or not is_going_on:
                return num
            time.sleep(_LOOK_EVERY_S)


def _origin_of(header: Mapping[str, Any], pipeline: str) -> RunOrigin:
    config = {"run_id": header["run_id"], "policy": header["policy"], "pipeline": pipeline}
    return RunOrigin(run_id=header["run_id"], created=header["created"], pipeline=pipeline, config=config)


@contextlib.contextmanager
def _one_line_errors(to: str) -> Iterator[None]:
    """An error of a tracker's library, of whatever kind, as one line."""
    try:
        yield
    except RlmuxError:
        raise
    except Exception as error:  # a library of others: its errors share no root
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RlmuxError(f"{to} failed, and what it has of the run stays as it is: {message}") from error


class _Wandb:
    """A run of W&B's, written in parts that are moved to their place when they are whole, where nothing is sent.

    part/wandb/offline-run-TIME-ID ── finished ─▶ OUT/wandb/offline-run-TIME-ID/rlmux.json lists its steps

    `wandb sync` sends the parts of one id in order, as one run. Online, W&B itself knows the steps that it has.
    """

    def __init__(self, out: str | None, origin: RunOrigin, options: WandbConfig) -> None:
        self._folder = Path(out or ".") / "wandb"
        self._part = self._folder / f"part-{origin.id}"
        self._origin = origin
        self._options = options
        self._run: Any = None
        self._steps: list[int] = []
        """Steps of the part that is being written."""

    def known(self) -> set[int]:
        if self._options.mode == "online":
            with _one_line_errors("wandb"):
                return set(range(self._begun().step))
        found: set[int] = set()
        for path in sorted(self._folder.glob(f"offline-run-*-{self._origin.id}/rlmux.json")):
            found.update(json.loads(path.read_text(encoding="utf-8"))["steps"])
        return found

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with _one_line_errors("wandb"):
            run = self._begun()
            for row in rows:
                run.log(figures_of(row), step=row["step"])
                self._steps.append(row["step"])

    def close(self) -> None:
        if self._run is None:
            return
        with _one_line_errors("wandb"):
            self._run.finish()
            self._run = None
            if self._options.mode == "offline":
                (made,) = (path for path in (self._part / "wandb").glob("offline-run-*") if not path.is_symlink())
                (made / "rlmux.json").write_text(json.dumps({"steps": self._steps}), encoding="utf-8")
                made.rename(self._folder / made.name)
            shutil.rmtree(self._part)

    def _begun(self) -> Any:
        """The run, begun where it is not."""
        if self._run is not None:
            return self._run
        import wandb

        shutil.rmtree(self._part, ignore_errors=True)  # of an export that was killed
        self._part.mkdir(parents=True)
        self._steps = []
        quiet = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off", silent=True)
        self._run = wandb.init(
            project=self._options.project,
            entity=self._options.entity,
            id=self._origin.id,
            name=self._origin.name,
            config=dict(self._origin.config),
            dir=self._part,
            mode=self._options.mode,
            resume="allow",
            reinit="create_new",  # one a pipeline, beside each other
            settings=quiet,
        )
        return self._run


class _Mlflow:
    """A run of the experiment, found by its tag. A number of a step that is there is not written again."""

    def __init__(self, out: str | None, origin: RunOrigin, options: MlflowConfig) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it, 3.17 takes no files
        with _one_line_errors("mlflow"):
            from mlflow.tracking import MlflowClient

            uri = out if out is not None and "://" in out else Path(out or "mlruns").absolute().as_uri()
            self._client = MlflowClient(tracking_uri=uri)
            self._origin = origin
            there = self._client.get_experiment_by_name(options.experiment)
            self._experiment = there.experiment_id if there else self._client.create_experiment(options.experiment)
            found = self._client.search_runs([self._experiment], f"tags.`rlmux.id` = '{origin.id}'")
            self._run = found[0] if found else None

    def known(self) -> set[int]:
        """Those that have the number that is written last."""
        with _one_line_errors("mlflow"):
            return self._steps_of("time/end_s")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with _one_line_errors("mlflow"):
            from mlflow.entities import Metric

            origin, client = self._origin, self._client
            if self._run is None:
                tags = {"mlflow.runName": origin.name, "rlmux.id": origin.id, "rlmux.pipeline": origin.pipeline}
                self._run = client.create_run(self._experiment, origin.time_ms(0.0), tags)
                for key, value in origin.config.items():
                    client.log_param(self._run.info.run_id, key, value)
            there: dict[str, set[int]] = {}
            for row in rows:
                figures = figures_of(row)
                for name in figures:
                    if name not in there:
                        there[name] = self._steps_of(name)
                names = sorted(figures, key=lambda name: name == "time/end_s")
                made = [
                    Metric(name, figures[name], origin.time_ms(row["end_s"]), row["step"])
                    for name in names
                    if row["step"] not in there[name]
                ]
                client.log_batch(self._run.info.run_id, made)

    def close(self) -> None:
        """Each number is there once it is written."""

    def _steps_of(self, name: str) -> set[int]:
        if self._run is None:
            return set()
        return {metric.step for metric in self._client.get_metric_history(self._run.info.run_id, name)}


class _Trackio:
    """A run of the project in trackio's own database, a row a step."""

    def __init__(self, out: str | None, origin: RunOrigin) -> None:
        if out is not None:
            os.environ["TRACKIO_DIR"] = str(Path(out).absolute())
        self._origin = origin

    def known(self) -> set[int]:
        with _one_line_errors("trackio"):
            from trackio.sqlite_storage import SQLiteStorage

            return {int(row["step"]) for row in SQLiteStorage.get_logs(_PROJECT, self._origin.name)}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with _one_line_errors("trackio"):
            import trackio

            quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            run = trackio.init(_PROJECT, self._origin.name, resume="allow", config=dict(self._origin.config), **quiet)
            for row in rows:
                finite = {name: value for name, value in figures_of(row).items() if math.isfinite(value)}
                run.log(finite, step=row["step"])
            trackio.finish()

    def close(self) -> None:
        """Each call of `add` finishes."""

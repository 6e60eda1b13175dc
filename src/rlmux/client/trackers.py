"""Steps of a run for other people's trackers, in their local forms: W&B offline, MLflow's files, trackio.

    rows of steps ── figures_of ─▶ {"reward/mean": ...} ── Tracker.add ─▶ its library ─▶ its own files
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlmux.core.errors import RlmuxError, UserError
from rlmux.runtime.records.metrics_writer import tag_of

TRACKERS = ("wandb", "mlflow", "trackio")
PROJECT = "rlmux"
"""Name of the project, or experiment, that runs are put into."""
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
"""Package to install, by tracker."""


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


def tracker_of(to: str, out: str | None, origin: RunOrigin) -> Tracker:
    """`out`: where its files lie; None: where the tracker itself would put them."""
    made: dict[str, Callable[[str | None, RunOrigin], Tracker]] = {
        "wandb": _Wandb,
        "mlflow": _Mlflow,
        "trackio": _Trackio,
    }
    return made[to](out, origin)


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
    """A folder of W&B's for each export, moved to its place when it is whole: `wandb sync` sends them in order.

    part/wandb/offline-run-TIME-ID ── finished ─▶ OUT/wandb/offline-run-TIME-ID/rlmux.json lists its steps
    """

    def __init__(self, out: str | None, origin: RunOrigin) -> None:
        self._folder = Path(out or ".") / "wandb"
        self._origin = origin

    def known(self) -> set[int]:
        found: set[int] = set()
        for path in sorted(self._folder.glob(f"offline-run-*-{self._origin.id}/rlmux.json")):
            found.update(json.loads(path.read_text(encoding="utf-8"))["steps"])
        return found

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with _one_line_errors("wandb"):
            import wandb

            origin = self._origin
            part = self._folder / f"part-{origin.id}"
            shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
            part.mkdir(parents=True)
            quiet = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off", silent=True)
            run = wandb.init(
                project=PROJECT,
                id=origin.id,
                name=origin.name,
                config=dict(origin.config),
                dir=part,
                mode="offline",
                resume="allow",  # `wandb sync` then sends the folders of one id in order, as one run
                settings=quiet,
            )
            for row in rows:
                run.log(figures_of(row), step=row["step"])
            run.finish()
            (made,) = (path for path in (part / "wandb").glob("offline-run-*") if not path.is_symlink())
            (made / "rlmux.json").write_text(json.dumps({"steps": [row["step"] for row in rows]}), encoding="utf-8")
            made.rename(self._folder / made.name)
            shutil.rmtree(part)


class _Mlflow:
    """A run of the experiment, found by its tag. A number of a step that is there is not written again."""

    def __init__(self, out: str | None, origin: RunOrigin) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it, 3.17 takes no files
        with _one_line_errors("mlflow"):
            from mlflow.tracking import MlflowClient

            uri = out if out is not None and "://" in out else Path(out or "mlruns").absolute().as_uri()
            self._client = MlflowClient(tracking_uri=uri)
            self._origin = origin
            experiment = self._client.get_experiment_by_name(PROJECT)
            self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
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

            return {int(row["step"]) for row in SQLiteStorage.get_logs(PROJECT, self._origin.name)}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with _one_line_errors("trackio"):
            import trackio

            quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            run = trackio.init(PROJECT, self._origin.name, resume="allow", config=dict(self._origin.config), **quiet)
            for row in rows:
                finite = {name: value for name, value in figures_of(row).items() if math.isfinite(value)}
                run.log(finite, step=row["step"])
            trackio.finish()

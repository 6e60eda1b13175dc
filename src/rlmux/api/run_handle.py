"""A run's folder as Python values, during the run and after it.

    open_run(DIR) ─▶ Run ─┬▶ summary, status()                              dictionaries, the keys of `--json`
                          ├▶ pipelines, steps, orders, devices, intervals   tables: rows, and .to_pandas()
                          └▶ resume()

Nothing is cached: each access reads the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rlmux.api.files import OnWarning, policy_and_costs, warn
from rlmux.config import Spec
from rlmux.core.errors import UserError

if TYPE_CHECKING:
    from rlmux.report.timeline.build import Timeline
    from rlmux.runtime.controller import Listener
    from rlmux.runtime.run import RunResult

Row = Mapping[str, Any]
Display = Callable[[Spec], "AbstractContextManager[Listener]"]
"""Makes what shows a run of the checked file while it goes on: a listener for the time of the run."""


class Table(Sequence[Row]):
    """Rows with the same keys each, in a fixed order; a value is a number, a text, a boolean or None."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Keys that a row lacks are None; keys that no column names are left out."""
        self.columns = tuple(columns)
        self._rows = [{column: row.get(column) for column in self.columns} for row in rows]

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"<Table of {len(self)} rows: {', '.join(self.columns)}>"

    def to_pandas(self) -> Any:
        """The same as a pandas DataFrame. Raises UserError where pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise UserError("pandas is not installed; install it with: pip install pandas") from None
        return pandas.DataFrame(self._rows, columns=list(self.columns))


@contextmanager
def followed(spec: Spec, listeners: Sequence[Listener], display: Display | None) -> Iterator[Sequence[Listener]]:
    """The listeners of a run of this file, that of its display included, which is closed at the end."""
    if display is None:
        yield listeners
        return
    with display(spec) as shown:
        yield [*listeners, shown]


class Run:
    """One run. Its folder may be written by another process at this moment."""

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError for a folder that holds no run."""
        from rlmux.runtime.records.folders import check_run

        self.folder = Path(folder)
        self.result: RunResult | None = None
        """How the training ended that this object was returned from, or that it resumed; None before."""
        check_run(self.folder)

    def __repr__(self) -> str:
        return f"<Run {self.folder}>"

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` has (docs/reference/report.md), as of now."""
        from rlmux.report.summary import summarize

        return summarize(self._timeline())

    @property
    def is_over(self) -> bool:
        """Whether every pipeline has ended."""
        return self._timeline().is_over

    def status(self) -> dict[str, Any]:
        """What `rlmux status --json` prints."""
        from rlmux.runtime.control.run_status import StatusReader

        reader = StatusReader(self.folder)
        try:
            return reader.read()
        finally:
            reader.close()

    @property
    def pipelines(self) -> Table:
        """A row a pipeline: the keys of `summary["pipelines"]`, and its name."""
        rows = [{"pipeline": name, **fields} for name, fields in self.summary["pipelines"].items()]
        return Table(tuple(rows[0]) if rows else ("pipeline",), rows)

    @property
    def steps(self) -> Table:
        """A row a published step, pipelines in the order of their submission.

        `end_s`: seconds of the run's clock; `seconds`: what the step took; `solo_s`: what it takes alone. Beside them
        the metrics of training (docs/reference/report.md), each as the first pipeline that has it names it.
        """
        from rlmux.report.summary import step_times

        timeline = self._timeline()
        rows = [
            {
                "pipeline": str(name),
                "step": step.step,
                "end_s": step.end_s,
                "seconds": step.seconds,
                "solo_s": step.solo_s,
                **timeline.pipelines[name].metrics.get(step.step, {}),
            }
            for name, steps in step_times(timeline).items()
            for step in steps
        ]
        first = ("pipeline", "step", "end_s", "seconds", "solo_s")
        return Table(tuple(dict.fromkeys([*first, *(key for row in rows for key in row)])), rows)

    @property
    def devices(self) -> Table:
        """A row a device: its pool, and its seconds of each kind."""
        rows = [{"device": name, **fields} for name, fields in self.summary["devices"].items()]
        return Table(tuple(rows[0]) if rows else ("device",), rows)

    @property
    def intervals(self) -> Table:
        """A row for each stretch of a device's time with one name; those of a device in the order of their start.

        `kind`: busy, switch, bubble or idle; `cause`: what ran, or what was waited for (docs/reference/report.md).
        """
        columns = ("device", "pool", "start_s", "end_s", "kind", "cause", "label", "pipeline", "step", "stage", "order")
        rows = (
            {
                "device": str(device.id),
                "pool": device.pool,
                "start_s": each.start_s,
                "end_s": each.end_s,
                "kind": str(each.kind),
                "cause": str(each.cause),
                "label": each.label,
                "pipeline": None if each.pipeline is None else str(each.pipeline),
                "step": each.step,
                "stage": None if each.stage is None else str(each.stage),
                "order": each.order,
            }
            for device in self._timeline().devices.values()
            for each in device.intervals
        )
        return Table(columns, rows)

    @property
    def orders(self) -> Table:
        """A row for each order that a worker was given, migrations too, in the order of their beginning."""
        columns = (
            "order", "pipeline", "step", "stage", "devices", "start_s", "end_s", "ending", "seconds", "switch",
            "switch_s", "tokens", "device_fraction", "weight_version", "is_migration", "is_redone",
        )  # fmt: skip
        timeline = self._timeline()
        rows = (
            {
                "order": each.id,
                "pipeline": str(each.pipeline),
                "step": each.step,
                "stage": str(each.stage),
                "devices": " ".join(str(device) for device in each.devices),
                "start_s": each.start_s,
                "end_s": min(each.end_s, timeline.end_s),
                "ending": str(each.ending),
                "seconds": each.seconds,
                "switch": str(each.switch),
                "switch_s": each.switch_s,
                "tokens": each.tokens,
                "device_fraction": each.device_fraction,
                "weight_version": each.weight_version,
                "is_migration": each.is_migration,
                "is_redone": each.is_redone,
            }
            for each in timeline.orders
        )
        return Table(columns, rows)

    def resume(
        self,
        *,
        retry: Sequence[str] = (),
        address: str | None = None,
        profile: str | Path | None = None,
        keep_open: bool = False,
        listeners: Sequence[Listener] = (),
        display: Display | None = None,
        on_warning: OnWarning = warn,
    ) -> Run:
        """Resume a stopped or killed run; `retry`: failed pipelines to resume.

        Other parameters as in `rlmux.run`. Raises UserError while a process runs it, and for names in `retry` that did
        not fail.
        """
        from rlmux.runtime import launch
        from rlmux.runtime.checks.preflight import complaints_about
        from rlmux.runtime.run import RunOptions

        spec = launch.spec_of(self.folder)
        policy, add_costs = policy_and_costs(spec, profile, on_warning)
        with followed(spec, listeners, display) as listening:
            self.result = launch.resume_run(
                spec,
                self.folder,
                policy=policy,
                add_costs=add_costs,
                options=RunOptions(listeners=listening, is_kept_open=keep_open),
                address=address,
                retry=retry,
                check_training=complaints_about,
            )
        return self

    def _timeline(self) -> Timeline:
        from rlmux.report.reports import read_timeline

        return read_timeline(self.folder)


def open_run(folder: str | Path) -> Run:
    """The run in this folder. Raises UserError, with folders that hold one, where this does not."""
    return Run(folder)

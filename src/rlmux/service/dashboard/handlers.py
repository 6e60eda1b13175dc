"""Handlers of /api/v1 that read indexes: one reader, and so one snapshot, per request.

lanes  lanes/L  devices  events     pipelines  pipelines/L/NAME  steps  metrics  logs
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query, Response

from rlmux.core.errors import LogError, UserError
from rlmux.log.folder_lock import living_owner
from rlmux.log.run_log import LOG_NAME, other_version
from rlmux.log.segments import last_seq_of
from rlmux.report.acknowledgements import acknowledge, with_acknowledged
from rlmux.report.alerts import Alert
from rlmux.report.reports import PAGE_NAME, SUMMARY_NAME, load_summary
from rlmux.report.samples import SAMPLES_NAME
from rlmux.report.timeline.records import is_removed
from rlmux.runtime.records.folders import DRAINING
from rlmux.runtime.weights.checkpoints import CheckpointStore
from rlmux.service.dashboard.auth.access import ANONYMOUS, SERVER, Principal
from rlmux.service.dashboard.auth.visibility import Sight
from rlmux.service.dashboard.labels import NONE, labels_of
from rlmux.service.dashboard.parameters import Caller, CallerContext, Cursor, Filters, Limit, Line, Words, words_of
from rlmux.service.dashboard.schemas import run_schemas
from rlmux.service.index.lanes import Root, log_signature
from rlmux.service.index.selection import SORTS, in_order, most_frequent
from rlmux.service.index.store import IndexReader
from rlmux.service.problems import ProblemError

LOG_FILE = "workers.log"
MAX_LOG_BYTES = 256 << 10
"""Largest part of a log in one response, in bytes."""
MAX_SEARCHED_BYTES = 16 << 20
"""Largest part of a log that one request searches, in bytes."""
_SORTS_HELP = f"{', '.join(SORTS)}; with '-' in front, the largest first; active: what runs, then the newest"
Sort = Annotated[str, Query(pattern=f"^(-?({'|'.join(SORTS)})|active)$", description=_SORTS_HELP)]
SHOWN_ONLY = "one that you are shown"
"""Accepted values in the error for a hidden pipeline, the same as for an unknown one."""
_ADVICE = "Look at the lane's NAME.log and its controller's process; a stopped one goes on with kill -CONT."
_BANNER = "the indexer has ended; pages are as of row {seq}"

_SHAPES: Mapping[str, type[run_schemas.NewLane] | type[run_schemas.OtherLane]] = {
    "unknown": run_schemas.NewLane,
    "other_version": run_schemas.OtherLane,
}
"""Of lanes that are not shown in full, by their state."""
NOT_SHOWN_STATES = frozenset(_SHAPES)

Trouble = Callable[[Path], str | None]
"""Problem of a lane's index, in one sentence; None without a problem."""


class Reads:
    """The handlers."""

    def __init__(self, root: Root, trouble: Trouble, down: Trouble = lambda folder: None) -> None:
        """`down`: a controller's problem that needs an operator; also part of `trouble`."""
        self._root = root
        self._trouble = trouble
        self._down = down

    # ------------------------------------------------------------------ lanes

    def open(self, lane: str, principal: Principal | None) -> IndexReader:
        """A reader of the caller's visible part of the lane's index, the only access to a lane's pages.

        Raises ProblemError for an unknown lane, or one without an index.
        """
        folder, index = self.folders(lane)
        if (words := other_version(folder)) is not None:
            raise ProblemError(409, f"{lane}: {words}")
        with contextlib.suppress(LogError):  # it is being built
            reader = IndexReader(index)
            if "lane" in reader.facts:  # else it is empty and being filled
                reader.facts = {**reader.facts, "alerts": [*self.lane_alerts(lane), *reader.facts.get("alerts", ())]}
                if principal is None or not principal.sees_all:
                    _sight(principal, reader).conceal(reader)
                return reader
            reader.__exit__()
        raise ProblemError(503, self._trouble(folder) or f"the index of {lane} is being made; ask again")

    def down(self, lane: str) -> str | None:
        """The controller's problem that needs an operator, in one sentence; None without one."""
        return self._down(self.folders(lane)[0])

    def lane_alerts(self, lane: str) -> list[dict[str, Any]]:
        """Alerts outside the log, about the lane's controller."""
        down = self.down(lane)
        if down is None:
            return []
        alert = Alert(rule="lane_down", level="critical", pipeline=None, step=None, text=down, advice=_ADVICE)
        return [alert.to_json()]

    def sight(self, lane: str, principal: Principal | None) -> Sight:
        """The caller's visibility filter of the lane, for data outside the index."""
        if principal is not None and principal.sees_all:
            return Sight(principal, ())
        with self.open(lane, SERVER) as reader:
            return _sight(principal, reader)

    def mask(self, caller: CallerContext, value: Any) -> Any:
        """A response without hidden names; the last check before it is sent.

        The lane comes from the JSON or the path. A lane without an index has nothing to hide.
        """
        if caller.principal is None or caller.principal.sees_all:
            return value
        principal = caller.principal
        sights: dict[str, Sight | None] = {}

        def masked(lane: str, value: Any) -> Any:
            if lane not in sights:
                sights[lane] = None
                with contextlib.suppress(ProblemError):
                    sights[lane] = self.sight(lane, principal)
            sight = sights[lane]
            return value if sight is None else sight.mask(value)

        def masked_by_its_lane(value: Any) -> Any:
            if isinstance(value, dict) and isinstance(value.get("items"), list):
                return {**value, "items": [masked_by_its_lane(item) for item in value["items"]]}
            is_of_lane = isinstance(value, dict) and isinstance(value.get("lane"), str)
            return masked(value["lane"], value) if is_of_lane else value

        lane = caller.path.get("lane")
        return masked_by_its_lane(value) if lane is None else masked(lane, value)

    def check_visible(self, caller: CallerContext, scope: str | None) -> None:
        """Raises ProblemError if the caller may not see the path's pipeline, or not with this scope."""
        if caller.principal is None or (
            caller.principal.sees_all and (scope != "samples" or caller.principal.may("admin"))
        ):
            return
        lane, name = caller.path.get("lane"), caller.path.get("name")
        if lane is None or name is None:
            return
        with self.open(lane, SERVER) as reader:
            sight = _sight(caller.principal, reader)
        if sight.hides(name):
            raise ProblemError(404, f"no pipeline {name[:80]!r}", accepted=SHOWN_ONLY)
        if scope == "samples" and not sight.is_close(name):
            raise ProblemError(403, f"{name} is of another project", accepted="a pipeline of a project of your own")

    def folders(self, lane: str) -> tuple[Path, Path]:
        lanes = self._root.lanes()
        if lane not in lanes:
            raise ProblemError(404, f"no lane {lane[:80]!r}", accepted=", ".join(list(lanes)[:20]) or "none yet")
        return lanes[lane]

    def is_of_service(self, folder: Path) -> bool:
        """Whether the service runs this lane, or serves this folder alone."""
        return self._root.takes_submissions(folder) or folder == self._root.folder

    def files_beside(self, folder: Path) -> list[Path]:
        """Files of a service's lane that lie beside its folder."""
        return self._root.files_beside(folder)

    def run_folder(self, lane: str) -> Path:
        """The folder of a started lane."""
        folder, _ = self.folders(lane)
        if not (folder / LOG_NAME).is_file():
            raise ProblemError(503, self._trouble(folder) or f"the log of {lane} is being made; ask again")
        return folder

    def names(self) -> list[str]:
        return list(self._root.lanes())

    def lanes(self, caller: Caller) -> run_schemas.Lanes:
        rows = [self.lane_row(name, caller.principal) for name in self.names()]
        return run_schemas.Lanes.model_validate({"items": rows, "as_of_seq": None})

    def lane(self, caller: Caller, lane: str) -> run_schemas.Lane | run_schemas.NewLane | run_schemas.OtherLane:
        row = self.lane_row(lane, caller.principal)
        return _SHAPES.get(row["state"], run_schemas.Lane).model_validate(row)

    def lane_row(self, lane: str, principal: Principal | None) -> dict[str, Any]:
        """The row of one lane; only a banner if it has no index, and what is kept if its log cannot be read."""
        folder, _ = self.folders(lane)
        if (words := other_version(folder)) is not None:
            return _other_lane(lane, folder, words, sees_all=principal is not None and principal.sees_all)
        more = {"takes_submissions": self._root.takes_submissions(folder)}
        try:
            with self.open(lane, principal) as reader:
                return {**self._lane_of(lane, reader), "banner": self._trouble(folder), **more}
        except ProblemError as problem:
            return {"name": lane, "state": "unknown", "banner": problem.detail, "is_indexing": True, **more}

    def summary(self, caller: Caller, lane: str) -> Response:
        """The summary.json that lies in the lane's folder."""
        return self._download(caller, lane, SUMMARY_NAME, "application/json")

    def page(self, caller: Caller, lane: str) -> Response:
        """The timeline.html that lies there, to be saved: its scripts do not run at this address."""
        return self._download(caller, lane, PAGE_NAME, "text/html")

    def _download(self, caller: CallerContext, lane: str, name: str, media_type: str) -> Response:
        folder, _ = self.folders(lane)
        if caller.principal is None or not caller.principal.sees_all:
            raise ProblemError(403, f"{name} names every pipeline", accepted="a user who sees all")
        try:
            content = (folder / name).read_bytes()
        except OSError:
            raise ProblemError(404, f"no {name} in {lane[:80]!r}", accepted="a run with a report") from None
        headers = {
            "Content-Disposition": f'attachment; filename="{name}"',
            "Content-Security-Policy": "sandbox",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(content, media_type=media_type, headers=headers)

    def _lane_of(self, lane: str, reader: IndexReader) -> dict[str, Any]:
        facts, (folder, _) = reader.facts, self.folders(lane)
        is_behind = facts.get("signature") != log_signature(folder)
        shown = dict(facts["lane"])
        is_alive = living_owner(folder) is not None
        return {
            "name": lane,
            "state": self._state_of(folder, facts, is_alive=is_alive),
            "is_going_on": is_alive,
            "seq": max(reader.seq, facts.get("log_seq", 0), _last_seq(folder) if is_behind else 0),
            "index_seq": reader.seq,
            "rev": facts["rev"],
            "index_lag_s": _age_s(folder) if is_behind else 0.0,
            "is_indexing": is_behind,
            **shown,
        }

    def _state_of(self, folder: Path, facts: Mapping[str, Any], *, is_alive: bool) -> str:
        """`resuming`: its process has begun and the index has no row of it yet, or its service starts it again."""
        is_down = self._down(folder) is not None
        if is_alive:
            return "not_answering" if is_down else "running" if facts["is_going_on"] else "resuming"
        if self._root.takes_submissions(folder) and not is_down and not (folder.parent / DRAINING).is_file():
            return "resuming"
        return "over" if facts["lane"]["is_over"] else "stopped"

    def health(self, caller: Caller) -> run_schemas.Health:
        if caller.principal is None:
            return run_schemas.Health(ok=True)
        rows = (self.lane_row(name, caller.principal) for name in self.names())
        lanes = {
            row["name"]: run_schemas.LaneHealth(
                up=row["state"] == "running",
                seq=row.get("seq"),
                index_seq=row.get("index_seq"),
                lag_s=row.get("index_lag_s"),
            )
            for row in rows
        }
        return run_schemas.Health(ok=True, lanes=lanes)

    def devices(self, caller: Caller, lane: str) -> run_schemas.Listed[run_schemas.Device]:
        with self.open(lane, caller.principal) as reader:
            rows = reader.rows("SELECT json FROM device ORDER BY place")
            items = [run_schemas.Device.model_validate_json(text) for (text,) in rows]
            return run_schemas.Listed[run_schemas.Device](items=items, as_of_seq=reader.seq)

    def alerts(self, caller: Caller, lane: str) -> run_schemas.Listed[run_schemas.Alert]:
        with self.open(lane, caller.principal) as reader:
            items = with_acknowledged(self.folders(lane)[0], reader.facts["alerts"])
            return run_schemas.Listed[run_schemas.Alert].model_validate({"items": items, "as_of_seq": reader.seq})

    def acknowledge(self, caller: Caller, lane: str, body: run_schemas.Acknowledge) -> run_schemas.AlertsSeen:
        """Acknowledge a rule's alerts and return them."""
        with self.open(lane, caller.principal) as reader:
            alerts = reader.facts["alerts"]
        by = caller.principal.user if caller.principal else ""
        try:
            items = acknowledge(self.folders(lane)[0], alerts, rule=body.rule, pipeline=body.pipeline, by=by)
        except UserError as error:
            raise ProblemError(409, str(error)) from None
        return run_schemas.AlertsSeen.model_validate({"items": items})

    def events(
        self, caller: Caller, lane: str, limit: Limit = 100, migrations: bool = True
    ) -> run_schemas.Listed[run_schemas.Happening]:
        with self.open(lane, caller.principal) as reader:
            only = "" if migrations else "WHERE json_extract(json, '$.what') NOT LIKE '% migration'"
            rows = reader.rows(f"SELECT json FROM instant {only} ORDER BY number DESC LIMIT ?", limit)
            items = [run_schemas.Happening.model_validate_json(text) for (text,) in rows]
            return run_schemas.Listed[run_schemas.Happening](items=items, as_of_seq=reader.seq)

    # ------------------------------------------------------------------ pipelines

    def pipelines(
        self,
        caller: Caller,
        filters: Filters,
        sort: Sort = "",
        removed: bool = False,
        limit: Limit = 100,
        cursor: Cursor = 0,
        facets: bool = False,
    ) -> run_schemas.Pipelines:
        """`removed`: those whose files are all removed too. `facets`: with the values of each filter, and counts."""
        selection, rows, seqs = filters.selection(), [], []
        for lane, reader in self.readers(filters.lane, caller.principal):
            seqs.append(reader.seq)
            rows += self.rows_of(lane, reader)
        left = rows if removed else [row for row in rows if not is_removed(row.get("removed"))]
        matching, counts = selection.select(left)
        end = cursor + limit
        shown = [run_schemas.Pipeline.model_validate(row) for row in in_order(matching, sort)[cursor:end]]
        values = {
            each: [run_schemas.FilterValue(value=value, pipelines=num) for value, num in most_frequent(found)]
            for each, found in counts.items()
        }
        return run_schemas.Pipelines(
            items=shown,
            next=str(end) if end < len(matching) else None,
            total=len(matching),
            num_removed=len(rows) - len(left),
            as_of_seq=seqs[0] if len(seqs) == 1 else None,
            **({"facets": values} if facets else {}),
        )

    def readers(self, lane: str | None, principal: Principal | None) -> Iterator[tuple[str, IndexReader]]:
        """(name, reader) of a lane, or of every lane with an index. Raises ProblemError for a lane without one."""
        for name in self.names() if lane is None else [lane]:
            try:
                reader = self.open(name, principal)
            except ProblemError:
                if lane is not None:
                    raise
                continue
            with reader:
                yield name, reader

    def rows_of(self, lane: str, reader: IndexReader) -> list[dict[str, Any]]:
        """Every row of a lane, in log order."""
        return self.labelled(lane, [text for (text,) in reader.rows("SELECT json FROM pipeline ORDER BY place")])

    def labelled(self, lane: str, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Rows of the index as the lists and the stream have them: with their lane and labels."""
        if not texts:  # most looks of a stream: no file is read for them
            return []
        labels = labels_of(self.folders(lane)[0])
        rows = map(json.loads, texts)
        return [{"lane": lane, **row, "labels": labels.get(row["name"], NONE)["labels"]} for row in rows]

    def pipeline(self, caller: Caller, lane: str, name: str) -> run_schemas.Detail:
        with self.open(lane, caller.principal) as reader:
            row, detail = self.check_pipeline(reader, name)
            stages: dict[str, float] = {}
            for (text,) in reader.rows("SELECT json FROM step WHERE pipeline = ? AND json IS NOT NULL", name):
                for stage, spent_s in json.loads(text)["stages"].items():
                    stages[stage] = stages.get(stage, 0.0) + spent_s
            return run_schemas.Detail.model_validate(
                {
                    "lane": lane,
                    **row,
                    **detail,
                    **labels_of(self.folders(lane)[0]).get(name, NONE),
                    "seconds": stages,
                    "has_log": (self.folders(lane)[0] / name / LOG_FILE).is_file(),
                    "has_samples": (self.folders(lane)[0] / name / SAMPLES_NAME).is_file(),
                    "spec": reader.facts.get("spec"),
                    "as_of_seq": reader.seq,
                }
            )

    def check_pipeline(self, reader: IndexReader, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        found = reader.rows("SELECT json, detail FROM pipeline WHERE name = ?", name)
        if not found:
            accepted = ", ".join(reader.facts["pipelines"][:20]) if reader.is_whole else SHOWN_ONLY
            raise ProblemError(404, f"no pipeline {name[:80]!r}", accepted=accepted)
        return json.loads(found[0][0]), json.loads(found[0][1])

    def steps(
        self,
        caller: Caller,
        lane: str,
        name: str,
        first: Annotated[int, Query(alias="from", ge=0, le=2**31)] = 0,
        last: Annotated[int, Query(alias="to", ge=0, le=2**31)] = 2**31,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
        cursor: Cursor = 0,
    ) -> run_schemas.Page[run_schemas.Step]:
        with self.open(lane, caller.principal) as reader:
            self.check_pipeline(reader, name)
            found = reader.rows(
                "SELECT step, json FROM step WHERE pipeline = ? AND step BETWEEN ? AND ? AND json IS NOT NULL "
                "ORDER BY step LIMIT ?",
                name,
                max(first, cursor),
                last,
                limit + 1,
            )
            return run_schemas.Page[run_schemas.Step](
                items=[run_schemas.Step.model_validate_json(text) for _, text in found[:limit]],
                next=str(found[limit][0]) if len(found) > limit else None,
                as_of_seq=reader.seq,
            )

    def checkpoints(self, caller: Caller, lane: str, name: str) -> run_schemas.Checkpoints:
        """Kept checkpoints, oldest first, with the folder that they lie in on this machine."""
        folder = self.folder_of(caller).absolute()
        store = CheckpointStore(folder)
        items = []
        for step in store.steps():
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                size = sum(file.stat().st_size for file in store.path(step).rglob("*") if file.is_file())
                items.append(run_schemas.Checkpoint(step=step, path=str(store.path(step)), size_bytes=size))
        return run_schemas.Checkpoints(run=str(folder.parent), items=items)

    def metrics(
        self,
        caller: Caller,
        lane: str,
        name: str,
        names: Words = "",
        x: Literal["step", "time_s"] = "step",
        points: Annotated[int | None, Query(ge=2, le=4000)] = None,
    ) -> run_schemas.Metrics:
        with self.open(lane, caller.principal) as reader:
            _, detail = self.check_pipeline(reader, name)
            found = reader.rows("SELECT json FROM step WHERE pipeline = ? AND json IS NOT NULL ORDER BY step", name)
            as_of_seq = reader.seq
        steps = [json.loads(text) for (text,) in found]
        wanted = words_of(names) or detail["metrics"]
        unknown = [metric for metric in wanted if metric not in detail["metrics"]]
        if unknown:
            raise ProblemError(
                400, f"no metric {unknown[0][:80]!r}", where="?names", accepted=", ".join(detail["metrics"])
            )
        places = [float(step["step" if x == "step" else "end_s"]) for step in steps]
        series = {metric: curve(places, [step["metrics"].get(metric) for step in steps], points) for metric in wanted}
        return run_schemas.Metrics(x=x, names=wanted, series=series, steps=len(steps), as_of_seq=as_of_seq)

    def logs(
        self,
        caller: Caller,
        lane: str,
        name: str,
        offset: Annotated[int, Query(ge=-(2**53), le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_SEARCHED_BYTES)] = 65536,
        grep: Line = None,
    ) -> run_schemas.Log:
        path = self.folder_of(caller) / LOG_FILE
        limit = min(limit, MAX_SEARCHED_BYTES if grep else MAX_LOG_BYTES)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                offset = min(size, offset if offset >= 0 else max(0, size + offset))
                file.seek(offset)
                data = file.read(limit)
        except OSError:
            raise ProblemError(404, f"{name} has no {LOG_FILE}", accepted="a pipeline whose workers wrote") from None
        end = data.rfind(b"\n") + 1 if offset + len(data) < size else len(data)
        data = data[: end or len(data)]
        text, skipped = (data, 0) if not grep else _newest_with(grep.encode(), data)
        return run_schemas.Log(
            offset=offset + skipped,
            next_offset=offset + len(data),
            size=size,
            text=text.decode("utf-8", "replace"),
            is_end=offset + len(data) >= size,
        )

    def folder_of(self, caller: CallerContext) -> Path:
        """The folder of the path's pipeline. The name is in the log, so a caller cannot forge a file path."""
        lane, name = caller.path["lane"], caller.path["name"]
        with self.open(lane, caller.principal) as reader:
            self.check_pipeline(reader, name)
        return self.folders(lane)[0] / name


def _sight(principal: Principal | None, whole: IndexReader) -> Sight:
    rows = whole.rows("SELECT json FROM pipeline ORDER BY place")
    return Sight(principal or ANONYMOUS, (json.loads(text) for (text,) in rows))


def curve(x: Sequence[float], y: Sequence[float | None], points: int | None) -> run_schemas.Curve:
    """A curve of at most `points` points, each with mean, minimum and maximum of consecutive steps.

    `points`: None for all steps. No step is skipped.
    """
    if points is None or len(x) <= points:
        return run_schemas.Curve(x=list(x), y=list(y))
    size = -(-len(x) // points)
    shown: Mapping[str, list[float | None]] = {"x": [], "y": [], "min": [], "max": []}
    for at in range(0, len(x), size):
        values = [value for value in y[at : at + size] if value is not None]
        shown["x"].append(x[min(at + size, len(x)) - 1])
        shown["y"].append(math.fsum(values) / len(values) if values else None)
        shown["min"].append(min(values, default=None))
        shown["max"].append(max(values, default=None))
    return run_schemas.Curve(**shown)


def _last_seq(folder: Path) -> int:
    """Last row of the lane's log; 0 for a log that cannot be read."""
    with contextlib.suppress(LogError):
        return last_seq_of(folder / LOG_NAME)
    return 0


def _age_s(folder: Path) -> float:
    """Seconds since the log last changed."""
    times = [path.stat().st_mtime for path in folder.glob("run.db*") if path.is_file()]
    return max(0.0, time.time() - max(times, default=time.time()))


def _newest_with(words: bytes, data: bytes) -> tuple[bytes, int]:
    """(lines with the words, only the newest if too many; bytes of `data` before the first one)."""
    found: list[bytes] = []
    room, end = MAX_LOG_BYTES, len(data)
    while end > 0 and (at := data.rfind(words, 0, end)) >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        stop = data.find(b"\n", at) + 1 or len(data)
        room -= stop - start
        if room < 0 and found:
            return b"".join(reversed(found)), stop
        found.append(data[start:stop])
        end = start
    return b"".join(reversed(found)), 0


def _other_lane(lane: str, folder: Path, words: str, *, sees_all: bool) -> dict[str, Any]:
    """The row of a lane of another version. Its summary is taken as far as it has the figures of today."""
    return {
        "name": lane,
        "state": "other_version",
        "banner": words,
        "is_indexing": False,
        "takes_submissions": False,
        "kept": _kept_figures(folder) if sees_all else None,
        "files": [name for name in (PAGE_NAME, SUMMARY_NAME) if sees_all and (folder / name).is_file()],
    }


def _kept_figures(folder: Path) -> dict[str, Any] | None:
    try:
        summary = load_summary(folder)
        pipelines = [
            run_schemas.KeptPipeline(
                name=name, **{key: row.get(key) for key in ("status", "steps", "reward_first", "reward_last")}
            )
            for name, row in summary["pipelines"].items()
        ]
        return run_schemas.KeptFigures(makespan_s=summary.get("makespan_s"), pipelines=pipelines).model_dump()
    except (LogError, OSError, ValueError, KeyError, TypeError, AttributeError):  # of a version that wrote others
        return None

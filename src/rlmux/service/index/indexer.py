"""Brings indexes up to date with their logs, in a process of its own.

    run.db ──rows after the last──▶ Follower ──look──▶ index.db          one lane: LaneIndexer
    lanes of a folder, by turns ──▶ each problem as a line of JSON on stdout         all: `main`

The process ends when its standard input is closed: with the server that started it, however that one ends. A pass over
a lane is followed by a pause of nine times its length, three seconds at most. The fold of a log is kept in its index
from time to time and at the end, so the next process resumes there (kept_fold.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlmux.config.load import values_of_pipelines
from rlmux.core.errors import LogError
from rlmux.core.model import PipelineId
from rlmux.log.folder_lock import living_owner
from rlmux.log.notes import AccountsNote, Note, PlanNote, SubmittedNote, encode
from rlmux.log.run_log import LOG_NAME, Entry, LogReader, other_version
from rlmux.log.segments import last_seq_of
from rlmux.report.alerts import Alerts, disk_alert
from rlmux.report.timeline.history import without_collector
from rlmux.report.timeline.live_timeline import Follower, Look
from rlmux.report.timeline.step_rows import BARE, step_row
from rlmux.report.weight_sums import StepSums
from rlmux.service.index import interval_rows
from rlmux.service.index.columns import Places
from rlmux.service.index.kept_fold import KeptFold
from rlmux.service.index.lanes import Root, log_signature
from rlmux.service.index.store import IndexReader, IndexWriter, dumps

_LOOK_EVERY_S = 0.3
_PAUSE_PER_SECOND, _LONGEST_PAUSE_S = 9.0, 3.0
_KEEP_EVERY_S, _KEEP_PER_SECOND = 30.0, 20.0
"""Least seconds between two keeps of a fold, and at least so many times as long as the last keep took."""
_SCAN_EVERY_S = 10.0
_SHOWN_AFTER_S, _SHOWN_GROWTH = 0.4, 3.0
"""Seconds of reading after which a part is shown; the next after so many times as long as all before it."""
_PART = "part of the log"
"""The signature of an index that has not all of its log."""
_FORGET_S = 60.0
"""Seconds without a new row after which what was read of a run that does not go on is forgotten."""


class LaneIndexer:
    """The index of one run folder."""

    def __init__(self, folder: Path, index: Path) -> None:
        """Raises LogError for a log that cannot be read."""
        self._folder = folder
        self._log = LogReader(folder)
        self._follower = Follower(self._log.header)
        self._index = IndexWriter(index, str(self._log.header.get("run_id")))
        self._places = Places(self._index.fact("devices") or (), self._index.fact("pipelines") or ())
        self._alerts = Alerts()
        self._is_first = True
        self._seq = 0
        self._is_going_on = False
        self._num_pins = 0
        self._open_pins: list[int] = []
        """Numbers of the pins that had no end at the last look."""
        self._sums = StepSums()
        self._plans: dict[str, str] = {}
        """Hash of each pipeline's plan."""
        self._configs = values_of_pipelines((self._log.header.get("spec") or {}).get("resolved") or "")
        self._accounts: dict[str, Any] | None = None
        """Fields of the last note `accounts`."""
        self._known: dict[str, dict[str, str]] = {"device": {}, "pipeline": {}}
        """JSON of the rows as they were last written, by table and name."""
        self._kept_seq = 0
        """Row of the log whose fold is kept."""
        self._keep_due_s = 0.0
        self._shown_seq = 0
        """Row of the log that the index had before its fold was resumed."""
        self._num_kept_chunks: int | None = None
        """Chunks that belong to the resumed fold, until the first look after it."""
        self._resume()

    def close(self) -> None:
        """Keep the fold, and close both files."""
        try:
            with contextlib.suppress(sqlite3.Error):  # a full disk: the next process reads from an earlier row
                self._keep()
        finally:
            self._log.close()
            self._index.close()

    def _resume(self) -> None:
        """Continue from the kept fold, where it is of this code and of this log."""
        data = self._index.kept_fold()
        if data is None:
            return
        try:
            kept = KeptFold.loads(data)
        except LogError:
            kept = None
        if kept is None or kept.row_checksum != self._log.row_checksum(kept.seq):
            self._index.drop_fold()
            return
        self._follower, self._alerts, self._sums = kept.follower, kept.alerts, kept.sums
        self._plans, self._configs, self._accounts = kept.plans, kept.configs, kept.accounts
        self._num_pins, self._open_pins = kept.num_pins, kept.open_pins
        self._seq = self._kept_seq = kept.seq
        self._shown_seq = int(self._index.fact("seq") or 0)
        self._num_kept_chunks, self._is_first = kept.num_chunks, False
        self._keep_due_s = time.monotonic() + _KEEP_EVERY_S

    def _keep(self) -> None:
        """Keep the fold of the last look, if rows came since the last keep."""
        is_shown = not self._is_first and self._num_kept_chunks is None
        if not is_shown or self._seq == self._kept_seq or (checksum := self._log.row_checksum(self._seq)) is None:
            return
        kept = KeptFold(
            seq=self._seq, row_checksum=checksum, num_chunks=self._index.num_chunks, follower=self._follower,
            alerts=self._alerts, sums=self._sums, plans=self._plans, configs=self._configs, accounts=self._accounts,
            num_pins=self._num_pins, open_pins=self._open_pins,
        )  # fmt: skip
        data = kept.dumps()
        if data is not None:
            self._index.keep_fold(data)
            self._kept_seq = self._seq

    def _keep_if_due(self) -> None:
        begun_s = time.monotonic()
        if begun_s >= self._keep_due_s:
            self._keep()
            took_s = time.monotonic() - begun_s
            self._keep_due_s = begun_s + max(_KEEP_EVERY_S, _KEEP_PER_SECOND * took_s)

    def catch_up(self) -> bool:
        """Take in the log's new rows; returns whether there were any. Where that takes long, a part is shown before."""
        signature = log_signature(self._folder)
        is_going_on = living_owner(self._folder) is not None
        before, last_seq = self._seq, last_seq_of(self._folder / LOG_NAME)
        with without_collector():
            for _ in self._take_in():
                if self._seq >= self._shown_seq:
                    self._show(_PART, last_seq)
        is_shown = not self._is_first and self._num_kept_chunks is None
        if self._seq == before and is_going_on == self._is_going_on and is_shown:
            if signature != self._index.fact("signature"):  # rows of it were read before they had changed it
                with self._index.transaction():
                    self._index.set_facts(signature=signature)
            return False
        self._is_going_on = is_going_on
        self._show(signature, max(last_seq, self._seq))
        self._keep_if_due()
        return True

    def _take_in(self) -> Iterator[None]:
        """Follow the new rows. Yields, ever more rarely, between two moments of the log."""
        begun_s = time.monotonic()
        due_s = begun_s + _SHOWN_AFTER_S
        for part in self._log.parts(after=self._seq, bare=BARE):
            is_moment = isinstance(part, Entry) and part.time_s > self._follower.history.last_s
            if is_moment and time.monotonic() > due_s:
                yield
                due_s = time.monotonic() + _SHOWN_GROWTH * (time.monotonic() - begun_s)
            self._follower.add(part)
            self._seq = max(self._seq, part.seq)
            if isinstance(part, Entry) and part.kind == "note":
                self._add_note(part.note)

    def _show(self, signature: str, last_seq: int) -> None:
        look = self._follower.look()
        with self._index.transaction():
            self._write(look, signature)
            self._index.set_facts(log_seq=last_seq)
        self._is_first, self._num_kept_chunks = False, None

    def _add_note(self, note: Note | None) -> None:
        match note:
            case PlanNote():
                self._plans[note.pipeline] = note.plan_sha256
            case SubmittedNote():
                self._configs |= values_of_pipelines(note.resolved)
            case AccountsNote():
                self._accounts = encode(note)
        found = self._sums.add(note)
        if found is not None:
            self._follower.steps.touch(found.pipeline, found.step)

    def _write(self, look: Look, signature: str) -> None:
        was_closed = self._index.fact("open_from_s") is None and self._index.fact("seq")
        if look.is_redone or self._is_first:
            self._num_pins, self._open_pins = 0, []
            self._index.restart(with_rows=self._is_first)
            self._kept_seq, self._keep_due_s = 0, 0.0
        elif was_closed:
            self._index.set_facts(rev=self._index.fact("rev") + 1)  # settled intervals change
        if self._num_kept_chunks is not None:
            self._index.drop_chunks_after(self._num_kept_chunks)
        for name in self._follower.history.pipelines:  # the log's order, whatever had been read at the first look
            self._places.pipeline(name)
        for device in dict.fromkeys(device for device, _ in [*look.settled, *look.open]):
            self._places.device(device)
        settled = self._places.columns(sorted(look.settled, key=lambda entry: entry[1].start_s), is_final=True)
        is_final = not self._is_going_on and self._follower.history.is_over
        opened = self._places.columns(look.open, is_final=is_final)
        self._index.add_settled(settled)
        self._index.set_open(opened)
        settled_s = float(opened["start_s"].min()) if len(opened) else look.end_s
        self._write_rows(look)
        self._index.set_facts(
            seq=self._seq,
            signature=signature,
            is_going_on=self._is_going_on,
            start_s=look.start_s,
            end_s=look.end_s,
            open_from_s=None if is_final else settled_s,
            changed_from_s=min(look.changed_from_s, settled_s),
            devices=self._places.devices,
            pipelines=self._places.pipelines,
            settled=interval_rows.settled_rows(self._follower),
            alerts=self._alerts_of(look),
            accounts=self._accounts,
            spec=(self._log.header.get("spec") or {}).get("resolved"),
        )
        self._index.keep_tiles(look.start_s, settled_s, self._places)

    def _alerts_of(self, look: Look) -> list[dict[str, Any]]:
        follower = self._follower
        times, is_on = follower.steps.times, self._is_going_on
        alerts = self._alerts.look(follower.history, times, now_s=look.end_s, is_going_on=is_on)
        return [
            alert.to_json() for alert in [*alerts, disk_alert(self._folder) if is_on else None] if alert is not None
        ]

    def _write_rows(self, look: Look) -> None:
        follower, index, seq = self._follower, self._index, self._seq
        pipelines = interval_rows.pipeline_rows(follower, self._plans, self._configs, is_going_on=self._is_going_on)
        devices = interval_rows.device_rows(follower, look, is_going_on=self._is_going_on)
        row_by_name = {name: row for name, (row, _) in pipelines.items()}
        index.set_facts(lane=interval_rows.lane_row(follower, look, row_by_name))
        index.set_rows(
            "INSERT OR REPLACE INTO device VALUES (?, ?, ?, ?)",
            [
                (self._places.device(device), str(device), text, seq)
                for device, row in devices.items()
                if self._is_news("device", str(device), text := dumps(row))
            ],
        )
        changed = []
        for name, (row, detail) in pipelines.items():
            text, more = dumps(row), dumps(detail)
            if self._is_news("pipeline", name, text + more):
                changed.append((self._places.pipeline(PipelineId(name)), name, text, more, seq))
        index.set_rows("INSERT OR REPLACE INTO pipeline VALUES (?, ?, ?, ?, ?)", changed)
        steps = []
        for pipeline, its_steps in look.steps.items():
            record = follower.history.pipelines[pipeline]
            for step, published in its_steps.items():
                sums = self._sums.of(pipeline, step)
                text_or_none = None if published is None else dumps(step_row(published, record, sums))
                steps.append((pipeline, step, text_or_none, seq))
        index.set_rows("INSERT OR REPLACE INTO step VALUES (?, ?, ?, ?)", steps)
        self._write_pins()
        index.set_rows(
            "INSERT OR IGNORE INTO instant VALUES (?, ?)",
            [
                (number, dumps(interval_rows.instant_row(instant)))
                for number, instant in enumerate(follower.history.instants)
            ],
        )

    def _write_pins(self) -> None:
        """Those that begin, and those that were open at the last look."""
        pins = self._follower.history.pins
        first = min([number for number in self._open_pins if number < len(pins)], default=self._num_pins)
        self._index.set_rows(
            "INSERT OR REPLACE INTO pin VALUES (?, ?, ?, ?, ?)",
            [
                (number, pin.pipeline, dumps([str(node) for node in pin.placement.nodes]), pin.start_s, pin.end_s)
                for number, pin in enumerate(pins[first:], first)
            ],
        )
        self._open_pins = [number for number in range(first, len(pins)) if pins[number].end_s == math.inf]
        self._num_pins = len(pins)

    def _is_news(self, table: str, name: str, text: str) -> bool:
        is_news = self._known[table].get(name) != text
        self._known[table][name] = text
        return is_news


def is_up_to_date(folder: Path, index: Path) -> bool:
    """Whether an index that this version made has all of a log that no process goes on with."""
    try:
        with IndexReader(index) as reader:
            stamp = str(reader.facts.get("stamp", ""))
            is_same = reader.facts.get("signature") == log_signature(folder) and not reader.facts.get("is_going_on")
        with LogReader(folder) as log:
            is_own = stamp == IndexWriter.stamp_of(str(log.header.get("run_id")))
    except (LogError, ValueError):
        return False
    return is_same and is_own and living_owner(folder) is None


class _Lane:
    """One folder, and when it is looked at again."""

    def __init__(self, folder: Path, index: Path) -> None:
        self.folder, self.index = folder, index
        self.indexer: LaneIndexer | None = None
        self.due_s = 0.0
        self.quiet_s = 0.0
        self.signature = ""
        self.trouble: str | None = None

    def look(self) -> None:
        """Update the index of a changed log. Prints each problem, and its end, on stdout."""
        begun_s = time.monotonic()
        # Asked before the first look only. The pages say so, and an index of that version stays as it is.
        if not self.signature and other_version(self.folder) is not None:
            self.due_s = begun_s + _SCAN_EVERY_S
            return
        try:
            self._catch_up(begun_s)
            self._report(None)
        except (LogError, sqlite3.Error, OSError) as error:
            self._report(f"{self.folder.name}: the index is not up to date: {error}")
            self.forget()
            self.due_s = time.monotonic() + _SCAN_EVERY_S
            return
        pause_s = min(_PAUSE_PER_SECOND * (time.monotonic() - begun_s), _LONGEST_PAUSE_S)
        self.due_s = time.monotonic() + max(_LOOK_EVERY_S, pause_s)

    def _catch_up(self, now_s: float) -> None:
        log = f"{log_signature(self.folder)} {living_owner(self.folder)}"  # before it is read: it may grow meanwhile
        if log == self.signature and self.index.is_file():
            if self.indexer is not None and now_s - self.quiet_s > _FORGET_S and living_owner(self.folder) is None:
                self.forget()
            return
        if self.indexer is not None and not self.index.is_file():
            self.forget()
        if self.indexer is None:
            if is_up_to_date(self.folder, self.index):
                self.signature = log
                return
            self.indexer = LaneIndexer(self.folder, self.index)
        self.indexer.catch_up()
        self.quiet_s = time.monotonic()
        self.signature = log

    def forget(self) -> None:
        if self.indexer is not None:
            self.indexer.close()
            self.indexer = None

    def _report(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            print(json.dumps({"folder": str(self.folder), "trouble": trouble}), flush=True)


def main(root: Path, spare: Path) -> None:
    """Index every lane of a folder until standard input is closed."""
    os.nice(5)
    np.seterr(all="raise", under="ignore")
    lanes: dict[Path, _Lane] = {}
    scan_s = 0.0
    while True:
        now_s = time.monotonic()
        if now_s >= scan_s:
            scan_s = now_s + _SCAN_EVERY_S
            for folder, index in Root(root, spare).lanes().values():
                lanes.setdefault(folder, _Lane(folder, index))
        for lane in lanes.values():
            if now_s >= lane.due_s:
                lane.look()
        if select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0] and not sys.stdin.readline():
            break
    for lane in lanes.values():
        lane.forget()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Live changes: one event stream per browser, resumed by the last log row that it showed.

    index.db ──(seq, rev) three times a second──▶ Watch ──wakes──▶ each stream ──▶ rows with a larger seq

A stream reads the changes since its last sent row, so it needs no queue: a slow reader gets the newest state, and one
that reconnects with `Last-Event-ID` gets what it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from rlmux.core.errors import LogError
from rlmux.service.dashboard.auth.access import SERVER, Access, Principal
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import Caller, Words, words_of
from rlmux.service.index.store import dumps
from rlmux.service.problems import ProblemError

LOOK_EVERY_S = 0.33
QUIET_S = 15.0
"""Seconds without an event until a keep-alive comment."""
MAX_STREAMS, MAX_OWN_STREAMS = 64, 5
MAX_MISSED = 5000
_LANES, _PIPELINES, _TIMELINE = "lanes", "pipelines", "timeline"


class Mark(NamedTuple):
    """State of a lane's index."""

    seq: int
    rev: int
    changed_from_s: float
    is_going_on: bool
    down: str | None = None


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics of a stream."""

    has_lanes: bool
    pipelines: frozenset[str]
    """Lanes with events for every pipeline."""
    details: frozenset[tuple[str, str]]
    """(lane, pipeline) with events for each step."""
    timelines: frozenset[str]

    @property
    def lanes(self) -> frozenset[str]:
        return self.pipelines | self.timelines | {lane for lane, _ in self.details}

    @classmethod
    def parse(cls, words: Sequence[str]) -> Topics:
        """Topics named `lanes`, `pipelines:L`, `pipelines:L/NAME` and `timeline:L`, names quoted as in addresses."""
        pipelines, details, timelines = set(), set(), set()
        for word in words:
            kind, _, rest = word.partition(":")
            lane, _, name = rest.partition("/")
            lane, name = unquote(lane), unquote(name)
            if kind == _PIPELINES and lane and name:
                details.add((lane, name))
            elif kind == _PIPELINES and lane:
                pipelines.add(lane)
            elif kind == _TIMELINE and lane and not name:
                timelines.add(lane)
            elif word != _LANES:
                raise ProblemError(
                    400,
                    f"no topic {word[:80]!r}",
                    where="?topics",
                    accepted="lanes, pipelines:L, pipelines:L/NAME, timeline:L",
                )
        return cls(_LANES in words, frozenset(pipelines), frozenset(details), frozenset(timelines))


class Watch:
    """Polls the watched lanes and wakes their streams."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._wanted: dict[int, Topics] = {}
        self.marks: dict[str, Mark] = {}
        self._news = asyncio.Event()
        self.is_closed = False

    async def run(self) -> None:
        """Poll while the server lives."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._wanted:
                with contextlib.suppress(LogError, OSError, sqlite3.Error):  # an index is being rebuilt
                    await self.look()

    async def look(self) -> None:
        has_all = any(topics.has_lanes for topics in self._wanted.values())
        lanes = {lane for topics in self._wanted.values() for lane in topics.lanes}
        marks = await run_in_threadpool(self._read, lanes, has_all)
        if marks != self.marks:
            self.marks = marks
            self.wake()

    def wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def close(self) -> None:
        """End every stream with a `bye` event."""
        self.is_closed = True
        self.wake()

    async def wait(self) -> None:
        """Wait for a change, at most until the next keep-alive."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), QUIET_S)

    @contextlib.contextmanager
    def watching(self, topics: Topics) -> Any:
        key = id(topics)
        self._wanted[key] = topics
        try:
            yield
        finally:
            del self._wanted[key]

    @property
    def num_streams(self) -> int:
        return len(self._wanted)

    def _read(self, lanes: set[str], has_all: bool) -> dict[str, Mark]:
        found = {}
        for lane in self._reads.names():
            if has_all or lane in lanes:
                with contextlib.suppress(ProblemError), self._reads.open(lane, SERVER) as reader:
                    facts = reader.facts
                    found[lane] = Mark(
                        reader.seq, facts["rev"], facts["changed_from_s"], facts["is_going_on"], self._reads.down(lane)
                    )
        return found


@dataclass(slots=True)
class _Stream:
    """State sent to one browser."""

    topics: Topics
    principal: Principal
    sent: dict[str, Mark] = field(default_factory=dict)


class Events(StreamingResponse):
    """Events, one after the other."""

    media_type = "text/event-stream"


class Streams:
    """The handler."""

    def __init__(self, reads: Reads, watch: Watch, access: Access) -> None:
        self._reads = reads
        self._watch = watch
        self._access = access
        self._num_by_caller: dict[str, int] = {}

    async def stream(self, caller: Caller, topics: Words = _LANES) -> Events:
        assert caller.principal is not None
        wanted = Topics.parse(words_of(topics))
        for lane in sorted(wanted.lanes):
            await run_in_threadpool(self._reads.folders, lane)
        own = self._num_by_caller.get(caller.principal.key, 0)
        if own >= MAX_OWN_STREAMS or self._watch.num_streams >= MAX_STREAMS:
            raise ProblemError(429, "too many streams", accepted=f"{MAX_OWN_STREAMS} a session, {MAX_STREAMS} in all")
        seen = parse_id(caller.headers.get("last-event-id", ""))
        events = self._events(wanted, seen, caller.principal, caller.cookie)
        return Events(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def _events(
        self, topics: Topics, seen: dict[str, int], principal: Principal, cookie: str
    ) -> AsyncIterator[bytes]:
        stream = _Stream(topics, principal)
        self._num_by_caller[principal.key] = self._num_by_caller.get(principal.key, 0) + 1
        try:
            with self._watch.watching(topics):
                await self._watch.look()
                yield b"retry: 1000\n\n"
                marks = dict(self._watch.marks)
                hello = {lane: {"seq": mark.seq, "rev": mark.rev} for lane, mark in marks.items()}
                for lane, mark in marks.items():
                    stream.sent[lane] = mark._replace(seq=min(mark.seq, seen.get(lane, mark.seq)))
                yield _event("hello", {"lanes": hello}, stream.sent)
                while True:
                    now = self._access.renewed(principal, cookie)
                    if now is None or not now.may("read"):
                        yield _event("bye", {"reason": "you may read no more"}, stream.sent)
                        return
                    stream.principal = now
                    for data in await run_in_threadpool(self._changes, stream, dict(self._watch.marks)):
                        yield data
                    if self._watch.is_closed:
                        yield _event("bye", {"reason": "the server ends"}, stream.sent)
                        return
                    news = self._watch.marks
                    await self._watch.wait()
                    if self._watch.marks is news:
                        yield b": still here\n\n"
        finally:
            self._num_by_caller[principal.key] -= 1
            if not self._num_by_caller[principal.key]:
                del self._num_by_caller[principal.key]

    def _changes(self, stream: _Stream, marks: dict[str, Mark]) -> list[bytes]:
        """Events for all changes since the last call; runs in a thread."""
        found: list[bytes] = []
        for lane, mark in marks.items():
            sent = stream.sent.get(lane)
            if sent == mark:
                continue
            since = sent.seq if sent is not None else 0
            events = self._changes_of(lane, stream.principal, stream.topics, sent, mark, since)
            stream.sent[lane] = mark
            found += [_event(name, value) for name, value in events[:-1]]
            found += [_event(name, value, stream.sent) for name, value in events[-1:]]
        return found

    def _changes_of(
        self, lane: str, principal: Principal, topics: Topics, sent: Mark | None, mark: Mark, since: int
    ) -> list[tuple[str, dict[str, Any]]]:
        events: list[tuple[str, dict[str, Any]]] = []
        if topics.has_lanes:
            events.append(("lane", self._reads.lane_row(lane, principal)))
        if lane not in topics.lanes:
            return events
        if sent is None or sent.rev != mark.rev:
            return [*events, ("reset", {"lane": lane, "reason": "the index was made anew"})]
        with contextlib.suppress(ProblemError), self._reads.open(lane, principal) as reader:
            rows = reader.rows("SELECT name, json FROM pipeline WHERE seq > ? ORDER BY place", since)
            asked = [text for name, text in rows if lane in topics.pipelines or (lane, name) in topics.details]
            events += [("pipeline", row) for row in self._reads.labelled(lane, asked)]
            for name in sorted(name for its_lane, name in topics.details if its_lane == lane):
                steps = reader.rows(
                    "SELECT json FROM step WHERE pipeline = ? AND seq > ? ORDER BY step LIMIT ?",
                    name, since, MAX_MISSED + 1,
                )  # fmt: skip
                if len(steps) > MAX_MISSED or any(text is None for (text,) in steps):
                    events.append(("reset", {"lane": lane, "reason": f"too much of {name} has changed"}))
                elif steps:
                    items = [json.loads(text) for (text,) in steps]
                    events.append(("step", {"lane": lane, "name": name, "items": items}))
            if lane in topics.timelines:
                devices = reader.rows("SELECT json FROM device WHERE seq > ? ORDER BY place", since)
                events.append(("devices", {"lane": lane, "items": [json.loads(text) for (text,) in devices]}))
                facts = reader.facts
                keys = {"seq": "seq", "rev": "rev", "start_s": "start_s", "end_s": "end_s", "open_from": "open_from_s"}
                shown = {key: facts[name] for key, name in keys.items()}
                is_next = sent.seq == since
                changed_from_s = facts["changed_from_s"] if is_next else facts["start_s"]
                events.append(("timeline", {"lane": lane, **shown, "changed_from": changed_from_s}))
        return events


def _event(name: str, value: Any, sent: Mapping[str, Mark] | None = None) -> bytes:
    """`sent`: given with the last event of a batch, whose id a reader resumes from."""
    id_ = ",".join(f"{quote(lane, safe='')}={mark.seq}" for lane, mark in (sent or {}).items())
    return format_sse_event(data_str=dumps(value), event=name, id=id_ or None)


def parse_id(text: str) -> dict[str, int]:
    """Row numbers in a stream's last id, by lane; malformed parts are ignored."""
    found = {}
    for part in text[:65536].split(","):
        lane, equals, seq = part.partition("=")
        if equals and seq.isascii() and seq.isdecimal() and len(seq) <= 18:
            found[unquote(lane)] = int(seq)
    return found

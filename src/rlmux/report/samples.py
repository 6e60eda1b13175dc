"""Samples: every trajectory of a run as text, in a file of its own beside the log.

    env worker ──add──▶ PIPELINE/samples.db ──SampleReader──▶ pages, API        one transaction a step

    trajectory   numbers of each, by (step, prompt, sample)
    body         its prompt and turns, compressed
    words        an index of the words in them; it holds no text
    token        the tokens that its model sampled: text and log-prob of each, compressed
    special      the same texts with special tokens, compressed against the body

A step that is done again replaces what was kept of it. Where the file would outgrow its bound, whole old steps go
first. Nothing depends on the file: it may be deleted, and a step whose trajectories could not be kept is a step all
the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlmux.core.errors import LogError, UserError
from rlmux.log.segments import query_only

SAMPLES_NAME = "samples.db"
MAX_BYTES = 512 * 2**20
SORTS = ("step", "-step", "reward", "-reward", "tokens", "-tokens")
_VERSION = 1
_LAST_STEP, _LAST_PLACE = 2**22 - 1, 2**20 - 1
"""The largest step, and the largest prompt and sample, that an id has room for."""
_LONG_END = re.compile(r"\w{3}$")
"""End of a search that stands for all words that begin so: fewer letters would stand for too many."""
_START_CHARS = 160
"""Characters of an answer that a list shows."""
_LEAST_LOGPROB = -60000.0
"""Half-precision floats end near 65504."""
_MANY = 20_000
"""Trajectories with words above which not all of them are looked at."""
_TOKENS = "CREATE TABLE IF NOT EXISTS token (id INTEGER PRIMARY KEY, texts BLOB NOT NULL, figures BLOB NOT NULL)"
_SPECIAL = "CREATE TABLE IF NOT EXISTS special (id INTEGER PRIMARY KEY, data BLOB NOT NULL)"
"""Files of earlier versions have neither; they get both when they are written to."""
_TABLES = f"""
PRAGMA user_version = {_VERSION};
CREATE TABLE trajectory (id INTEGER PRIMARY KEY, reward REAL NOT NULL, advantage REAL NOT NULL, stop TEXT NOT NULL,
                         tokens INTEGER NOT NULL, turns INTEGER NOT NULL, first_version INTEGER NOT NULL,
                         last_version INTEGER NOT NULL, start TEXT NOT NULL);
CREATE INDEX by_reward ON trajectory (reward);
CREATE INDEX by_tokens ON trajectory (tokens);
CREATE TABLE body (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(prompt, answer, content='', columnsize=0);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One trajectory as a reader sees it."""

    prompt: int
    """Place of its prompt in the step, from 0."""
    sample: int
    """Place in its prompt group, from 0."""
    prompt_text: str
    turns: Sequence[tuple[bool, str]]
    """(whether the model wrote it, text), in order."""
    tokens_by_turn: Sequence[Sequence[SampledToken]] = ()
    """Tokens of each turn of the model, in order; empty if they are not kept."""
    special: SpecialTexts | None = None
    """The texts with special tokens; None if they are not kept."""
    reward: float
    advantage: float
    stop: str
    """`stop` or `length`; of a program or environment also `failed`, `turns` or `time`."""
    tokens: int
    """Response tokens, environment replies included."""
    num_turns: int
    """Calls of the model."""
    first_version: int
    last_version: int
    """Oldest and newest weight version that made a token."""


class SampledToken(NamedTuple):
    """A token that the model sampled."""

    text: str
    """Its own text; a letter that several tokens make together is a sign of what has no text."""
    logprob: float
    """Log-probability of the rollout engine when it was sampled."""
    version: int
    """Weight version that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTexts:
    """The texts of a trajectory with special tokens written by name."""

    prompt_text: str
    turns: Sequence[str]
    """Text of each of `KeptSample.turns`."""
    names_by_turn: Sequence[Mapping[int, str]]
    """Names of the special tokens among each of `KeptSample.tokens_by_turn`, by place in the turn."""


class SampleWriter:
    """The one writer of a pipeline's file. Raises sqlite3.Error and OSError where it cannot be written."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = OFF")  # the run does not need it, and never waits for it
            if self._version() != _VERSION:
                self._connection.executescript("BEGIN;" + _TABLES + "COMMIT;")
            self._connection.execute(_TOKENS)
            self._connection.execute(_SPECIAL)
        except BaseException:  # an interrupt, too, leaves no open connection; it goes on up
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def add(self, step: int, samples: Iterable[KeptSample]) -> None:
        """Store a step's trajectories, replacing earlier ones of that step."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._drop(step, step)
            for sample in samples:
                self._insert(id_of(step, sample.prompt, sample.sample), sample)
            self._prune(step)
        except BaseException:  # an interrupt, too, leaves no half step; it goes on up
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _insert(self, id: int, sample: KeptSample) -> None:
        answer = "\n".join(text for is_model, text in sample.turns if is_model)
        figures = (sample.reward, sample.advantage, sample.stop, sample.tokens, sample.num_turns)
        self._connection.execute(
            "INSERT INTO trajectory VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (id, *figures, sample.first_version, sample.last_version, _clean(answer[:_START_CHARS])),
        )
        text = _clean(json.dumps([sample.prompt_text, *map(list, sample.turns)], ensure_ascii=False))
        self._connection.execute("INSERT INTO body VALUES (?, ?)", (id, zlib.compress(text.encode(), 3)))
        self._connection.execute("INSERT INTO words (rowid, prompt, answer) VALUES (?, ?, ?)", (id, *_words_of(text)))
        if sample.tokens_by_turn:
            self._connection.execute("INSERT INTO token VALUES (?, ?, ?)", (id, *_packed(sample.tokens_by_turn)))
        if sample.special is not None:
            packed = _packed_special(sample.special, text.encode())
            self._connection.execute("INSERT INTO special VALUES (?, ?)", (id, packed))

    def _drop(self, first_step: int, last_step: int) -> None:
        bounds = (id_of(first_step, 0, 0), id_of(last_step, _LAST_PLACE, _LAST_PLACE))
        found = self._connection.execute("SELECT id, data FROM body WHERE id BETWEEN ? AND ?", bounds).fetchall()
        for id, data in found:  # an index without text needs the text that it is to forget
            words = _words_of(zlib.decompress(data).decode())
            self._connection.execute(
                "INSERT INTO words (words, rowid, prompt, answer) VALUES ('delete', ?, ?, ?)", (id, *words)
            )
        for table in ("trajectory", "body", "token", "special"):
            self._connection.execute(f"DELETE FROM {table} WHERE id BETWEEN ? AND ?", bounds)

    def _prune(self, newest: int) -> None:
        """Drop the oldest steps, a tenth at a time, until the size is within the bound."""
        while self._used_bytes() > self._max_bytes:
            (oldest,) = self._connection.execute("SELECT min(id) FROM trajectory").fetchone()
            first = step_of(oldest)
            if first >= newest:
                return
            self._drop(first, min(newest - 1, first + (newest - first) // 10))

    def _used_bytes(self) -> int:
        size, total, free = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        return int(size * (total - free))

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])


class SampleReader:
    """Reads a pipeline's file, while it is written too. Use it for one request, then close it."""

    def __init__(self, path: Path) -> None:
        """Raises LogError where there is none that can be read."""
        try:
            if not path.is_file():
                raise LogError(f"{path}: no trajectories were kept")
            self._connection = query_only(path, "mode=ro")
            self._connection.execute("BEGIN")
        except sqlite3.Error as error:
            raise LogError(f"{path}: no trajectories that can be read: {error}") from None

    def __enter__(self) -> SampleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def steps(self) -> tuple[int, int] | None:
        """First and last step of which there is something; None where there is nothing."""
        ends = (
            "SELECT (SELECT min(id) FROM trajectory), (SELECT max(id) FROM trajectory)"  # together they read all rows
        )
        first, last = self._connection.execute(ends).fetchone()
        return None if first is None else (step_of(first), step_of(last))

    def find(self, filters: Mapping[str, Any], *, sort: str = "-step", offset: int = 0, limit: int = 50) -> list[Any]:
        """Rows that meet all filters: `step`, `prompt`, `stop`, `least` and `most` reward, `text`.

        `text`: words that follow each other, the last of which may be cut short to three letters.
        Raises ValueError for a sort that is none of `SORTS`.
        """
        conditions, values = _conditions(filters)
        source, order = "trajectory", _order(sort)
        if words := _words(filters):
            condition = "id IN (SELECT rowid FROM words WHERE words MATCH ?)"
            if self._are_many(words):  # as few are looked at as a page takes
                if sort.endswith("step") and not self._are_few_by_reward(filters):
                    source, condition = "words CROSS JOIN trajectory ON trajectory.id = words.rowid", "words MATCH ?"
                    order = "words.rowid DESC" if sort == "-step" else "words.rowid"
                    conditions = [each.replace("id BETWEEN", "words.rowid BETWEEN") for each in conditions]
                else:  # `+id` is in no index: that of what is sorted by, or of the reward, leads and the words follow
                    condition = f"+{condition}"
                    order = order.replace("id", "+id") if sort.endswith("step") else order
            conditions, values = [condition, *conditions], [words, *values]
        where = "WHERE " + " AND ".join(conditions) if conditions else ""
        found = self._connection.execute(
            f"SELECT trajectory.* FROM {source} {where} ORDER BY {order} LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        return [_row(row) for row in found]

    def _are_many(self, words: str) -> bool:
        counted = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
        (found,) = self._connection.execute(counted, (words, _MANY + 1)).fetchone()
        return bool(found > _MANY)

    def _are_few_by_reward(self, filters: Mapping[str, Any]) -> bool:
        conditions, values = _conditions({key: filters[key] for key in ("least", "most") if key in filters})
        if not conditions:
            return False
        counted = f"SELECT count(*) FROM (SELECT 1 FROM trajectory WHERE {' AND '.join(conditions)} LIMIT ?)"
        (found,) = self._connection.execute(counted, (*values, _MANY + 1)).fetchone()
        return bool(found <= _MANY)

    def one(self, step: int, prompt: int, sample: int, *, special_tokens: bool = False) -> dict[str, Any] | None:
        """A trajectory with its text; None where it was not kept.

        `special_tokens`: written by name, instead of left out; UserError where they were not kept.
        """
        id = id_of(step, prompt, sample)
        found = self._connection.execute("SELECT * FROM trajectory WHERE id = ?", (id,)).fetchone()
        if found is None:
            return None
        (data,) = self._connection.execute("SELECT data FROM body WHERE id = ?", (id,)).fetchone()
        body = zlib.decompress(data)
        prompt_text, *turns = json.loads(body)
        written = [{"role": "model" if is_model else "environment", "text": text} for is_model, text in turns]
        of_model = [turn for turn in written if turn["role"] == "model"]
        for turn, tokens in zip(of_model, self._tokens(id), strict=False):
            turn["tokens"] = [token._asdict() for token in tokens]
        if special_tokens:
            special = self._special(id, body)
            prompt_text = special.prompt_text
            for turn, text in zip(written, special.turns, strict=True):
                turn["text"] = text
            for turn, names in zip(of_model, special.names_by_turn, strict=False):
                for place, name in names.items():
                    turn["tokens"][place]["text"] = name
        return {**_row(found), "prompt_text": prompt_text, "said": written}

    def _tokens(self, id: int) -> list[list[SampledToken]]:
        """Tokens of each turn of the model; none where they were not kept."""
        found = self._kept("token", "texts, figures", id)
        return _unpacked(*found) if found else []

    def _special(self, id: int, body: bytes) -> SpecialTexts:
        found = self._kept("special", "data", id)
        if not found:
            raise UserError("special tokens of this trajectory were not kept; accepted: a run of this version")
        return _unpacked_special(found[0], body)

    def _kept(self, table: str, columns: str, id: int) -> Any:
        """The columns of a table that files of earlier versions do not have; None without them."""
        has_table = self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        return has_table and self._connection.execute(f"SELECT {columns} FROM {table} WHERE id = ?", (id,)).fetchone()


def _packed(tokens_by_turn: Sequence[Sequence[SampledToken]]) -> tuple[bytes, bytes]:
    """(texts as JSON, log-probs in half precision and versions as whole numbers), compressed."""
    texts = _clean(json.dumps([[token.text for token in turn] for turn in tokens_by_turn], ensure_ascii=False))
    flat = [token for turn in tokens_by_turn for token in turn]
    logprobs = struct.pack(f"<{len(flat)}e", *(max(_LEAST_LOGPROB, token.logprob) for token in flat))
    versions = struct.pack(f"<{len(flat)}I", *(token.version for token in flat))
    return zlib.compress(texts.encode(), 3), zlib.compress(logprobs + versions, 3)


def _unpacked(texts: bytes, figures: bytes) -> list[list[SampledToken]]:
    turns = json.loads(zlib.decompress(texts))
    num, data = sum(map(len, turns)), zlib.decompress(figures)
    figured = zip(struct.unpack_from(f"<{num}e", data), struct.unpack_from(f"<{num}I", data, 2 * num), strict=True)
    return [[SampledToken(text, *next(figured)) for text in turn] for turn in turns]


def _packed_special(special: SpecialTexts, body: bytes) -> bytes:
    """Nearly a copy of the body: compressed with it as the dictionary."""
    names = [list(names.items()) for names in special.names_by_turn]
    text = _clean(json.dumps([special.prompt_text, list(special.turns), names], ensure_ascii=False))
    packer = zlib.compressobj(3, zdict=body)
    return packer.compress(text.encode()) + packer.flush()


def _unpacked_special(data: bytes, body: bytes) -> SpecialTexts:
    prompt_text, turns, names = json.loads(zlib.decompressobj(zdict=body).decompress(data))
    return SpecialTexts(prompt_text=prompt_text, turns=turns, names_by_turn=[dict(each) for each in names])


MAX_TOKENS = 8192
"""Most tokens of a turn to return."""
MAX_TEXT = 65536
"""Most characters of a prompt, and of a turn, to return."""


def page_of(reader: SampleReader, filters: Mapping[str, Any], *, sort: str, at: int, limit: int) -> dict[str, Any]:
    """Rows that meet the filters, from place `at` on, as pages and the command line show them."""
    found = reader.find(filters, sort=sort, offset=at, limit=limit + 1)
    steps = reader.steps()
    return {
        "items": found[:limit],
        "next": str(at + limit) if len(found) > limit else None,
        "first_step": steps and steps[0],
        "last_step": steps and steps[1],
    }


def whole_of(
    reader: SampleReader, step: int, prompt: int, sample: int, *, special_tokens: bool = False
) -> dict[str, Any] | None:
    """A trajectory with its text, long ones cut, and the rewards of its prompt group; None where it was not kept.

    `special_tokens`: as of `SampleReader.one`.
    """
    found = reader.one(step, prompt, sample, special_tokens=special_tokens)
    if found is None:
        return None
    group = reader.find({"step": step, "prompt": prompt}, sort="step", limit=500)
    written = [
        {**turn, **_cut("text", turn["text"]), **({"tokens": turn["tokens"][:MAX_TOKENS]} if "tokens" in turn else {})}
        for turn in found.pop("said")
    ]
    return {
        **found,
        **_cut("prompt_text", found["prompt_text"]),
        "said": written,
        "group": [{key: other[key] for key in ("sample", "reward", "tokens", "stop")} for other in group],
    }


def _cut(key: str, text: str) -> dict[str, Any]:
    return {key: text[:MAX_TEXT], "is_cut": len(text) > MAX_TEXT}


def id_of(step: int, prompt: int, sample: int) -> int:
    """A number that orders trajectories by step, prompt and sample. Raises ValueError beyond four million steps."""
    if not (0 <= step <= _LAST_STEP and 0 <= prompt <= _LAST_PLACE and 0 <= sample <= _LAST_PLACE):
        raise ValueError(f"step {step} prompt {prompt} sample {sample} is too large to be kept")
    return (step << 40) | (prompt << 20) | sample


def step_of(id: int) -> int:
    return id >> 40


def _row(found: Sequence[Any]) -> dict[str, Any]:
    id, reward, advantage, stop, tokens, turns, first_version, last_version, start = found
    return {
        "step": step_of(id),
        "prompt": id >> 20 & _LAST_PLACE,
        "sample": id & _LAST_PLACE,
        "reward": reward,
        "advantage": advantage,
        "stop": stop,
        "tokens": tokens,
        "turns": turns,
        "first_version": first_version,
        "last_version": last_version,
        "start": start,
    }


def _conditions(filters: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Conditions of all filters but words, and their values."""
    parts: list[str] = []
    values: list[Any] = []

    def take(condition: str, *its: Any) -> None:
        parts.append(condition)
        values.extend(its)

    if "step" in filters:
        take("id BETWEEN ? AND ?", id_of(filters["step"], 0, 0), id_of(filters["step"], _LAST_PLACE, _LAST_PLACE))
    if "prompt" in filters:
        take("(id >> 20) & ? = ?", _LAST_PLACE, filters["prompt"])
    if "least" in filters:
        take("reward >= ?", filters["least"])
    if "most" in filters:
        take("reward <= ?", filters["most"])
    if "stop" in filters:
        take("stop = ?", filters["stop"])
    return parts, values


def _words(filters: Mapping[str, Any]) -> str:
    """The words as one phrase: quoted, no sign of it is an operator of the search; empty if there are none."""
    text = filters.get("text", "").replace("\0", " ").strip()
    quoted = '"' + text.replace('"', '""') + '"'
    return quoted + ("*" if _LONG_END.search(text) else "") if text else ""


def _order(sort: str) -> str:
    if sort not in SORTS:
        raise ValueError(", ".join(SORTS))
    return f"{sort.removeprefix('-').replace('step', 'id')} {'DESC' if sort[0] == '-' else 'ASC'}, id"


def _words_of(text: str) -> tuple[str, str]:
    prompt, *turns = json.loads(text)
    return prompt, "\n".join(text for _, text in turns)


def _clean(text: str) -> str:
    """The same, without what no encoding has: half of a pair, which some tokenizers decode to."""
    return text.encode("utf-8", "replace").decode()

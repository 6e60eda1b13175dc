"""What if: a question about a lane as a process of `rlmux whatif`, and how far earlier predictions were off.

POST lanes/L/whatif ─▶ rlmux whatif DIR ... --json ─▶ now, then, and the same question as a command
                                └─ when each pipeline would end ─▶ predictions.jsonl beside the index
GET  lanes/L/whatif ─▶ those that have come true, against the index: median and largest error, part within the range

A prediction is scored by pipelines that finished, as long as none was submitted or cancelled between the question and
their end: what is left of a run is predicted as it is, and not what its users do to it.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmux.policies import POLICIES
from rlmux.service.dashboard.auth.access import SERVER
from rlmux.service.dashboard.handlers import Reads
from rlmux.service.dashboard.parameters import Caller
from rlmux.service.dashboard.router import Address, LongWork, get, post
from rlmux.service.dashboard.schemas.usage_schemas import Answer, Question, Score
from rlmux.service.problems import ProblemError

LIMIT_S = 180.0
"""Seconds after which an answer is given up: it has three simulations of each side."""
MEMORY_BYTES = 4 << 30
"""Address space of the process that answers."""
_MOST_WAITING = 4
"""Questions that wait for another one to be answered."""
_ADDRESS = "/lanes/{lane}/whatif"
_KEPT = "predictions.jsonl"
_MAX_KEPT_BYTES = 4 << 20


class Questions:
    """The handlers. One question is answered at a time, and a few wait."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._asking = LongWork(max_running=1, max_waiting=_MOST_WAITING)

    def addresses(self) -> tuple[Address, ...]:
        return (
            get(_ADDRESS, self.score, "How far earlier predictions were off"),
            post(_ADDRESS, self.ask, "What a change would do to the run", scope="submit", long_work=self._asking),
        )

    def ask(self, caller: Caller, lane: str, body: Question) -> Answer:
        """The answer of `rlmux whatif`, `command` with it."""
        folder, index = self._reads.folders(lane)
        if self._reads.sight(lane, caller.principal).hides_some:
            raise ProblemError(403, "the lane has pipelines that you are not shown", accepted="the role operator")
        question = body.model_dump(exclude_none=True, exclude_unset=True)
        if caller.principal is not None and not caller.principal.may_run_code and _may_name_code(question):
            why = "a file, a setting or a policy may name code, which you may not run"
            raise ProblemError(403, why, accepted=f"a question without; policies: {', '.join(POLICIES)}")
        answer = _answer(folder, question)
        _keep(index.with_name(_KEPT), answer)
        return Answer.model_validate({**answer, "command": _command(folder, question, "FILE")})

    def score(self, lane: str) -> Score:
        _, index = self._reads.folders(lane)
        with self._reads.open(lane, SERVER) as reader:
            pipelines = [json.loads(text) for (text,) in reader.rows("SELECT json FROM pipeline")]
        ends = list(_ends(_kept(index.with_name(_KEPT)), pipelines))
        errors = [error for error, _ in ends]
        return Score(
            policies=list(POLICIES),
            num_scored=len(errors),
            median_error=statistics.median(errors) if errors else None,
            worst_error=max(errors, default=None),
            within_range=statistics.mean(is_within for _, is_within in ends) if ends else None,
        )


def _may_name_code(question: Mapping[str, Any]) -> bool:
    return bool({"file", "set"} & set(question)) or question.get("policy", next(iter(POLICIES))) not in POLICIES


def _command(folder: Path, question: Mapping[str, Any], file: str) -> str:
    return shlex.join(["rlmux", *_words(folder, question, file)])


def _words(folder: Path, question: Mapping[str, Any], file: str) -> list[str]:
    words = ["whatif"]
    for key, option in (("add", "--add"), ("like", "--like"), ("policy", "--policy")):
        if key in question:
            words.append(f"{option}={question[key]}")
    words += [f"--remove={name}" for name in question.get("remove", ())]
    words += [f"--set={given}" for given in question.get("set", ())]
    return [*words, str(folder), *([file] if "file" in question else [])]


def _answer(folder: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """What the process prints. Raises ProblemError with its line where it refuses."""
    with tempfile.TemporaryDirectory(prefix="rlmux-whatif-") as place:
        file = Path(place) / "question.yaml"
        file.write_text(str(question.get("file", "")), encoding="utf-8")
        words = [*_words(folder.resolve(), question, file.name), "--json"]
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "rlmux", *words],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            try:
                out, err = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ProblemError(503, f"no answer within {LIMIT_S:g} s", accepted="a shorter run, or fewer") from None
    if process.returncode != 0:
        lines = err.strip().splitlines() or [f"exit code {process.returncode}"]
        raise ProblemError(400, lines[-1].removeprefix("rlmux: ")[:500], where="body")
    answer: dict[str, Any] = json.loads(out)
    return answer


# ---------------------------------------------------------------------- what came of it


def _keep(path: Path, answer: Mapping[str, Any]) -> None:
    """Note when each pipeline would end if nothing changed: as expected, at the earliest, at the latest. A folder that
    cannot be written keeps nothing."""
    ends_s = {
        name: [answer["at_s"] + figures["ends_s"] for figures in (pipeline, pipeline["low"], pipeline["high"])]
        for name, pipeline in answer["now"]["pipelines"].items()
        if pipeline["low"]["ends_s"] is not None
    }
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size < _MAX_KEPT_BYTES:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at_s": answer["at_s"], "ends_s": ends_s}) + "\n")


def _kept(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the end of a line that was being written
                yield json.loads(line)


def _ends(kept: Iterator[Mapping[str, Any]], pipelines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, bool]]:
    """(|came - predicted| over the seconds predicted, whether it came within its range) of each pipeline of each
    question that has come true."""
    finished_s = {row["name"]: row["ended_s"] for row in pipelines if row["status"] == "finished"}
    meddled_s = [row["submitted_s"] for row in pipelines]
    meddled_s += [row["ended_s"] for row in pipelines if row["status"] in ("cancelled", "failed")]
    for question in kept:
        at_s = question["at_s"]
        first_s = min((time_s for time_s in meddled_s if time_s is not None and time_s > at_s), default=None)
        for name, (predicted_s, low_s, high_s) in question["ends_s"].items():
            ended_s = finished_s.get(name)
            if ended_s is not None and predicted_s > at_s and (first_s is None or ended_s <= first_s):
                yield abs(ended_s - predicted_s) / (predicted_s - at_s), low_s <= ended_s <= high_s

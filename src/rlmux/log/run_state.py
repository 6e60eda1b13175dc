"""The past of a run to resume: a small fold over the log, with snapshots in the log.

    rows ──add──▶ RunState ──as_json──▶ snapshot in the log        read back: the snapshot, then the rows after it

A state read from any snapshot equals the one folded from the first row on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlmux.core.estimation.alike_seconds import MAX_KEPT
from rlmux.log.value_codec import dumps, encode, loads

_WAITS = ("PipelineSubmitted", "Queue", "PipelineParked")
"""Events and actions after which a pipeline waits."""
_READ = ("ExpectSteps", "SharesSet", "Admit", *_WAITS)


@dataclass(slots=True)
class RunState:
    """Fold rows in with `add`, in the log's order."""

    seq: int = 0
    """The last row that is folded in; 0 before the first."""
    last_time_s: float = 0.0
    """Time of that row, in seconds since the run began."""
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of the note `pipeline_end` of each pipeline that is over: status, reason, weights_sha256."""
    plans: dict[str, str] = field(default_factory=dict)
    """Hash of each pipeline's plan, from the note `plan`."""
    steps: dict[str, int] = field(default_factory=dict)
    """Last step of each pipeline with a note `step`."""
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Hash of each file that a pipeline reads, by pipeline and path, from its last note `inputs`."""
    submitted: list[dict[str, Any]] = field(default_factory=list)
    """Fields of the notes `submitted`: the files that came while the run went on, oldest first."""
    standings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Users' settings of each waiting pipeline, `is_held` and `rank`, from the notes `standing`."""
    measured: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Seconds of the phases that each pipeline without a given estimate was last planned with: `estimate` and `held`,
    as in `Pipeline`."""

    bounded: dict[str, Any] = field(default_factory=dict)
    """Newest bounds and steps of each pipeline with a probability, as the log writes `Pipeline.bounded`."""

    alike: list[dict[str, Any]] = field(default_factory=list)
    """What steps of pipelines took, for those alike, as the log writes `AlikeSeconds`: one of each key and numbers of
    nodes, the oldest first."""

    waits: dict[str, dict[str, float]] = field(default_factory=dict)
    """`since_s` of each pipeline that waits, and `promised_s` of one with a promised start (note `start_promised`)."""

    usage: dict[str, Any] = field(default_factory=dict)
    """Fields of the last note `usage`: what projects and users have used."""
    accounts: dict[str, Any] = field(default_factory=dict)
    """Fields of the last note `accounts`: the same for people, with shares, quotas and charges."""
    shares: dict[str, Any] | None = None
    """Fields of the last `SharesSet`, as the log writes them; None where there was none."""

    @staticmethod
    def reads(kind: str, type: str) -> bool:
        """Whether `add` looks at the value of such a row."""
        return kind == "note" or type in _READ

    def add(self, seq: int, time_s: float, kind: str, type: str, value: Any) -> None:
        """Fold in one row; `value`: the fields of a note, or the action."""
        self.seq, self.last_time_s = seq, time_s
        if type == "ExpectSteps" and value.measured is not None:
            seconds = {"estimate": asdict(value.measured.median), "held": asdict(value.measured.held)}
            self.measured[str(value.pipeline)] = seconds
        if type == "ExpectSteps" and value.bounded is not None:
            self.bounded[str(value.pipeline)] = loads(dumps(value.bounded))
        if type == "ExpectSteps" and value.alike is not None:
            self._keep_for_alike(loads(dumps(value.alike)))
        if type == "SharesSet":
            self.shares = loads(encode(value))
        if type in _WAITS:
            name = value.pipeline.id if type == "PipelineSubmitted" else value.pipeline
            self.waits.setdefault(str(name), {"since_s": time_s})
        elif type == "Admit":
            self.waits.pop(str(value.pipeline), None)
        if kind != "note":
            return
        if type == "pipeline_end":
            self.ended[value["pipeline"]] = value
            self.waits.pop(value["pipeline"], None)
        elif type == "start_promised" and value["pipeline"] in self.waits:
            self.waits[value["pipeline"]]["promised_s"] = value["start_s"]
        elif type == "plan":
            self.plans[value["pipeline"]] = str(value["plan_sha256"])
        elif type == "step":
            self.steps[value["pipeline"]] = max(value["step"], self.steps.get(value["pipeline"], 0))
        elif type == "inputs":
            self.inputs[value["pipeline"]] = value["files"]
        elif type == "usage":
            self.usage = value
        elif type == "accounts":
            self.accounts = value
        elif type == "standing":
            changes = {key: value[key] for key in ("is_held", "rank") if key in value}
            self.standings[value["pipeline"]] = {**self.standings.get(value["pipeline"], {}), **changes}
        elif type == "submitted":
            self.submitted.append(value)
        elif type == "resumed":
            for name in value.get("retried", ()):
                self.ended.pop(name, None)

    def _keep_for_alike(self, newest: dict[str, Any]) -> None:
        """As the scheduler keeps it (`core/estimation/alike_seconds.py`)."""

        def key(seconds: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(seconds[name] for name in ("alike", "num_rollout_nodes", "num_train_nodes", "is_colocated"))

        others = [seconds for seconds in self.alike if key(seconds) != key(newest)]
        self.alike = [*others, newest][-MAX_KEPT:]

    def as_json(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "last_time_s": self.last_time_s,
            "ended": self.ended,
            "plans": self.plans,
            "steps": self.steps,
            "inputs": self.inputs,
            "submitted": self.submitted,
            "standings": self.standings,
            "measured": self.measured,
            "bounded": self.bounded,
            "alike": self.alike,
            "waits": self.waits,
            "usage": self.usage,
            "accounts": self.accounts,
            "shares": self.shares,
        }

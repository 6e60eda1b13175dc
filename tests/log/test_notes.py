"""Notes come back from the log as they were written, and those of older logs are read."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import LogError
from rlmux.core.model import DeviceId, FailureCause, OrderId, Phase, PipelineId
from rlmux.log import notes, value_codec
from rlmux.log.notes import decode, encode
from rlmux.log.run_log import LogReader, RunLog, run_header
from rlmux.log.run_state import RunState

A = PipelineId("a")
END = notes.PipelineEndNote(pipeline=A, status="finished", reason="", weights_sha256=None)
DELIVERY = notes.WeightDelivery(
    versions=[2, 3], allowed=(2, 3), loaded={3: ["c3"]}, published={4: ["c4", "c4-bfloat16"]}
)
SHARE = {"project": "p", "user": "u", "share": 0.5, "quota": {"max_running": None}}
NOTES = [
    notes.ResumedNote(pipelines=[A], retried=[], utc="2026-11-29T14:03:22+00:00"),
    notes.EndNote(pipelines={A: END}, control_s=0.5),
    notes.DefectNote(text="a defect"),
    notes.SalvagedNote(rows=7, missing=[(3, 4)], damage=["run.db is cut short"], left_out=1),
    notes.NeighbourNote(pid=7, folder="/runs/b", reason="it has core 0"),
    notes.UsageNote(at_s=9.0, accounts=[("p", "u", "train", 3.5, 1.0)], spent=[("p", "u", 2.5, 0.0)]),
    notes.AccountsNote(accounts=[SHARE], at_s=9.0, half_life_hours=24.0, held_hours={"train": 1.5}),
    notes.HardwareNote(
        devices={"train-0.0": {"use": 0.25, "memory_bytes": None}}, host_memory_bytes=8e9, host_memory_used_bytes=2e9
    ),
    notes.SharedBatchNote(order=OrderId(3), tokens={"a": 5, "b": 6}, seconds=0.25),
    notes.SubmittedNote(pipelines=[A], at_s=1.0, source="late.yaml", resolved="pipelines: []", id="7f"),
    notes.PlanNote(pipeline=A, plan_sha256="ab12"),
    notes.AlertsNote(pipeline=A, rules={"kl": {"level": 0.5, "steps": None}}),
    notes.InputsNote(pipeline=A, files={"rows.jsonl": "ab12"}, changed=["rows.jsonl has changed"]),
    notes.StandingNote(pipeline=A, is_held=False),
    notes.StandingNote(pipeline=A, rank=-2),
    notes.StartReservedNote(pipeline=A, start_s=60.0),
    END,
    notes.RetriedNote(
        pipeline=A, number=2, of=3, by_rule=True, cause=FailureCause.LOST_WORKER, reason="it is gone", failed_s=4.0
    ),
    notes.RemovedNote(pipeline=A, parts="checkpoints", by="ann", by_rule=False, freed_bytes=2048),
    notes.StepNote(
        pipeline=A, step=4, metrics={"reward_mean": 0.25, "tokens": 512, "kl": None, "loss": math.inf},
        delivery=DELIVERY, weights_checksum="c4", from_checkpoint=True,
    ),
    notes.StepNote(pipeline=A, step=4, metrics={}, weights_sha256="ab12"),
    notes.RolloutNote(
        pipeline=A, step=4, slots=8, group_size=2, runs=[[3, 5], [3, 2]], iterations=[("dense", 2, 5, 7, 1.5)],
        waits_ms=[[0.5], []],
    ),
    notes.CheckpointNote(pipeline=A, step=4, seconds=0.5, stall_s=0.0, weights_sha256="ab12"),
    notes.WorkerNote(pipeline=A, role="train", pid=7),
    notes.LossNote(pipeline=A, reason="process 7 ended"),
    notes.FailureNote(pipeline=A, reason="NaN", traceback="/runs/a/workers.log"),
    notes.WarningNote(pipeline=A, reason="it stands still"),
    notes.StandstillNote(
        pipeline=A, worker="a/train", devices=[DeviceId("train", 0, 1)], began_s=2.0, seconds=3.5, reason="stopped"
    ),
    notes.SpillNote(pipeline=A, worker="a/train"),
    notes.AdapterRoomNote(pipeline=A, device="train-0.0", phase=Phase.TRAIN, state_bytes=10, free_bytes=100),
    notes.DeterminismNote(pipeline=A, promise="exact", checks={"recomputation": True}),
    notes.DeterminismNote(
        pipeline=A, promise="replayable", checks={"batches": False}, server={"name": "vllm", "remarks": ["one", "two"]}
    ),
    notes.ProgramNote(
        pipeline=A, world=2, pools={"train": "gpu"}, need_bytes={"gpu": 5.0}, host_bytes=3.0, slo=None, weight=1.0
    ),
    notes.RankJoinedNote(pipeline=A, rank=1, session="s", process=(7, 1234)),
    notes.WorkersNote(pipeline=A, rank=1, workers=["m/8"], processes=[(8, 1235)]),
    notes.PermitAdoptedNote(pipeline=A, fence=3, pools=["gpu"]),
    notes.PermitGrantedNote(pipeline=A, fence=3, pools=["gpu"], phase="train", ask=2, waited_s=0.5, step=4),
    notes.PermitEndedNote(pipeline=A, fence=3, pools=["gpu"], used_s=1.5, restore_s=0.0),
    notes.LeaveRequestedNote(pipeline=A, pool="gpu", waiting="another"),
    notes.PoolLeftNote(pipeline=A, pool="gpu", freed_bytes=None),
    notes.ProgramGoneNote(pipeline=A, said_bye=True),
    notes.ProgramMarkedNote(pipeline=A, reason="rank 1 is gone"),
]  # fmt: skip
BASES = {notes.Note, notes.PipelineNote, notes.PermitNote}


def read_back(folder: Path, *rows: tuple[str, dict[str, Any]]) -> list[notes.Note | None]:
    with RunLog.create(folder, run_header(policy="rollmux", backend="local")) as log:
        for type, fields in rows:
            log.note(type, 1.0, **fields)
    with LogReader(folder) as reader:
        return [entry.note for entry in reader.entries() if entry.kind == "note"]


def test_every_type_comes_back_from_the_log_as_it_was_written(tmp_path: Path) -> None:
    kinds = {each for each in vars(notes).values() if isinstance(each, type) and issubclass(each, notes.Note)}
    assert {type(note) for note in NOTES} == kinds - BASES
    with RunLog.create(tmp_path, run_header(policy="rollmux", backend="local")) as log:
        for note in NOTES:
            log.append_note(2.5, note)
    with LogReader(tmp_path) as reader:
        assert [entry.note for entry in reader.entries() if entry.kind == "note"] == NOTES


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_unknown_keys_are_ignored_and_every_key_may_be_missing(tmp_path: Path, note: notes.Note) -> None:
    fields = encode(note)
    names = [name for name in fields if name != "what"]
    without = [{key: value for key, value in fields.items() if key != name} for name in names]
    rows = [(note.type, {**fields, "of_another_version": [1]}), *((note.type, each) for each in without)]
    whole, *partial = read_back(tmp_path, *rows)
    assert whole == note
    for name, read in zip(names, partial, strict=True):
        assert type(read) is type(note)
        others = [each.name for each in dataclasses.fields(note) if each.name != name]  # type: ignore[arg-type]
        assert [getattr(read, other) for other in others] == [getattr(note, other) for other in others]


def test_a_note_of_a_type_that_is_not_known_is_none_and_its_row_is_kept(tmp_path: Path) -> None:
    assert read_back(tmp_path, ("of_another_version", {"pipeline": "a"})) == [None]
    with LogReader(tmp_path) as reader:
        assert [entry.value for entry in reader.entries() if entry.kind == "note"] == [{"pipeline": "a"}]


def test_a_permit_note_of_a_kind_that_is_not_known_has_its_pipeline() -> None:
    assert decode("permit", {"pipeline": "a", "what": "blessed"}) == notes.PermitNote(pipeline=A)


def test_a_step_of_an_older_log_has_the_metrics_that_are_numbers() -> None:
    fields = {"pipeline": "a", "step": 2, "metrics": {"kl": "nan", "text": "x", "is_long": True, "loss": 1}}
    note = decode("step", {**fields, "reward_mean": 0.5})
    assert isinstance(note, notes.StepNote)
    assert note.metrics.keys() == {"kl", "loss"}
    assert math.isnan(note.metrics["kl"] or 0.0)


def test_rows_have_the_keys_that_readers_outside_rlmux_know() -> None:
    note = notes.PermitGrantedNote(pipeline=A, fence=3, pools=("gpu",), phase="train", ask=2, waited_s=0.5)
    assert (note.type, encode(note)["what"]) == ("permit", "granted")
    assert encode(END) == {"pipeline": "a", "status": "finished", "reason": "", "weights_sha256": None}
    assert encode(notes.StandingNote(pipeline=A, rank=1)) == {"pipeline": "a", "rank": 1}
    assert encode(notes.StepNote(pipeline=A, step=1, metrics={})) == {"pipeline": "a", "step": 1, "metrics": {}}


def test_a_field_of_a_wrong_kind_is_an_error_that_names_it() -> None:
    with pytest.raises(LogError, match=r"step\.step is 'one' in the log; it must be an integer"):
        decode("step", {"pipeline": "a", "step": "one"})


def test_a_snapshot_of_an_older_log_is_read():
    """As rlmux wrote it when notes were plain fields, with empty values for what there was none of."""
    older = {
        "seq": 7,
        "last_time_s": 2.5,
        "ended": {"a": {"pipeline": "a", "status": "finished", "reason": "", "weights_sha256": "0f"}},
        "plans": {"a": "1e"},
        "steps": {"a": 3},
        "inputs": {"a": {"rewards.py": "2d"}},
        "submitted": [{"pipelines": ["b"], "at_s": 1.0, "source": "b.yaml", "resolved": "pipelines: []\n"}],
        "standings": {"b": {"is_held": True}},
        "measured": {"a": {"estimate": {"rollout_s": 1.0, "train_s": 2.0}, "held": {"rollout_s": 1.0, "train_s": 2.0}}},
        "bounded": {},
        "alike": [],
        "waits": {"b": {"since_s": 1.0}},
        "usage": {"at_s": 2.0, "accounts": [["lab", "ann", "gpu", 5.0, 1.0]], "spent": []},
        "accounts": {},
        "shares": None,
    }
    state = RunState.from_json(value_codec.loads(json.dumps(older)))
    assert (state.seq, state.last_time_s, state.plans, state.steps) == (7, 2.5, {"a": "1e"}, {"a": 3})
    assert (state.ended["a"].status, state.ended["a"].weights_sha256) == ("finished", "0f")
    (submitted,) = state.submitted
    assert (submitted.source, list(submitted.pipelines), submitted.id) == ("b.yaml", ["b"], None)
    assert state.usage is not None
    assert state.usage.accounts[0] == ("lab", "ann", "gpu", 5.0, 1.0)
    assert (state.standings, state.waits, state.accounts, state.shares) == (
        {"b": {"is_held": True}},
        {"b": {"since_s": 1.0}},
        None,
        None,
    )
    assert RunState.from_json(value_codec.loads(value_codec.dumps(state))) == state

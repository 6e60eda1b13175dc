"""A condensed history shows the status of the whole one, after every row, in memory and read back."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.log_script import LogScript

from rlmux.core.actions import ReportPolicyFault
from rlmux.core.errors import LogError
from rlmux.core.events import PipelineRestarted, PipelineSubmitted, WorkerLost
from rlmux.core.model import DeviceId, Stage
from rlmux.log.run_log import Entry
from rlmux.report.alerts import Alerts
from rlmux.report.status import status
from rlmux.report.summary import StepTimes, step_times
from rlmux.report.timeline.build import build_timeline
from rlmux.report.timeline.condensed_state import CACHE_NAME, BlockEnd, CondensedHistory, keep, kept_history

PLACE = BlockEnd(7, 99)


def shown(history: CondensedHistory, *, is_going_on: bool = True) -> str:
    """All that is shown of a history, to the last digit."""
    steps = history.step_times()
    alerts = Alerts().look(history, steps, now_s=history.last_s, is_going_on=is_going_on)
    return json.dumps([status(history, is_going_on=is_going_on, steps=steps), [one.to_json() for one in alerts]])


def flat(times: StepTimes) -> list[float]:
    """The figures of every published step, pipeline after pipeline."""
    every = (one for steps in times.values() for one in steps)
    return [figure for one in every for figure in (one.step, one.end_s, one.seconds, one.solo_s)]


def with_faults(rows: list[Entry]) -> list[Entry]:
    """A worker is lost, decisions of the policy fail, a pipeline goes back to its first step, the process dies and
    another one goes on."""
    found: list[Entry] = []
    for number, row in enumerate(rows):
        found.append(row)
        if number == len(rows) // 4:
            lost = WorkerLost(time_s=row.time_s, pipeline="tools", device=DeviceId("rollout", 0, 0))
            found.append(Entry(0, row.time_s, "event", "WorkerLost", lost))
        elif number == len(rows) // 2:
            back = PipelineRestarted(time_s=row.time_s, pipeline="sort", restored_step=1)
            found.append(Entry(0, row.time_s, "event", "PipelineRestarted", back))
        elif number in (len(rows) // 3, len(rows) - 1):
            fault = ReportPolicyFault(policy="own:Policy", method="dispatch", error="KeyError: 'a'")
            found.append(Entry(0, row.time_s, "action", "ReportPolicyFault", fault))
        elif number == 2 * len(rows) // 3:
            found.append(Entry(0, row.time_s, "note", "resumed", {}))
            again: list[Entry] = [each for each in rows[:20] if isinstance(each.value, PipelineSubmitted)]
            found += [each._replace(time_s=row.time_s) for each in again]
    return found


@pytest.mark.parametrize("failing", [None, "tools"])
def test_a_condensed_history_shows_what_the_whole_one_does_after_every_row(alternating_run: Any, failing: Any) -> None:
    script: LogScript = alternating_run(num_steps=4, failing=failing)
    header = script.header
    rows = with_faults(script.rows)
    whole, condensed = CondensedHistory(header), CondensedHistory(header)
    for number, row in enumerate(rows):
        whole.add(row)
        condensed.add(row)
        if number % 3 == 0:
            condensed.condense()
        if number % 7 == 0:
            data = condensed.as_bytes(PLACE)
            assert data is not None
            condensed, place = CondensedHistory.of_bytes(header, data)
            assert place == PLACE
        for is_going_on in (True, False):
            assert shown(condensed, is_going_on=is_going_on) == shown(whole, is_going_on=is_going_on), row
        assert flat(condensed.step_times()) == pytest.approx(flat(step_times(build_timeline(whole))), rel=1e-9)
    condensed.condense()
    assert len(whole.orders) > 20
    assert condensed.orders == []


def test_what_is_kept_is_read_back_and_may_be_anything_but_what_it_was(tmp_path: Path, alternating_run: Any) -> None:
    script: LogScript = alternating_run(num_steps=2)
    header = script.header
    history = CondensedHistory.of(header, script.rows)
    assert isinstance(history, CondensedHistory)
    assert kept_history(tmp_path, header) is None
    keep(tmp_path, history, PLACE)
    path = tmp_path / CACHE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    found = kept_history(tmp_path, header)
    assert found is not None
    assert (shown(found[0]), found[1]) == (shown(history), PLACE)
    assert kept_history(tmp_path, {**header, "run_id": "another"}) is None
    whole = path.read_bytes()
    for damaged in (b"", whole[:-9], zlib.compress(b"[]\n"), zlib.compress(b'{"version":1}\n')):
        path.write_bytes(damaged)
        assert kept_history(tmp_path, header) is None
        with pytest.raises(LogError):
            CondensedHistory.of_bytes(header, damaged)
    path.unlink()
    path.mkdir()
    keep(tmp_path, history, PLACE)
    assert [one.name for one in tmp_path.iterdir()] == [CACHE_NAME], "what cannot be kept leaves nothing behind"


def test_a_history_with_clients_is_not_kept(script: LogScript) -> None:
    script.submit(0.0, "a", num_steps=None, work_arrives=True, stages=(Stage.GENERATE, Stage.UPDATE))
    assert CondensedHistory.of(script.header, script.rows).as_bytes(PLACE) is None  # type: ignore[attr-defined]

"""What is said of a recorded run's ends is what came, but for the drift of the machine that it was recorded on.

Each file of tests/data/what_if is the log of a real run on two cores of a busy machine, without its progress reports.
`follow-up.rollmux`: the demo pair with 24 steps each, and a third pipeline submitted after the eleventh. `pair.rlmux`:
the demo pair with 40 steps each.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import what_if

from rlmux.log import value_codec
from rlmux.log.run_log import RunLog

RECORDINGS = Path(__file__).parents[1] / "data" / "what_if"


def unpacked(name: str, folder: Path) -> Path:
    """The recorded log in a folder."""
    text = lzma.decompress((RECORDINGS / f"{name}.jsonl.xz").read_bytes()).decode("utf-8")
    (_, _, _, header), *rows = map(json.loads, text.splitlines())
    with RunLog.create(folder, header) as log:
        for time_s, kind, type, value in rows:
            if kind == "event":
                log.append_event(value_codec.decode(json.dumps(value)))
            elif kind == "action":
                log.append_actions([value_codec.decode(json.dumps(value))])
            else:
                log.note(type, time_s, **value)
    return folder


@pytest.mark.parametrize(
    ("name", "ask_after", "num_ends", "at_most", "at_its_speed"),
    [("follow-up.rollmux", 8, 3, 0.05, 0.02), pytest.param("pair.rlmux", 10, 2, 0.15, 0.06, marks=pytest.mark.slow)],
)
def test_the_ends_that_are_said_of_a_recorded_run_come(tmp_path, name, ask_after, num_ends, at_most, at_its_speed):
    found = what_if.recorded(unpacked(name, tmp_path / "run"), ask_after)
    assert len(found) == num_ends
    assert max(abs(end.deviation) for end, _ in found) <= at_most, found
    assert all(end.is_within for end, _ in found), found
    assert max(abs(then) for _, then in found) <= at_its_speed, found

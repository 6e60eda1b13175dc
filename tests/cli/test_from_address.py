"""What a command prints of a running lane is the same from its folder and from its address."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.lane_here import Endless, Lane
from tests.service.pages_server import Pages

from rlmux.cli.main import run_command_line
from rlmux.report.samples import KeptSample, SampleWriter
from rlmux.service.dashboard.schemas.run_schemas import DeviceStatus

RUNNING = "pipelines: [{name: sort, task: sort, steps: 9}]"
WAITING = "pipelines: [{name: copy, task: reverse, steps: 9}]"
Print = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lane, Pages]]:
    """A lane in which `sort` runs, with samples, and `copy` waits."""
    root: Path = tmp_path_factory.mktemp("service") / "root"
    root.mkdir()
    lane = Lane(root, "solo", Endless())
    for text in (RUNNING, WAITING):
        (root / "file.yaml").write_text(text)
        assert run_command_line(["submit", str(root / "file.yaml"), "--to", str(lane.folder)]) == 0
    (lane.folder / "sort").mkdir()
    writer = SampleWriter(lane.folder / "sort" / "samples.db")
    writer.add(1, [_sample()])
    writer.close()
    pages = Pages(root, lanes=["cpu"])
    yield lane, pages
    pages.close()
    lane.close()


def _sample() -> KeptSample:
    return KeptSample(
        prompt=0, sample=0, prompt_text="sort 312", turns=[(True, "123")], reward=1.0, advantage=0.5, stop="stop",
        tokens=7, num_turns=1, first_version=0, last_version=0,
    )  # fmt: skip


@pytest.fixture
def both(served: tuple[Lane, Pages], capsys: Any, monkeypatch: Any) -> Print:
    """(what a command prints of the folder, what it prints of the address)."""
    lane, pages = served
    monkeypatch.setenv("RLMUX_TOKEN", pages.token)

    def run(command: str, *words: str) -> tuple[str, str]:
        found = []
        for place in (str(lane.folder), f"{pages.url}/lanes/cpu"):
            capsys.readouterr()
            assert run_command_line([command, place, *words]) == 0, capsys.readouterr().err
            found.append(capsys.readouterr().out)
        return found[0], found[1]

    return run


LOOKS = [
    *(["status"], ["queue"], ["why", "sort"], ["why", "copy"], ["usage"], ["alerts"]),
    *(["samples", "sort"], ["samples", "sort", "--at", "1/0/0"], ["export"], ["logs", "sort"]),
]


@pytest.mark.parametrize("words", LOOKS, ids=" ".join)
def test_a_running_lane_is_drawn_alike_from_its_folder_and_its_address(both, words):
    here, there = both(*words)
    assert _without_seconds(here) == _without_seconds(there)


@pytest.mark.parametrize("words", LOOKS[:8], ids=" ".join)
def test_json_of_a_running_lane_has_the_same_keys_from_its_folder_and_its_address(both, words):
    here, there = both(*words, "--json")
    assert _keys(json.loads(here)) == _keys(json.loads(there))


def _without_seconds(text: str) -> list[list[str]]:
    """Words of its lines; time goes on between two looks, and a column is as wide as its longest value."""
    return [re.sub(r"\b[\d.]+(?= (s|h)\b)", "N", line).split() for line in text.splitlines()]


def _keys(value: Any) -> Any:
    """The value with each scalar replaced by whether it is null."""
    if isinstance(value, dict):
        return {key: _keys(each) for key, each in value.items()}
    return [_keys(each) for each in value] if isinstance(value, list) else value is None


def test_report_of_an_address_names_what_draws_it(served, capsys):
    _, pages = served
    assert run_command_line(["report", f"{pages.url}/lanes/cpu"]) == 2
    said = capsys.readouterr().err
    assert "status" in said
    assert "folder" in said


def test_room_for_adapters_is_part_of_the_answer():
    room = {"train": {"here": 1, "more": 3}}
    device = {"pool": "train", "pipeline": None, "stage": None, "step": None, "adapters": room}
    assert DeviceStatus.model_validate(device).model_dump() == device

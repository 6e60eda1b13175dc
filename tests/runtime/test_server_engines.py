"""Pipelines that sample with a server of others train end to end, and sharing a device changes none of their bits."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.server_environments import make_environment

from rlmux.core.actions import RunStage
from rlmux.core.events import PipelineFailed
from rlmux.core.model import Stage
from rlmux.engines.servers.one_server import MAX_LOST
from rlmux.rl.config import EngineConfig

STEPS = 2


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment that has the small server; what is measured of it is remembered for the module's tests."""
    folder = tmp_path_factory.mktemp("servers")
    make_environment(folder, "vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
    left = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]
    assert psutil.wait_procs(left, timeout=60)[1] == [], "servers outlived their pipelines"


@pytest.fixture(scope="module")
def pair(real: Any, environment: Path) -> list[Any]:
    """Two pipelines whose rollouts come from a server each."""
    return [served(real, environment, name, seed) for name, seed in (("one", 1), ("other", 2))]


def served(real: Any, environment: Path, name: str, seed: int) -> Any:
    submission = real.submission(name, seed=seed, num_steps=STEPS, max_new_tokens=8)
    engine = EngineConfig(name="vllm", python=str(environment / "python"))
    rollout = replace(submission.config.rollout, engine=engine)
    return replace(submission, config=replace(submission.config, rollout=rollout))


@pytest.fixture(scope="module")
def together(real: Any, pair: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return real.run(tmp_path_factory.mktemp("together"), pair)


def test_a_run_records_what_was_measured_of_a_server_and_what_it_had_cached(together: Any) -> None:
    for note in (notes := [note for note in together.recorder.notes if note.type == "promise"]):
        assert (note.server["name"], note.server["version"], note.server["reloads"]) == ("vllm", "0.32.0", True)
        assert note.server["load_s"] > 0
    assert len(notes) == 2
    hits = [note.metrics["prefix_cache_hits"] for note in together.recorder.notes if note.type == "step"]
    assert len(hits) == 2 * STEPS
    assert all(0.0 <= share < 1.0 for share in hits)


@pytest.mark.slow
def test_two_pipelines_with_servers_share_a_device_and_train_as_alone(
    real: Any, pair: list[Any], together: Any, tmp_path: Path
) -> None:
    assert together.status == {"one": "finished", "other": "finished"}
    alone = real.run(tmp_path / "alone", pair[:1])
    assert alone.sha256["one"] == together.sha256["one"] is not None
    promises = {note.pipeline: note.promise for note in together.recorder.notes if note.type == "promise"}
    assert promises == {"one": "exact", "other": "exact"}


def at_last_rollout(act: dict[str, Callable[[psutil.Process], None]]) -> Callable[[Any, Any], bool]:
    """As each pipeline's last rollout begins, does this to its server, once."""
    left = dict(act)

    def watch(backend: Any, recorder: Any) -> bool:
        for name in list(left):
            generates = (name, Stage.GENERATE, STEPS)
            if any(
                isinstance(action, RunStage) and (action.pipeline, action.stage, action.step) == generates
                for action in recorder.actions
            ):
                left.pop(name)(server_of(recorder, name))
        return False

    return watch


def server_of(recorder: Any, pipeline: str) -> psutil.Process:
    """The server beneath the pipeline's present rollout worker."""
    pids = [
        note.pid
        for note in recorder.notes
        if note.type == "worker" and note.pipeline == pipeline and note.role.startswith("rollout")
    ]
    family = psutil.Process(pids[-1]).children(recursive=True)
    (server,) = [each for each in family if each.cmdline()[1:2] == ["-m"]]
    return server


def misbehave(**how: Any) -> Callable[[psutil.Process], None]:
    """Tells a server to misbehave from now on."""

    def tell(server: psutil.Process) -> None:
        words = server.cmdline()
        url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/misbehave"
        urllib.request.urlopen(url, json.dumps(how).encode(), timeout=60).close()

    return tell


def losses(run: Any) -> dict[str, str]:
    return {note.pipeline: note.reason for note in run.recorder.notes if note.type == "loss"}


@pytest.mark.slow
def test_a_dead_or_forgetful_server_costs_time_and_one_of_another_version_its_pipeline(
    real: Any, environment: Path, pair: list[Any], together: Any, tmp_path: Path
) -> None:
    third = served(real, environment, "third", 3)
    watch = at_last_rollout(
        {
            "one": psutil.Process.kill,
            "other": misbehave(lose=100 * MAX_LOST, lose_after=0),
            "third": misbehave(wrong_version=True),
        }
    )
    run = real.run(tmp_path / "run", [*pair, third], watch=watch)
    assert run.status == {"one": "finished", "other": "finished", "third": "failed"}
    assert {name: run.sha256[name] for name in ("one", "other")} == together.sha256
    reasons = losses(run)
    assert set(reasons) == {"one", "other"}
    assert re.search(rf"vllm lost .* {MAX_LOST + 1} times", reasons["other"])
    (failed,) = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    assert "version 'before'" in failed.reason

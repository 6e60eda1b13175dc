"""A run finds out what its pipelines' engines keep, and refuses what asks for more."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmux.core.errors import UserError
from rlmux.core.events import PipelineFailed
from rlmux.core.model import Cluster, Phase, Pool
from rlmux.policies import make_policy
from rlmux.report.reports import write_report
from rlmux.rl.determinism_class import DeterminismClass
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import RunOptions, run_pipelines

NOISY = """
from rlmux.rl.determinism_class import ProbeCheck, ProbeReport
from rlmux.runtime.workers.planned_workers import RolloutWorker


class Noisy(RolloutWorker):
    def probe(self):
        report = super().probe()
        assert all(check.is_equal or check.is_avoidable for check in report.checks), report
        differs = ProbeCheck(name="alone", failure="a trajectory samples other bits alone", is_equal=False)
        return ProbeReport(checks=(*report.checks, differs), seconds=report.seconds)
"""


@pytest.fixture
def noisy_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend whose rollout workers find that their bits depend on neighbours."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_noisy_worker.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path / "code")
    from my_noisy_worker import Noisy  # type: ignore[import-not-found]

    from rlmux.runtime.workers.planned_workers import RolloutWorker

    def make(*given: Any, **options: Any) -> Any:
        backend = local_backend(*given, **options)
        spawn = backend.workplace.spawn

        def spawn_noisy(name: str, make_worker: Any, args: Any, **more: Any) -> Any:
            return spawn(name, Noisy if make_worker is RolloutWorker else make_worker, args, **more)

        backend.workplace.spawn = spawn_noisy  # type: ignore[method-assign]
        return backend

    return make


def train(
    real: Any,
    folder: Path,
    submissions: list[Any],
    options: RunOptions = RunOptions(),
    *,
    cluster: Cluster | None = None,
    is_overwriting: bool = False,
) -> dict[str, Any]:
    policy = make_policy("rollmux")
    result = run_pipelines(
        cluster or real.cluster(), submissions, policy, folder, options, spec={}, is_overwriting=is_overwriting
    )
    return dict(result.summary["pipelines"])


def test_a_run_states_each_pipelines_promise_and_trains_one_that_asks_for_it(real: Any, tmp_path: Path) -> None:
    asking = replace(real.submission("asking", seed=1, num_steps=2), determinism_class=DeterminismClass.EXACT)
    pipelines = train(real, tmp_path / "run", [asking, real.submission("quiet", seed=2, num_steps=2)])
    assert {name: one["promise"] for name, one in pipelines.items()} == {"asking": "exact", "quiet": "exact"}
    assert {one["status"] for one in pipelines.values()} == {"finished"}
    with sqlite3.connect(tmp_path / "run" / "run.db") as log:
        notes = log.execute("SELECT count(*) FROM log WHERE type = 'promise'").fetchone()
    assert notes == (2,)


def test_a_promise_is_probed_where_one_pool_serves_both_phases(real: Any, tmp_path: Path) -> None:
    both = Cluster(pools={"both": Pool(name="both", phase=Phase.TRAIN, serves_both_phases=True, num_nodes=1)})
    asking = replace(real.submission("asking", seed=1, num_steps=1), determinism_class=DeterminismClass.EXACT)
    pipelines = train(real, tmp_path / "run", [asking], cluster=both)
    assert (pipelines["asking"]["promise"], pipelines["asking"]["status"]) == ("exact", "finished")


def test_a_file_that_asks_for_more_than_its_engines_keep_starts_nothing(
    real: Any, tmp_path: Path, noisy_backend: Any
) -> None:
    asking = replace(real.submission("asking", seed=1, num_steps=2), determinism_class=DeterminismClass.EXACT)
    folder = tmp_path / "run"
    with pytest.raises(UserError) as refused:
        train(real, folder, [real.submission("other", num_steps=2), asking], RunOptions(make_backend=noisy_backend))
    assert str(refused.value) == (
        "pipelines.asking.promise: exact is more than its engines keep on these devices, which is replayable "
        "(alone: a trajectory samples other bits alone); accepted: replayable, statistical, or no promise"
    )
    assert not folder.exists()


def test_a_refused_file_leaves_the_run_that_it_was_to_replace(real: Any, tmp_path: Path, noisy_backend: Any) -> None:
    folder = tmp_path / "run"
    before = train(real, folder, [real.submission("quiet", num_steps=1)])
    asking = replace(real.submission("asking", seed=1, num_steps=2), determinism_class=DeterminismClass.EXACT)
    with pytest.raises(UserError):
        train(real, folder, [asking], RunOptions(make_backend=noisy_backend), is_overwriting=True)
    assert write_report(folder)["pipelines"] == before


@pytest.mark.slow
def test_what_is_not_asked_for_is_found_out_and_told(real: Any, tmp_path: Path, noisy_backend: Any) -> None:
    asking = replace(real.submission("asking", seed=1, num_steps=2), determinism_class=DeterminismClass.REPLAYABLE)
    pipelines = train(real, tmp_path / "run", [asking], RunOptions(make_backend=noisy_backend))
    assert (pipelines["asking"]["promise"], pipelines["asking"]["status"]) == ("replayable", "finished")


@pytest.mark.slow
def test_one_that_was_submitted_later_fails_before_it_trains(real: Any, tmp_path: Path, noisy_backend: Any) -> None:
    """Its devices are others' by then: its own workers find it out, under its first lease of each phase."""
    asking = replace(real.submission("asking", seed=1, num_steps=2), determinism_class=DeterminismClass.EXACT)
    good = real.submission("good", seed=2, num_steps=2)
    run = real.run(tmp_path / "run", [asking, good], make_backend=noisy_backend)
    assert run.status == {"asking": "failed", "good": "finished"}
    [failure] = [event for event in run.recorder.events if isinstance(event, PipelineFailed)]
    assert failure.reason.startswith("pipelines.asking.promise: exact is more than")
    assert not [note for note in run.recorder.notes if note.type == "step" and note.pipeline == "asking"]

"""The machines of a cluster's nodes: the scheduler's, and those of the log, by which a replay decides the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmux.config import load_spec
from rlmux.core.model import Cluster
from rlmux.log.run_log import LogReader
from rlmux.policies import make_policy
from rlmux.runtime import launch
from rlmux.runtime.local import local_backend
from rlmux.runtime.run import RunOptions

FILE = """
cluster:
  pools:
    rollout: {devices: 1}
    train: {devices: 2}
pipelines:
  - name: a
    steps: 3
    seed: 1
    model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 32}
    task: {name: sort}
    algorithm: {prompts_per_step: 2, group_size: 2}
    rollout: {max_new_tokens: 8, slots: 4}
"""


class StopsAfterTheFirstStep:
    def update(self, now_s, events, actions, notes) -> None:
        if any(note.type == "step" for note in notes):
            raise BrokenPipeError(32, "as by a closed output")


@pytest.fixture
def on_machines(monkeypatch):
    """Lets launched runs find these machines of the training nodes, as those on Ray do."""

    def find(*machines: str) -> None:
        def maker(backend: str, address: str | None, cluster: Cluster):
            return local_backend, cluster.with_machines({"train": machines})

        monkeypatch.setattr(launch, "backend_maker", maker)

    return find


def machines_of(scheduler) -> tuple[str, ...]:
    return scheduler.query.placement.cluster.pools["train"].machines


def test_a_resumed_run_is_decided_again_with_the_machines_of_its_second_part(on_machines, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text(FILE)
    run, policy = tmp_path / "run", make_policy("fifo")
    on_machines("a", "b")
    options = RunOptions(listeners=[StopsAfterTheFirstStep()])
    assert not launch.start_run(load_spec("file.yaml"), run, policy=policy, options=options).is_complete
    assert machines_of(launch.scheduler_of(run)) == ("a", "b")
    on_machines("c", "d")
    assert launch.resume_run(launch.spec_of(run), run, policy=policy).is_complete
    with LogReader(run) as log:
        (resumed,) = (row.value for row in log.entries() if row.type == "resumed")
    assert machines_of(launch.scheduler_of(run)) == ("a", "b")
    assert machines_of(launch.scheduler_of(run, resumed)) == ("c", "d")
    assert machines_of(launch.scheduler_of(run, {"pipelines": [], "retried": []})) == (), "an older log's note"

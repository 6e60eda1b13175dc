"""The policy that docs/how-to/write-a-policy.md shows is whole: it runs as it stands there."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from rlmux.core.actions import RunStage
from rlmux.core.scheduler import Scheduler

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-policy.md"


@pytest.fixture
def shortest_first(monkeypatch):
    """The class of the page, from a module of its own."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(source.splitlines()) <= 50
    module = types.ModuleType("shortest_first")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, module.__dict__)
    return module.ShortestFirst()


def test_the_policy_of_the_page_starts_short_work_first_and_ends_every_pipeline(builders, shortest_first):
    scheduler = Scheduler(builders.cluster(rollout=1), shortest_first)
    driver = builders.Driver(scheduler)
    driver.submit(builders.pipeline("first", rollout_s=1.0))
    driver.submit(builders.pipeline("long", rollout_s=9.0), builders.pipeline("short", rollout_s=2.0))
    driver.run()
    rollouts = [action.pipeline for action in driver.actions(RunStage) if action.stage == "generate"]
    assert rollouts.index("short") < rollouts.index("long")


def test_the_policy_of_the_page_begins_with_pipelines_of_which_nothing_is_known(builders, shortest_first):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=1), shortest_first), seconds=lambda _: 2.0)
    driver.submit(builders.pipeline("first"))
    driver.submit(builders.pipeline("known"), replace(builders.pipeline("new"), estimate=None))
    driver.run()
    rollouts = [action.pipeline for action in driver.actions(RunStage) if action.stage == "generate"]
    assert rollouts.index("new") < rollouts.index("known")


@pytest.mark.parametrize("source", ["docs/how-to/write-a-policy.md", "examples/plugin/rlmux_example_plugin.py"])
def test_a_policys_author_imports_one_module(source):
    text = (PAGE.parents[2] / source).read_text(encoding="utf-8")
    of_policies = set(re.findall(r"^ *from (rlmux[\w.]*) import", text, flags=re.MULTILINE))
    assert "rlmux.policy" in of_policies
    inner = ("rlmux.core.decision", "rlmux.core.placement", "rlmux.core.work", "rlmux.core.state", "rlmux.policies")
    assert not [name for name in of_policies if name.startswith(inner)]

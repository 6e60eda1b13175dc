"""A policy of a user's own is held to what every policy promises, and told which promise it broke."""

from __future__ import annotations

import sys
import textwrap

import pytest

from rlmux.core.actions import ReportPolicyFault
from rlmux.core.errors import PolicyError, UserError
from rlmux.core.model import PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy

START = """
import itertools, random
from dataclasses import dataclass, field
from rlmux.policies.baselines import Fifo
from rlmux.policy import Policy, RunWork, start_oldest_first

@dataclass(frozen=True)
class Base(Policy):
    name: str = "base"

    def place(self, pipeline, view):
        return Fifo().place(pipeline, view)

    def dispatch(self, plan):
        return plan.choose(*start_oldest_first(plan))
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """`made(source)`: the policy `Own` of a module that begins with `START`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source: str):
        (tmp_path / "my_policies.py").write_text(START + textwrap.dedent(source), encoding="utf-8")
        sys.modules.pop("my_policies", None)
        return make_policy("my_policies:Own")

    yield make
    sys.modules.pop("my_policies", None)


def drive(builders, policy, **options):
    driver = builders.Driver(Scheduler(builders.cluster(rollout=1), policy), **options)
    driver.submit(builders.pipeline("a"), builders.pipeline("b"))
    driver.run()
    return driver


def test_a_policy_that_keeps_its_promises_runs_under_the_name_that_was_typed(builders, made):
    policy = made("Own = Base")
    assert policy.name == "my_policies:Own"
    drive(builders, policy)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("class Own(Base):\n    __dataclass_params__ = None", "could keep state between decisions; accepted: a @data"),
        ("@dataclass\nclass Own(Policy):\n    name: str = ''\n    place = dispatch = None",
         "could keep state between decisions"),
        ("@dataclass(frozen=True)\nclass Own(Base):\n    seen: list = field(default_factory=list)",
         "could keep state in its field 'seen', which can change"),
        ("class Own: pass", "is no policy; accepted: a subclass of rlmux.policy.Policy"),
        ("class Own:\n    def __init__(self, x): pass", "making it without arguments raised TypeError"),
    ],
)  # fmt: skip
def test_a_policy_that_could_remember_is_refused_when_it_is_made(made, source, line):
    with pytest.raises(UserError) as refused:
        made(source)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return plan.choose(*[RunWork(work=each) for each in plan.ready if count()])", "called again with the same"),
        ("return plan.choose(*plan.ready)", "accepted: RunWork, ChangeFraction"),
        ("return list(start_oldest_first(plan))", "accepted: the plan that it was given, filled"),
        ("yield from start_oldest_first(plan)", "accepted: the plan that it was given, filled"),
        ("plan.choose(*start_oldest_first(plan))", "dispatch returned None; accepted: the plan that it was given"),
        ("return plan.choose(*[RunWork(work=each) for each in [*plan.ready, *plan.ready]])", "which is not ready"),
        ("return plan.choose(*[RunWork(work=each) for each in plan.ready])", "leases 1.0 of"),
        ("return plan.reddy", "dispatch raised AttributeError"),
    ],
)
def test_a_policy_that_breaks_a_promise_is_told_which(builders, made, body, line):
    policy = made(f"""
        calls = itertools.count()

        def count():
            return next(calls) % 2

        class Own(Base):
            def dispatch(self, plan):
                {body}
    """)
    with pytest.raises(PolicyError, match="policy my_policies:Own") as broken:
        drive(builders, policy)
    assert line in str(broken.value)


@pytest.mark.parametrize("method", ["place", "rebalance", "dispatch"])
def test_a_policy_that_raises_in_a_run_is_reported_once_and_the_run_goes_on(builders, made, method):
    arguments = "self, pipeline, view" if method == "place" else "self, view"
    policy = made(f"""
        class Own(Base):
            def {method}({arguments}):
                return view.no_such_thing
    """)
    driver = drive(builders, policy, raises_policy_faults=False)
    (fault,) = driver.actions(ReportPolicyFault)
    assert (fault.policy, fault.method) == ("my_policies:Own", method)
    assert fault.error.startswith(f"policy my_policies:Own: {method} raised AttributeError: ")
    assert fault.error.endswith("(my_policies.py, line 19)")
    query = driver.scheduler.query
    assert {query.status(one) for one in query.pipelines()} == {PipelineStatus.FINISHED}

"""Every wait for admission is bounded under every policy, where pipelines end: whatever comes later, and how often."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from rlmux.core.actions import Admit, Release
from rlmux.core.model import PhaseSeconds, Pipeline, PipelineId, PipelineStatus
from rlmux.core.scheduler import Scheduler
from rlmux.policies import POLICIES, make_policy

UNKNOWN = PhaseSeconds(rollout_s=3.0, train_s=2.0)
"""What a step of a pipeline without estimate takes."""


@st.composite
def submissions(draw):
    """(seconds since the one before, pipeline): small ones and wide ones, some without estimate, some that lie."""
    made = []
    for number in range(draw(st.integers(4, 16))):
        phases = PhaseSeconds(rollout_s=draw(st.integers(1, 6)), train_s=draw(st.integers(1, 6)))
        pipeline = Pipeline(
            id=PipelineId(f"p{number}"),
            num_steps=draw(st.integers(1, 6)),
            num_rollout_nodes=draw(st.sampled_from([1, 1, 1, 2, 3])),
            num_train_nodes=draw(st.sampled_from([1, 1, 2])),
            estimate=phases if draw(st.integers(0, 5)) else None,
            slo_slowdown=draw(st.sampled_from([1.0, 1.5, 3.0, math.inf])),
        )
        made.append((draw(st.integers(0, 8)), pipeline))
    return made


def stream(num_later: int) -> list[tuple[int, Pipeline]]:
    """Two that need one node, one that needs all, and then one more small one every 5 s."""
    small = PhaseSeconds(rollout_s=2.0, train_s=1.0)
    first = [Pipeline(id=PipelineId(f"s{number}"), num_steps=3 + 2 * number, estimate=small) for number in range(2)]
    wide = Pipeline(id=PipelineId("wide"), num_steps=2, num_rollout_nodes=3, num_train_nodes=2, estimate=small)
    later = [Pipeline(id=PipelineId(f"t{number}"), num_steps=5, estimate=small) for number in range(num_later)]
    return [*((0, one) for one in first), (0, wide), *((5, one) for one in later)]


class Watched:
    """A driver that notes when each pipeline became the head of the queue, and what start it was promised."""

    def __init__(self, builders, policy: str, *, error: float) -> None:
        self.scheduler = Scheduler(builders.cluster(rollout=3, train=2), make_policy(policy))
        self.driver = builders.Driver(self.scheduler, self._seconds)
        self.error = error
        """Real seconds over estimated ones."""
        self.head_since_s: dict[PipelineId, float] = {}

    def _seconds(self, action) -> float:
        estimate = self.scheduler.query.pipeline(action.pipeline).pipeline.estimate or UNKNOWN
        seconds = {"generate": estimate.rollout_s, "update": estimate.train_s}.get(action.stage, 0.0)
        return seconds * (self.error if int(action.order) % 3 else 1.0)

    def play(self, made: list[tuple[int, Pipeline]]) -> None:
        for gap_s, pipeline in made:
            until_s = self.driver.now_s + gap_s
            while self.driver.next_end_s() <= until_s:
                self._step()
            self.driver.now_s = max(until_s, self.driver.now_s)
            self.driver.submit(pipeline)
            self._note()
        while self._step():
            pass

    def _step(self) -> bool:
        has_ended = self.driver.step()
        self._note()
        return has_ended

    def _note(self) -> None:
        head = self.scheduler.query.first_in_queue
        if head is not None:
            self.head_since_s.setdefault(head, self.driver.now_s)

    def times(self, kind: type) -> dict[PipelineId, float]:
        return {action.pipeline: time_s for time_s, action in self.driver.log if isinstance(action, kind)}


@pytest.mark.parametrize("policy", POLICIES)
@given(made=submissions(), error=st.sampled_from([1.0, 0.3, 4.0]))
@example(made=stream(16), error=1.0)
@settings(max_examples=examples(10), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_first_in_the_queue_starts_when_all_admitted_before_its_promise_have_ended(builders, policy, made, error):
    watched = Watched(builders, policy, error=error)
    watched.play(made)
    query = watched.scheduler.query
    over = (PipelineStatus.FINISHED, PipelineStatus.REFUSED)
    assert all(query.status(pipeline.id) in over for _, pipeline in made)
    began_s, ended_s = watched.times(Admit), watched.times(Release)
    for name, since_s in watched.head_since_s.items():
        reserved_start_s = query.reserved_start_s(name)
        kept_from_s = since_s if reserved_start_s == math.inf else reserved_start_s
        before = [ended_s[other] for other, time_s in began_s.items() if other != name and time_s <= kept_from_s]
        assert began_s[name] <= max(kept_from_s, *before) + 1e-6, name


@pytest.mark.parametrize(
    "policy",
    [  # two turns bound the waits of `gavel`, and `jigsaw` plans for long
        pytest.param(name, marks=[pytest.mark.slow] * (name == "jigsaw")) for name in POLICIES if name != "gavel"
    ],
)
def test_how_many_come_after_a_wide_pipeline_does_not_change_when_it_starts(builders, policy):
    starts = []
    for num_later in (8, 24):
        watched = Watched(builders, policy, error=1.0)
        watched.play(stream(num_later))
        starts.append(watched.times(Admit)[PipelineId("wide")])
    assert starts[0] == starts[1]
    assert starts[0] <= 2 * (3 + 5) * 3.0, "when both that came before it have ended, had they run one after another"

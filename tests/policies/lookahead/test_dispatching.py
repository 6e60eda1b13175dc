"""Dispatch rules: steps per cycle, gaps in them, and who may overtake."""

from __future__ import annotations

import random

from rlmux.core.events import PipelineSubmitted
from rlmux.core.model import Stage
from rlmux.core.scheduler import Scheduler
from rlmux.policies.rlmux import RlMux


def run(builders, pipelines, *, fill, num_rollout, at_s=None):
    """Until the end; (time of each step's end by pipeline) with one training node for everybody."""
    driver = builders.Driver(
        Scheduler(builders.cluster(rollout=num_rollout, train=1), RlMux(fill=fill, varies_steps_per_cycle=False))
    )
    waiting = sorted(zip(at_s or [0.0] * len(pipelines), pipelines, strict=True), key=lambda one: one[0])
    for submit_s, one in waiting:
        while driver.next_end_s() < submit_s:
            driver.step()
        driver.now_s = submit_s
        driver.send(PipelineSubmitted(time_s=submit_s, pipeline=one))
    driver.run()
    return ends(driver, pipelines)


def ends(driver, pipelines):
    train_s = {one.id: one.estimate.train_s for one in pipelines}
    by_pipeline: dict[str, list[float]] = {one.id: [] for one in pipelines}
    for time_s, name, stage, _ in driver.starts():
        if stage == Stage.UPDATE:
            by_pipeline[name].append(time_s + train_s[name])
    return by_pipeline


def test_a_gap_that_a_slot_leaves_is_filled_and_no_member_pays(builders):
    pair = [
        builders.pipeline("long", rollout_s=10.0, train_s=2.0, num_steps=4),
        builders.pipeline("short", rollout_s=2.0, train_s=1.0, num_steps=12),
    ]
    strict = run(builders, pair, fill=False, num_rollout=2)
    filled = run(builders, pair, fill=True, num_rollout=2)
    assert filled["long"] == strict["long"]
    assert strict["short"][3] >= 3 * 12.0  # one step for each of the long one's
    assert filled["short"][3] <= 13.0


def test_filling_gaps_never_makes_a_step_end_later_than_the_strict_cycle_would(builders):
    generator = random.Random(5)
    num_sooner = 0
    for _ in range(60):
        group = [
            builders.pipeline(
                f"p{n}",
                rollout_s=float(generator.randint(1, 12)),
                train_s=float(generator.randint(1, 12)),
                num_steps=generator.randint(2, 6),
            )
            for n in range(generator.randint(2, 4))
        ]
        num_rollout = generator.randint(1, len(group))
        strict = run(builders, group, fill=False, num_rollout=num_rollout)
        filled = run(builders, group, fill=True, num_rollout=num_rollout)
        for name, before in strict.items():
            assert all(now <= then + 1e-9 for now, then in zip(filled[name], before, strict=True)), (group, name)
            num_sooner += sum(now < then - 1e-9 for now, then in zip(filled[name], before, strict=True))
    assert num_sooner > 40


def test_a_newcomer_that_would_break_its_slo_overtakes_members_that_have_time(builders):
    group = [
        builders.pipeline("a", rollout_s=3.0, train_s=3.0, slo_slowdown=2.0, num_steps=6),
        builders.pipeline("b", rollout_s=5.0, train_s=6.0, slo_slowdown=3.0, num_steps=6),
        builders.pipeline("c", rollout_s=5.0, train_s=3.0, slo_slowdown=1.7, num_steps=3),
    ]
    at_s = [0.0, 0.0, 28.0]

    def slowdowns(*, fill):
        ended = run(builders, group, fill=fill, num_rollout=3, at_s=at_s)
        return [
            (ended[one.id][-1] - submit_s) / (one.num_steps * one.estimate.solo_s)
            for one, submit_s in zip(group, at_s, strict=True)
        ]

    assert slowdowns(fill=False)[2] > 1.8
    assert all(mine <= one.slo_slowdown for mine, one in zip(slowdowns(fill=True), group, strict=True))


def test_a_newcomer_begins_in_the_present_cycle_however_far_ahead_gaps_brought_another(builders):
    group = [
        builders.pipeline("long", rollout_s=20.0, train_s=2.0, num_steps=20),
        builders.pipeline("short", rollout_s=2.0, train_s=1.0, num_steps=60),
        builders.pipeline("new", rollout_s=18.0, train_s=25.0, num_steps=2),
    ]
    ended = run(builders, group, fill=True, num_rollout=3, at_s=[0.0, 0.0, 50.0])
    assert len([end_s for end_s in ended["short"] if end_s < 50.0]) >= 12
    assert ended["new"][0] <= 50.0 + 18.0 + 25.0 + 22.0

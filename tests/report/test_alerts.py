"""Rules fire on what is wrong and stay quiet on what is only noisy; the fold is the same step by step and at once."""

from __future__ import annotations

import math
import random
import shutil
from typing import get_args

import pytest
from tests.log_script import LogScript

from rlmux.config.tree import AlertRule
from rlmux.core.actions import ReportPolicyFault
from rlmux.core.events import PipelineCancelled
from rlmux.core.model import Stage, Urgency
from rlmux.log.notes import ResumedNote
from rlmux.report.alerts import LOOKED_AT, RULES, Alerts, MetricHistory, disk_alert
from rlmux.report.slos import StepTime
from rlmux.report.timeline.history import History


def run_of(curve: dict[str, list[float]], *, slo: float = math.inf) -> History:
    script = LogScript()
    script.submit(0.0, "sort", num_steps=10_000, slo_slowdown=slo)
    for step in range(1, max(map(len, curve.values())) + 1):
        metrics = {name: values[step - 1] for name, values in curve.items()}
        script.note(float(step), "step", pipeline="sort", step=step, metrics=metrics)
    return script.history()


def alerts_of(history: History, times: list[StepTime] | None = None, *, now_s: float = 0.0) -> list:
    return Alerts().look(history, {"sort": times or []}, now_s=now_s, is_going_on=True)


def rules_of(curve: dict[str, list[float]]) -> dict[str, int | None]:
    return {alert.rule: alert.step for alert in alerts_of(run_of(curve))}


def rising(chance: random.Random, num: int, noise: float = 0.1) -> list[float]:
    return [0.8 - 0.6 * math.exp(-step / 60) + chance.gauss(0.0, noise) for step in range(num)]


def clean(chance: random.Random, num: int) -> dict[str, list[float]]:
    return {
        "reward_mean": rising(chance, num),
        "reward_std": [0.3 + chance.random() / 10 for _ in range(num)],
        "kl": [abs(chance.gauss(0.02, 0.01)) for _ in range(num)],
        "entropy": [1.5 * math.exp(-step / 300) + chance.gauss(0.0, 0.05) for step in range(num)],
        "logprob_gap": [abs(chance.gauss(0.0, 1e-6)) for _ in range(num)],
        "mismatch_kl": [abs(chance.gauss(0.0, 1e-3)) for _ in range(num)],
        "loss": [chance.gauss(0.0, 1.0) for _ in range(num)],
        "grad_norm": [abs(chance.gauss(1.0, 0.5)) for _ in range(num)],
    }


def test_a_hundred_noisy_curves_raise_no_alarm():
    fired = [rules_of(clean(random.Random(seed), 120)) for seed in range(100)]
    assert [one for one in fired if one] == []


COLLAPSES = {
    "reward_collapse": {"reward_mean": 0.05},
    "kl_blowup": {"kl": 2.0},
    "kl_huge": {"kl": 30.0},
    "engine_trainer_gap": {"logprob_gap": 0.3},
    "engine_mismatch": {"mismatch_kl": 0.2},
    "entropy_collapse": {"entropy": 1e-3},
    "no_signal": {"reward_std": 0.0},
    "nonfinite": {"loss": math.nan},
}


@pytest.mark.parametrize("rule", COLLAPSES)
def test_a_collapse_fires_within_ten_steps_and_names_its_first(rule):
    for seed in range(10):
        chance = random.Random(seed)
        curve, begun = clean(chance, 100), chance.randrange(60, 90)
        for name, value in COLLAPSES[rule].items():
            curve[name] = [
                *curve[name][: begun - 1],
                *(value + (0.01 * chance.random() if value else 0.0) for _ in range(10)),
            ]
        curve = {name: values[: begun + 9] for name, values in curve.items()}
        fired = rules_of(curve)
        assert rule in fired, (rule, seed, fired)
        assert begun <= fired[rule] <= begun + 9


def test_a_rule_is_over_with_the_first_step_that_is_well():
    chance = random.Random(0)
    curve = clean(chance, 80)
    curve["kl"][70:75] = [3.0] * 5
    assert "kl_blowup" not in rules_of(curve)
    assert "kl_blowup" in rules_of({name: values[:75] for name, values in curve.items()})


def test_every_rule_has_a_collapse_that_fires_it():
    assert {rule.name for rule in RULES} == COLLAPSES.keys()


def test_a_fold_step_by_step_is_the_fold_of_all_steps():
    chance = random.Random(3)
    curve = clean(chance, 90)
    curve["reward_mean"][60:] = [0.0] * 30
    whole, alerts = run_of(curve), Alerts()
    growing = run_of({name: values[:1] for name, values in curve.items()})
    for step in range(1, 91):
        growing.pipelines["sort"].metrics[step] = whole.pipelines["sort"].metrics[step]
        seen = alerts.look(growing, {}, now_s=0.0, is_going_on=True)
    assert seen == alerts_of(whole)
    assert [alert.rule for alert in seen] == ["reward_collapse"]


def test_steps_that_are_to_be_done_again_take_their_alerts_back():
    chance = random.Random(5)
    curve = clean(chance, 80)
    curve["kl"][70:] = [20.0] * 10
    history, alerts = run_of(curve), Alerts()
    assert alerts.look(history, {}, now_s=0.0, is_going_on=True)
    for step in range(60, 81):
        del history.pipelines["sort"].metrics[step]
    assert alerts.look(history, {}, now_s=0.0, is_going_on=True) == []


def steps(*seconds: float) -> list[StepTime]:
    ends = [sum(seconds[: at + 1]) for at in range(len(seconds))]
    return [StepTime(at, end_s, spent_s, 1.0) for at, (end_s, spent_s) in enumerate(zip(ends, seconds, strict=True), 1)]


@pytest.mark.parametrize(("seconds", "rule"), [(1.2, None), (1.45, "slo_at_risk"), (1.6, "slo_broken")])
def test_the_last_five_steps_are_held_against_the_slo(seconds, rule):
    history = run_of({"reward_mean": [0.5]}, slo=1.5)
    found = alerts_of(history, steps(9.0, *[seconds] * 6))
    assert [alert.rule for alert in found] == ([rule] if rule else [])


def test_a_pipeline_stands_still_after_half_an_hour_and_six_of_its_steps():
    history = run_of({"reward_mean": [0.5]})
    assert alerts_of(history, steps(9.0, 10.0), now_s=1800.0) == []
    (alert,) = alerts_of(history, steps(9.0, 10.0), now_s=1900.0)
    assert (alert.rule, alert.step, alert.text) == (
        "stands_still", 3, "no step for 31 min; one usually takes 9.5 s",
    )  # fmt: skip
    assert alerts_of(history, steps(900.0, 900.0), now_s=1800.0 + 5000.0) == []
    assert Alerts().look(history, {}, now_s=1e6, is_going_on=False) == []


def test_a_disk_is_low_below_a_twentieth(tmp_path, monkeypatch):
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000 * 10**9, 960 * 10**9, 40 * 10**9))
    assert disk_alert(tmp_path).text == "40.0 of 1000 GB are free"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000 * 10**9, 900 * 10**9, 100 * 10**9))
    assert disk_alert(tmp_path) is None


def test_a_pipelines_file_switches_a_rule_off_gives_it_another_level_or_more_steps():
    curve = {"reward_mean": [0.5] * 30, "reward_std": [0.0] * 30, "kl": [0.01] * 20 + [30.0] * 10}

    def fired(**rules: dict) -> dict[str, str]:
        history = run_of(curve)
        history.alert_rules["sort"] = rules
        return {alert.rule: alert.level for alert in alerts_of(history)}

    assert fired() == {"kl_blowup": "warning", "kl_huge": "critical", "no_signal": "warning"}
    assert fired(kl_blowup={"level": "off"}, no_signal={"level": "info", "steps": None}) == {
        "kl_huge": "critical",
        "no_signal": "info",
    }
    assert fired(no_signal={"steps": 31}, kl_huge={"steps": 10}) == {"kl_blowup": "warning", "kl_huge": "critical"}
    assert "kl_huge" not in fired(kl_huge={"steps": 11})


def test_the_rules_that_a_file_may_name_are_those_about_a_pipeline():
    named = {rule.name for rule in RULES} | {"slo_at_risk", "slo_broken", "stands_still"}
    assert set(get_args(AlertRule)) == named


def test_rules_read_only_metrics_whose_curves_are_kept() -> None:
    asked: set[str] = set()

    class Asked(dict):  # type: ignore[type-arg]
        def get(self, name, default=None):
            asked.add(name)
            return super().get(name, default)

        def __contains__(self, name):
            asked.add(name)
            return super().__contains__(name)

    for rule in RULES:
        rule.look(Asked())
        rule.look(Asked({name: MetricHistory(num=1, last=0.0) for name in LOOKED_AT}))
    assert asked == set(LOOKED_AT)


def test_a_filler_that_scores_alike_and_waits_raises_no_alarm():
    script = LogScript()
    script.submit(0.0, "eval", num_steps=10_000, urgency=Urgency.FILLER, stages=(Stage.GENERATE, Stage.REWARD))
    for step in range(1, 60):
        metrics = {"reward_mean": 0.9 if step < 20 else 0.0, "reward_std": 0.0}
        script.note(float(step), "step", pipeline="eval", step=step, metrics=metrics)
    assert Alerts().look(script.history(), {"eval": []}, now_s=1e6, is_going_on=True) == []


def test_a_policy_whose_decisions_fail_is_one_alert_until_the_run_is_resumed():
    script = LogScript()
    script.submit(0.0, "sort", num_steps=10)
    for error in ("KeyError: 1", "KeyError: 2"):
        fault = ReportPolicyFault(policy="own:Policy", method="dispatch", error=error)
        script.event(PipelineCancelled(time_s=1.0, pipeline="another"), fault)
    (alert,) = alerts_of(script.history())
    assert (alert.rule, alert.level, alert.pipeline) == ("policy_fault", "warning", None)
    assert alert.text == "policy own:Policy failed in dispatch: KeyError: 1; 1 more error is in the log"
    script.note(2.0, "resumed")
    assert alerts_of(script.history()) == []


def held_and_read(uses: list[float | None], *, every_s: float = 15.0) -> History:
    """A pipeline that holds both devices, of which one has these readings and the other computes."""
    script = LogScript()
    script.submit(0.0, "sort")
    for number, use in enumerate(uses, 1):
        devices = {"rollout-0.0": {"use": use}, "train-0.0": {"use": 0.9}}
        script.note(number * every_s, "hardware", devices=devices, host_memory_bytes=2e9, host_memory_used_bytes=1e9)
    return script.history()


@pytest.mark.parametrize(
    ("uses", "is_alert"),
    [
        ([0.0] * 42, True),
        ([0.9] * 5 + [0.01] * 41, True),
        ([0.0] * 41 + [0.3], False),
        ([0.0] * 39, False),  # not yet for ten minutes
        ([None] * 60, False),  # a machine without this counter
    ],
)
def test_a_device_that_is_held_and_computes_nothing_for_ten_minutes_is_an_alert(uses, is_alert):
    found = [alert for alert in alerts_of(held_and_read(uses)) if alert.rule == "held_idle"]
    assert len(found) == is_alert
    for alert in found:
        assert alert.text == "held and idle for 10 min by the device's own counter: rollout-0.0 (sort)"
        assert (alert.level, alert.pipeline) == ("warning", None)


def test_readings_before_a_stop_say_nothing_of_the_run_after_it():
    history = held_and_read([0.0] * 42)
    history._on_note(700.0, ResumedNote(pipelines=[], retried=[]))
    assert alerts_of(history) == []

"""Sub-stages inside groups: what `rlmux` makes of pools that are kept apart, and of those that it may share."""

from __future__ import annotations

import pytest

from rlmux.core.actions import Admit
from rlmux.core.events import PipelineSubmitted
from rlmux.core.model import Cluster, Phase, Pipeline, PipelineId, Pool
from rlmux.core.scheduler import Scheduler
from rlmux.policies import make_policy
from rlmux.sim.simulator import simulate
from rlmux.sim.workloads.substage_pairs import AIME_4B, GSM8K_06B, GSM8K_4B, MATH_06B, MATH_4B, MATH_8B, crowd


def seconds(workload, policy: str, **options) -> float:
    result = simulate(workload, make_policy(policy, **options), checks=True)
    assert all(one.steps == 3 for one in result.pipelines)
    return 3600 * result.hours


def apart(*pair, num_gpus=8, **options):
    return crowd(pair, num_gpus=num_gpus, num_steps=3, deployment="disaggregated", **options)


def test_in_pools_kept_apart_sub_stages_beside_each_other_end_sooner_than_the_cycle():
    workload = apart(MATH_06B, MATH_06B)
    assert seconds(workload, "rlmux", keeps_pools_apart=True) < 0.8 * seconds(workload, "rollmux")


def test_pools_stay_apart_where_devices_share_hardware():
    """Elsewhere, without estimates and prices, nodes serve both phases."""
    assert is_placed_on_both_pools(shares_hardware=False)
    assert not is_placed_on_both_pools(shares_hardware=True)


def is_placed_on_both_pools(*, shares_hardware: bool) -> bool:
    pools = {
        phase.value: Pool(name=phase.value, phase=phase, num_nodes=2, shares_hardware=shares_hardware)
        for phase in (Phase.ROLLOUT, Phase.TRAIN)
    }
    scheduler = Scheduler(Cluster(pools=pools), make_policy("rlmux"), raises_policy_faults=True)
    actions = scheduler.handle(PipelineSubmitted(time_s=0.0, pipeline=Pipeline(id=PipelineId("a"), num_steps=2)))
    (admit,) = [action for action in actions if isinstance(action, Admit)]
    return "train" in {node.pool for node in admit.placement.rollout_nodes}


def test_the_cycle_is_kept_where_no_other_schedule_is_clearly_shorter():
    """Rollout and training take as long as each other: two pipelines in turns leave nothing idle."""
    workload = apart(MATH_8B, MATH_8B)
    cycle_s = seconds(workload, "rollmux")
    assert seconds(workload, "rlmux", keeps_pools_apart=True) == pytest.approx(cycle_s, rel=0.001)


@pytest.mark.parametrize("slo_slowdown", [1.3, 1.6])
def test_in_pools_kept_apart_every_slo_holds_that_the_cycle_holds(slo_slowdown):
    workload = apart(MATH_4B, MATH_4B, slo_slowdown=slo_slowdown)
    kept = [
        simulate(workload, make_policy(name, **options), checks=True).slo_attainment
        for name, options in (("rollmux", {}), ("rlmux", {"keeps_pools_apart": True}))
    ]
    assert kept == [1.0, 1.0]


def test_tails_leave_devices_of_a_rollout_pool_to_the_next_member_without_any_table():
    """Half of the slots are empty, so a shard that finds its device held by a tail costs its sibling little."""
    workload = apart(GSM8K_06B, GSM8K_06B, num_gpus=16, sequences_per_device=64)
    whole = {"keeps_pools_apart": True, "fractions": False}
    with_tails = seconds(workload, "rlmux", **whole)
    assert with_tails < 0.95 * seconds(workload, "rlmux", tails=False, **whole)
    assert with_tails < seconds(workload, "rollmux")


def test_a_shard_that_was_paused_to_migrate_goes_to_a_device_that_it_may_share():
    """It would be paused again and again at one moment if what started there meanwhile kept it out."""
    crowded = crowd((GSM8K_06B, GSM8K_4B, MATH_06B, AIME_4B), num_gpus=8, num_steps=3)
    result = simulate(crowded, make_policy("rlmux", fill=False))
    assert result.events < 1000


def test_pools_kept_apart_serve_their_own_phase_alone():
    workload = apart(GSM8K_06B, GSM8K_06B)
    made = simulate(workload, make_policy("rlmux", keeps_pools_apart=True), spans_until_s=1e9)
    assert {(span.stage == "generate", device.pool) for span in made.spans for device in span.devices} == {
        (True, "rollout"),
        (False, "train"),
    }


@pytest.mark.parametrize("deployment", ["shared", "disaggregated"])
def test_halves_of_a_device_end_two_alike_sooner_than_the_smaller_part_for_each(deployment):
    workload = crowd((MATH_4B, MATH_4B), num_gpus=8, num_steps=3, deployment=deployment)
    assert seconds(workload, "rlmux") < 0.995 * seconds(workload, "jigsaw")

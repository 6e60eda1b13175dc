"""The section `shares` of a file: what it comes to, and how its mistakes read."""

from __future__ import annotations

import pytest

from rlmux.config.load import load_spec
from rlmux.config.service_file import load_service_file
from rlmux.config.shares import parse_shares
from rlmux.config.tree import KeepConfig
from rlmux.core.errors import SpecError
from rlmux.core.model import Account
from rlmux.core.queue_order import AccountShare, Quota, Share, ShareSettings

CLUSTER = "cluster: {pools: {rollout: {devices: 1, usd_per_gpu_hour: 2}, train: {devices: 1}}}\n"
SHARES = """shares:
  half_life_h: 24
  parks: false
  projects:
    lab: {weight: 2, guarantee: 0.25, quota: {devices: 4, device_hours_a_day: 10}}
    vision: {quota: {usd_per_hour: 12.5, budget_usd: {limit: 500, per: 2w}}}
  users:
    ann: {quota: {running: 2, waiting: 5}}
"""
SETTINGS = ShareSettings(
    half_life_s=86_400.0,
    parks=False,
    accounts=(
        AccountShare(
            account=Account("lab", ""),
            share=Share(weight=2.0, guarantee=0.25),
            quota=Quota(max_devices=4, device_hours_a_day=10.0),
        ),
        AccountShare(
            account=Account("vision", ""),
            quota=Quota(max_usd_per_hour=12.5, budget_usd=500.0, budget_period_s=14 * 86_400.0),
        ),
        AccountShare(account=Account("", "ann"), quota=Quota(max_running=2, max_waiting=5)),
    ),
)


def test_the_section_is_what_the_scheduler_is_told(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CLUSTER + SHARES)
    assert load_spec(path, may_be_empty=True).shares == SETTINGS
    assert parse_shares(SHARES, "shares.yaml") == SETTINGS
    path.write_text(load_spec(path, may_be_empty=True).resolved)
    assert load_spec(path, may_be_empty=True).shares == SETTINGS


@pytest.mark.parametrize("quota", ["usd_per_hour: 1", "budget_usd: {limit: 1}"])
def test_dollars_of_a_cluster_without_prices_are_refused(tmp_path, quota):
    path = tmp_path / "run.yaml"
    path.write_text(
        CLUSTER.replace(", usd_per_gpu_hour: 2", "") + f"shares: {{users: {{ann: {{quota: {{{quota}}}}}}}}}\n"
    )
    with pytest.raises(SpecError, match="the quota of ann is in dollars, and no pool has a price; accepted: usd_per"):
        load_spec(path, may_be_empty=True)


def test_a_file_without_the_section_sets_nothing(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CLUSTER)
    assert load_spec(path, may_be_empty=True).shares is None


def test_the_shares_of_a_service_hold_in_each_lane(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(f"{SHARES}lanes:\n  one: {{{CLUSTER.strip()}}}\n  two: {{{CLUSTER.strip()}}}\n")
    lanes = load_service_file(path, policies=["rollmux"])
    assert [lane.spec.shares for lane in lanes.values()] == [SETTINGS, SETTINGS]


def test_what_a_service_keeps_holds_in_each_lane_and_is_not_a_lanes_own(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(f"keep: 30d\nlanes:\n  one: {{{CLUSTER.strip()}}}\n  two: {{{CLUSTER.strip()}}}\n")
    lanes = load_service_file(path, policies=["rollmux"])
    assert [lane.spec.keep for lane in lanes.values()] == [KeepConfig(ended="30d")] * 2
    path.write_text(f"lanes:\n  one: {{{CLUSTER.strip()}, keep: 30d}}\n")
    with pytest.raises(SpecError, match=r"lanes.one.keep .*holds in every lane; accepted: keep: beside lanes"):
        load_service_file(path, policies=["rollmux"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shares: {projects: {lab: {weight: 0}}}", "shares.projects.lab.weight"),
        ("shares: {projects: {lab: {guarantee: 2}}}", "shares.projects.lab.guarantee"),
        ("shares: {users: {ann: {guarantee: 0.5}}}", "shares.users.ann.guarantee is 0.5: unknown key"),
        ("shares: {users: {ann: {quota: {devices: 0}}}}", "shares.users.ann.quota.devices"),
        (
            "shares: {users: {ann: {quota: {waiting: 0}}}}",
            "shares.users.ann.quota.waiting is 0; accepted: a whole number, 1 or more",
        ),
        ("shares: {users: {ann: {quota: {budget_usd: {limit: 0}}}}}", "budget_usd.limit is 0"),
        ("shares: {users: {ann: {quota: {budget_usd: 3}}}}", "shares.users.ann.quota.budget_usd"),
        (
            "shares: {users: {ann: {quota: {budget_usd: {limit: 1, per: 3 days}}}}}",
            "per is '3 days'; accepted: a whole number and h, d or w, such as 30d",
        ),
        ("shares: {users: {'a b': {}}}", "shares.users"),
        ("policy: solo", "has no section shares"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text, message):
    with pytest.raises(SpecError) as error:
        parse_shares(text, "s.yaml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_shares_of_one_lane_are_refused_with_their_place(tmp_path):
    path = tmp_path / "lanes.yaml"
    path.write_text(f"lanes:\n  small:\n    {CLUSTER}    shares:\n      users: {{ann: {{weight: 2}}}}\n")
    with pytest.raises(SpecError, match=r"lanes.yaml:4: lanes.small.shares .*accepted: shares: beside lanes"):
        load_service_file(path, policies=["rollmux"])

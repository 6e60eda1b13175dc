"""The section `shares` of a file: what it comes to, and how its mistakes read."""

from __future__ import annotations

import pytest

from rlmux.config.load import load_spec
from rlmux.config.service_file import load_service_file
from rlmux.config.shares import parse_shares
from rlmux.core.errors import SpecError
from rlmux.core.model import Account
from rlmux.core.offers import AccountShare, Quota, Share, ShareSettings

CLUSTER = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}\n"
SHARES = """shares:
  half_life_h: 24
  parks: false
  projects:
    lab: {weight: 2, guarantee: 0.25, quota: {devices: 4, device_hours_a_day: 10}}
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


def test_a_file_without_the_section_sets_nothing(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CLUSTER)
    assert load_spec(path, may_be_empty=True).shares is None


def test_the_shares_of_a_service_hold_in_each_lane(tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(f"{SHARES}lanes:\n  one: {{{CLUSTER.strip()}}}\n  two: {{{CLUSTER.strip()}}}\n")
    lanes = load_service_file(path, folder=tmp_path, policies=["rollmux"])
    assert [spec.shares for spec in lanes.values()] == [SETTINGS, SETTINGS]


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
        ("shares: {users: {'a b': {}}}", "shares.users"),
        ("policy: solo", "has no section shares"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text, message):
    with pytest.raises(SpecError) as error:
        parse_shares(text, "s.yaml")
    assert message in str(error.value)
    assert "\n" not in str(error.value)

"""A service as a user starts it: real processes, killed at the worst moments."""

from __future__ import annotations

import pytest

from rlmux.cli.main import run_command_line
from rlmux.config.service_file import load_service_file
from rlmux.core.errors import UserError
from rlmux.policies import POLICIES
from rlmux.service.lanes.controllers import LaneController
from rlmux.service.lanes.root import open_root

pytestmark = pytest.mark.xdist_group("service")  # one service for all
CLUSTER = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}"


def test_a_killed_server_leaves_its_lanes_and_finds_them_again(service):
    service.until_up()
    pid = service.controller
    service.kill()
    service.start()
    service.until(lambda: service.client.get("/lanes/cpu").json().get("state") == "running")
    assert service.controller == pid
    assert service.client.get("/lanes/cpu").json()["banner"] is None


def test_a_killed_controller_is_started_again(service):
    service.until_up()
    pid = service.controller
    service.kill_controller()
    service.until(lambda: service.controller not in (None, pid))
    service.until_up()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lanes: {}", "service.yaml:1: lanes is an empty mapping; accepted: a mapping, at least 1"),
        ("lanes: {'a b': {%s}}", "lanes.a b cannot be a name; accepted: 1 to 64 letters, digits, '-' and '_'"),
        ("lanes: {bundles: {%s}}", "lanes.bundles cannot be named so; accepted: any but bundles"),
        ("lanes: {a: {%s, polici: rlmux}}", "lanes.a.polici is 'rlmux': unknown key; nearest: policy"),
        ("lanes: {a: {%s, policy: rlmx}}", "policy is 'rlmx': no such policy; nearest: rlmux"),
        ("lanes: {a: {cluster: {pools: {rollout: {}, train: {}}}}}", "cluster.pools.rollout.devices is missing"),
        ("lanes: {a: {%s}}\nserve: {}", "serve is an empty mapping: unknown key; accepted: lanes"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_nothing_is_made(tmp_path, capsys, monkeypatch, text, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.yaml").write_text(text.replace("%s", CLUSTER))
    assert run_command_line(["serve", "service.yaml", "--out", "root"]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not (tmp_path / "root").exists()


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty, and no service was in it; accepted: a new or an empty folder"):
        open_root(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_one_server_at_a_time_has_a_services_folder(tmp_path):
    with open_root(tmp_path), pytest.raises(UserError, match="another process is writing here: pid"):
        open_root(tmp_path)


def test_a_lane_keeps_the_cluster_that_its_run_began_with(service):
    file = service.folder / "other.yaml"
    file.write_text("lanes: {cpu: {cluster: {pools: {rollout: {devices: 2}, train: {devices: 1}}}}}")
    (spec,) = load_service_file(file, folder=service.folder, policies=list(POLICIES)).values()
    service.until_up()
    with pytest.raises(UserError, match="began with another cluster or policy; accepted: the cluster and policy"):
        LaneController(service.root, "cpu", spec)

"""The section `trackers`, in the file of a run and in a lane of a service's, and what a run makes of it."""

from __future__ import annotations

import pytest

from rlmux.config.load import load_spec, parse_spec
from rlmux.config.service_file import load_service_file
from rlmux.config.tree import MlflowConfig, TrackersConfig, WandbConfig
from rlmux.core.errors import SpecError, UserError
from rlmux.runtime import launch

CLUSTER = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}"
PIPELINES = "pipelines: [{name: sort, steps: 1, task: {name: sort}}]"
TRACKERS = "trackers: {wandb: {mode: online, project: team}, mlflow: {}}"
EXPECTED = TrackersConfig(wandb=WandbConfig(mode="online", project="team"), mlflow=MlflowConfig())


def test_a_run_keeps_them_in_its_file_so_that_a_resumed_one_has_them_too(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(f"{CLUSTER}\n{TRACKERS}\n{PIPELINES}\n")
    spec = load_spec(path)
    assert spec.trackers == EXPECTED
    again = parse_spec(spec.resolved, source="kept", folder=tmp_path)
    assert again.trackers == EXPECTED


def test_a_lane_has_its_own_and_without_any_there_are_none(tmp_path):
    path = tmp_path / "lanes.yaml"
    path.write_text(f"lanes:\n  a:\n    {CLUSTER}\n    {TRACKERS}\n  b:\n    {CLUSTER}\n")
    lanes = load_service_file(path, policies=["rollmux"])
    assert lanes["a"].spec.trackers == EXPECTED
    assert lanes["b"].spec.trackers == TrackersConfig()
    assert launch.trackers_of(lanes["b"].spec) == []


def test_one_that_is_not_installed_is_a_line_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    spec = parse_spec(f"{CLUSTER}\ntrackers: {{mlflow: {{}}}}\n{PIPELINES}\n", source="file.yaml", folder=tmp_path)
    with pytest.raises(UserError) as refused:
        launch.trackers_of(spec)
    assert str(refused.value) == "file.yaml: trackers.mlflow: it is not installed; accepted: pip install mlflow-skinny"


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ("{neptune: {}}", "neptune"),
        ("{wandb: {mode: live}}", "mode is 'live'; accepted: one of offline, online"),
    ],
)
def test_a_mistake_is_one_line_with_what_is_accepted(tmp_path, trackers, said):
    with pytest.raises(SpecError, match=said):
        parse_spec(f"{CLUSTER}\ntrackers: {trackers}\n{PIPELINES}\n", source="f.yaml", folder=tmp_path)

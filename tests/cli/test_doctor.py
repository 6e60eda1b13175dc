"""The doctor looks at one thing at a time, never raises, and always says what to do."""

from __future__ import annotations

import json

import pytest

from rlmux.cli import doctor


@pytest.fixture(scope="module")
def findings() -> list[doctor.Finding]:
    return doctor.examine()


def test_every_finding_that_is_not_ok_says_what_it_means(findings):
    names = [finding.name for finding in findings]
    assert names[:6] == ["python", "cores", "memory", "/dev/shm", "runs folder", "forkserver"]
    assert len(set(names)) == len(names)
    for finding in findings:
        assert finding.value
        assert finding.is_ok or finding.meaning


def test_the_fork_server_answers_here(findings):
    assert next(finding for finding in findings if finding.name == "forkserver").is_ok


def test_findings_are_shown_as_lines_or_json(findings, capsys):
    doctor.show(findings, as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == len(findings)
    doctor.show(findings, as_json=False)
    assert all(line.startswith(("ok ", "missing ", " ")) for line in capsys.readouterr().out.splitlines())


def test_a_package_that_is_absent_comes_with_the_command_that_installs_it():
    finding = doctor.check_package("no-such-package", "envs", "no such tasks")
    assert (finding.is_ok, finding.meaning) == (False, "no such tasks")
    assert finding.remedy == "pip install 'rlmux[envs]'"


@pytest.mark.parametrize(
    ("found", "gpu", "value"),
    [
        (None, False, "none that torch sees"),
        ({"error": "boom"}, False, "none that torch sees"),
        ({"gpus": [["H200", "9.0", 132, 140e9, 150e9]]}, True, "0: H200, compute 9.0, 132 SMs, 140 of 150 GB free"),
    ],
)
def test_gpus_are_told_as_torch_tells_them(found, gpu, value):
    finding = doctor.check_gpus(found)
    assert (finding.is_ok, finding.value) == (gpu, value)


def test_a_broken_torch_is_told_with_its_error():
    finding = doctor.check_torch_import({"error": "ImportError: libcudart.so.12"})
    assert not finding.is_ok
    assert finding.value == "ImportError: libcudart.so.12"


@pytest.mark.parametrize(("cores", "shown"), [([0, 1, 2, 5], "0-2,5"), ([3], "3"), ([], "")])
def test_cores_are_shown_as_ranges(cores, shown):
    assert doctor.core_ranges(cores) == shown


def test_device_fractions_are_told_with_what_makes_them():
    cpu = {"device": "cpu: EPYC", "how": "nice", "prepared": [0.25, 0.5], "missing": ""}
    gpu = {"device": "H200", "how": "", "prepared": [], "missing": "green contexts: no driver"}
    finding = doctor.check_fractions({"fractions": [cpu, gpu]})
    assert (finding.is_ok, finding.value) == (
        True,
        "cpu: EPYC: 25%, 50% by nice; H200: none: green contexts: no driver",
    )
    assert not doctor.check_fractions({"fractions": [gpu]}).is_ok
    assert "alone" in doctor.check_fractions(None).meaning

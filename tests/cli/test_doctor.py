"""The doctor looks at one thing at a time, never raises, and always says what to do."""

from __future__ import annotations

import json
from pathlib import Path

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


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: 12\n"
HELP = "CUDA checkpoint and restore utility.\nVersion 570.86.10. Copyright (C) 2025 NVIDIA Corporation.\n"
ACTIONS = "--action lock | checkpoint | restore | unlock --pid <pid> [--timeout <ms>]"


def machine(folder: Path, *, driver: str = "580.65.06", said: str | None = HELP + ACTIONS, mig: bool = False):
    """What the doctor finds of a machine with this driver and a tool that prints this."""
    (folder / "driver").mkdir()
    (folder / "driver" / "version").write_text(DRIVER.format(driver))
    if mig:
        (folder / "driver" / "capabilities" / "gpu0" / "mig" / "gi1").mkdir(parents=True)
    tool = folder / "cuda-checkpoint"
    if said is not None:
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
        tool.chmod(0o700)
    return doctor.check_cuda_checkpoint(str(tool), folder / "driver")


def test_a_machine_on_which_cuda_checkpoint_would_work_is_told_with_both_versions(tmp_path):
    finding = machine(tmp_path)
    assert finding.is_ok
    assert finding.value.startswith(f"570.86.10 ({tmp_path}/cuda-checkpoint), driver 580.65.06; not for processes")
    (tmp_path / "newer").mkdir()
    assert machine(tmp_path / "newer", driver="610.57.04").value.endswith("driver 610.57.04")


@pytest.mark.parametrize(
    ("given", "value", "remedy"),
    [
        ({"driver": "550.90.07"}, "driver 550.90.07", "a driver of version 570 or newer"),
        ({"said": None}, "and no {}/cuda-checkpoint on PATH", "the program of https://github.com/NVIDIA"),
        ({"said": HELP.replace("570.86.10", "550.54.09")}, "550.54.09 has no --action", "of version 570 or newer"),
        ({"mig": True}, "MIG devices, which it does not move", "GPUs without MIG"),
    ],
)
def test_what_keeps_cuda_checkpoint_from_working_is_told_with_what_mends_it(tmp_path, given, value, remedy):
    finding = machine(tmp_path, **given)
    assert not finding.is_ok
    assert value.format(tmp_path) in finding.value
    assert remedy in finding.remedy
    assert "hooks of their own" in finding.meaning


def test_a_machine_without_a_gpu_says_so_of_cuda_checkpoint_in_one_line(tmp_path):
    finding = doctor.check_cuda_checkpoint(driver=tmp_path / "none")
    assert (finding.is_ok, finding.value, finding.remedy) == (False, "no GPU", "")

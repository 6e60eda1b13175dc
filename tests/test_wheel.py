"""The wheel, installed into an environment of its own, works where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"


def run(*words: object, folder: Path) -> str:
    """What the command prints, with no way back to the checkout."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    done = subprocess.run([*map(str, words)], cwd=folder, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout keeps clean."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(SOURCES, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "dist",
        ".",
        folder=folder,
    )
    (built,) = (folder / "dist").glob("rlmux-*.whl")
    return built


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and a fresh environment that has the wheel; what it needs is taken from here."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(ROOT / "examples", folder / "examples")
    run(sys.executable, "-m", "venv", "--without-pip", ".venv", folder=folder)
    python = folder / ".venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, folder=folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    (Path(packages) / "what_it_needs.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_the_wheel_has_every_file_of_the_package(wheel):
    written = {
        str(path.relative_to(SOURCES))
        for path in (SOURCES / "rlmux").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not is_source_of_pages(path)
    }
    written |= {
        f"rlmux/{path.relative_to(ROOT)}"
        for path in (ROOT / "examples").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as packed:
        there = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert there == written
    assert "rlmux/py.typed" in there


def is_source_of_pages(path: Path) -> bool:
    """What `make pages` builds the dashboard from; the wheel carries what was built."""
    pages = SOURCES / "rlmux" / "service" / "pages"
    return path.is_relative_to(pages) and not path.is_relative_to(pages / "dist")


def test_the_installed_package_is_the_wheels_own(outside):
    python = outside / ".venv" / "bin" / "python"
    place = Path(run(python, "-c", "import rlmux; print(rlmux.__file__)", folder=outside).strip())
    assert place.is_relative_to(outside)


def test_the_wheel_plans_and_simulates_outside_the_checkout(wheel, outside):
    rlmux = outside / ".venv" / "bin" / "rlmux"
    assert wheel.name.split("-")[1] in run(rlmux, "version", folder=outside)
    planned = json.loads(run(rlmux, "plan", "examples/07_cluster_what_if.yaml", "--json", folder=outside))
    assert planned["pipelines"]
    simulated = json.loads(run(rlmux, "simulate", "micro-a", "--policies", "rollmux", "--json", folder=outside))
    assert simulated


@pytest.mark.slow
def test_the_wheel_runs_the_demo_outside_the_checkout(outside):
    rlmux = outside / ".venv" / "bin" / "rlmux"
    demo = ("examples/01_two_pipelines.yaml", "--policy", "rollmux", "--out", "runs/demo", "--json")
    summary = json.loads(run(rlmux, "run", *demo, folder=outside))
    assert {each["status"] for each in summary["pipelines"].values()} == {"finished"}
    assert (outside / "runs" / "demo" / "timeline.html").stat().st_size > 10_000

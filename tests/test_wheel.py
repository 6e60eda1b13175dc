"""The wheel, installed into an environment of its own, works where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"
PAGES = SOURCES / "rlmux" / "service" / "pages" / "dist"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}


def run(*words: object, folder: Path) -> str:
    """What the command prints, with no way back to the checkout."""
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def built(sources: Path, folder: Path) -> Path:
    """The wheel of a source tree or of an sdist."""
    pip_wheel = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip_wheel, "-w", "dist", sources, folder=folder)
    (wheel,) = (folder / "dist").glob("rlmux-*.whl")
    return wheel


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as git has it, links included, so that the checkout itself keeps clean."""
    folder = tmp_path_factory.mktemp("build")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(copied: Path) -> Path:
    return built(copied, copied)


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and a fresh environment that has the wheel; what it needs is taken from here."""
    folder = tmp_path_factory.mktemp("outside")
    run(sys.executable, "-m", "venv", "--without-pip", ".venv", folder=folder)
    python = folder / ".venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, folder=folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    (Path(packages) / "what_it_needs.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run(folder / ".venv" / "bin" / "rlmux", "demo", "--copy", "examples", folder=folder)
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


@pytest.mark.slow
def test_an_sdist_builds_the_same_wheel(copied, wheel, tmp_path):
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", make, tmp_path, folder=copied)
    (sdist,) = tmp_path.glob("rlmux-*.tar.gz")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(built(sdist, tmp_path)) as second:
        assert {name: first.getinfo(name).CRC for name in first.namelist()} == {
            name: second.getinfo(name).CRC for name in second.namelist()
        }


def is_source_of_pages(path: Path) -> bool:
    """What `make pages` builds the dashboard from; the wheel carries what was built."""
    return path.is_relative_to(PAGES.parent) and not path.is_relative_to(PAGES)


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


def test_the_wheel_lists_the_examples_and_writes_a_file_that_is_without_mistakes(outside):
    rlmux = outside / ".venv" / "bin" / "rlmux"
    assert "01_two_pipelines  " in run(rlmux, "demo", "--list", folder=outside)
    assert run(rlmux, "init", "rows", folder=outside).startswith("rlmux run rlmux.yaml\n")
    assert json.loads(run(rlmux, "check", "rlmux.yaml", "--json", folder=outside))["ok"]


@pytest.fixture(scope="module")
def demo(outside: Path) -> Path:
    """The folder of a demo of one step, run outside the checkout."""
    few = ("--set", "defaults.steps=1", "--set", "defaults.sft_warmup.updates=1", "--json")
    summary = json.loads(run(outside / ".venv" / "bin" / "rlmux", "demo", *few, folder=outside))
    assert {each["status"] for each in summary["pipelines"].values()} == {"finished"}
    return outside / "runs" / "demo"


@pytest.mark.slow
def test_the_wheel_runs_the_demo_outside_the_checkout(demo):
    assert (demo / "timeline.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.skipif(not PAGES.is_dir(), reason="the pages are not built: make pages")
def test_the_wheel_serves_its_pages_outside_the_checkout(outside, demo):
    line = [outside / ".venv" / "bin" / "rlmux", "serve", demo, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(line, cwd=outside, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().removeprefix("dashboard: ").strip()
            with urllib.request.urlopen(address) as answer:
                assert "<script" in answer.read().decode()
        finally:
            server.terminate()

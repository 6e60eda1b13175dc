"""Runs whose controller is killed and that are resumed, beside the same run left alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.command_line import command
from tests.waiting import until

from rlmux.config.load import parse_spec
from rlmux.policies import make_policy
from rlmux.report.reports import load_summary
from rlmux.runtime import launch
from rlmux.runtime.checks.replay_verification import verify


def weights(folder: Path) -> dict[str, str]:
    return {name: one["weights_sha256"] for name, one in load_summary(folder)["pipelines"].items()}


def kill_after(folder: Path, num_steps: int, words: list[str], name: str) -> None:
    """Start a run, or resume it, and kill its controller once the pipeline `name` has so many steps."""
    process = subprocess.Popen(command(*words), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = folder / name / "metrics.jsonl"
    until(
        lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= num_steps,
        f"step {num_steps} of `{name}`",
        limit_s=300.0,
        process=process,
    )
    process.kill()
    process.wait()


def check_killed_twice(folder: Path, text: str, name: str = "sort") -> list[int]:
    """A run of this file, killed and resumed twice as its pipeline `name` trains, ends with the weights of one that is
    left alone, and `rlmux verify` says so. Files have 7 steps. Returns those that the sample of seed 1 compares."""
    file = folder / "two.yaml"
    file.write_text(text)
    whole, killed = folder / "whole", folder / "killed"
    spec = parse_spec(text, source="two.yaml", folder=folder)
    launch.start_run(spec, whole, policy=make_policy("rollmux"))
    kill_after(killed, 2, ["run", str(file), "--out", str(killed)], name)
    kill_after(killed, 4, ["resume", str(killed)], name)
    subprocess.run(command("resume", str(killed)), check=True, capture_output=True)
    assert weights(killed) == weights(whole)
    (verdict,) = verify(killed, [name], print_line=lambda _: None)
    assert verdict.is_equal
    (sampled,) = verify(killed, [name], print_line=lambda _: None, sample_seed=1)
    assert sampled.sample is not None
    assert sampled.is_equal
    return list(sampled.sample.steps)

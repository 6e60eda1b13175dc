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


def kill_after(folder: Path, num_steps: int, words: list[str]) -> None:
    """Start a run, or resume it, and kill its controller once a pipeline has so many steps."""
    process = subprocess.Popen(command(*words), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = folder / "sort" / "metrics.jsonl"
    until(
        lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= num_steps,
        f"step {num_steps} of `sort`",
        limit_s=300.0,
        process=process,
    )
    process.kill()
    process.wait()


def check_killed_twice(folder: Path, text: str) -> None:
    """A run of this file, with the pipelines `sort` and `reverse`, killed and resumed twice ends with the weights of
    one that is left alone, and `rlmux verify` says so. Files have 7 steps."""
    file = folder / "two.yaml"
    file.write_text(text)
    whole, killed = folder / "whole", folder / "killed"
    spec = parse_spec(text, source="two.yaml", folder=folder)
    launch.start_run(spec, whole, policy=make_policy("rollmux"))
    kill_after(killed, 2, ["run", str(file), "--out", str(killed)])
    kill_after(killed, 4, ["resume", str(killed)])
    subprocess.run(command("resume", str(killed)), check=True, capture_output=True)
    assert weights(killed) == weights(whole)
    (verdict,) = verify(killed, ["sort"], print_line=lambda _: None)
    assert verdict.is_equal
    (last,) = verify(killed, ["sort"], print_line=lambda _: None, sample_seed=1)
    assert last.sample is not None
    assert (last.sample.steps, last.is_equal) == ([7], True), "restored from the checkpoint before it"

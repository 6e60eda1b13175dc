"""A pair of pipelines over two machines against one: seconds a step, bytes over the link, weights.

    python benchmarks/two_machines.py [--steps 12] [--hidden 256] [--json]

The machines are namespaces of this one (tests/runtime/ray/two_machines.py; needs root and ray), so they share its
cores and the link between them has the speed of memory: what shows is what the way over Ray and the link adds. Rollouts
are on one machine, training on the other. `local`: the same file on this machine, without Ray; `ray, one machine`: on
a Ray cluster of one of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.runtime.ray.two_machines import ADDRESS, SHARED, Machine, missing, rlmux_words, two_machines

FILE = """\
cluster: {{pools: {{rollout: {{devices: 1}}, train: {{devices: 1}}}}}}
policy: rollmux
defaults:
  steps: {steps}
  model: {{architecture: qwen3, hidden_size: {hidden}, layers: 6, heads: 4, kv_heads: 2, intermediate_size: {inner}}}
  algorithm: {{name: grpo, prompts_per_step: 16, group_size: 4, micro_batch_size: 16}}
  rollout: {{max_prompt_tokens: 32, max_new_tokens: 24, slots: 32}}
pipelines:
  - {{name: reverse, seed: 1, task: {{name: reverse, letters: 5, alphabet: 8}}}}
  - {{name: sort, seed: 2, task: {{name: sort, min_digits: 2, mean_digits: 4, max_digits: 16}}}}
"""


def link_bytes(machine: Machine) -> int:
    """Bytes that have crossed the machine's link, both ways."""
    words = ["cat", "/proc/net/dev"]
    table = subprocess.run(machine.words(*words), capture_output=True, text=True, check=True).stdout
    fields = next(line.split() for line in table.splitlines() if line.strip().startswith("eth0:"))
    return int(fields[1]) + int(fields[9])


def run_on(place: Machine | None, shared: Path, out: str) -> dict[str, Any]:
    """The summary of a run of the shared file, on a machine or here."""
    if place is None:
        command = rlmux_words("run", str(shared / "pair.yaml"), "--out", str(shared / out))
        subprocess.run(command, check=True, capture_output=True)
    else:
        command = rlmux_words(
            "run", str(SHARED / "pair.yaml"), "--backend", "ray", "--out", str(SHARED / out), "--address", ADDRESS
        )
        if place.start(*command, output=shared / "output").wait():
            sys.exit((shared / "output").read_text())
    return json.loads((shared / out / "summary.json").read_text())  # type: ignore[no-any-return]


def figures(name: str, summary: dict[str, Any], moved: int | None, steps: int) -> dict[str, Any]:
    pipelines = summary["pipelines"].values()
    return {
        "where": name,
        "step_s": {each: row["step_s_mean"] for each, row in summary["pipelines"].items()},
        "makespan_s": summary["makespan_s"],
        "mb_a_step": None if moved is None else moved / 1e6 / steps / len(pipelines),
        "sha256": {each: row["weights_sha256"] for each, row in summary["pipelines"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if reason := missing():
        sys.exit(f"no two machines here: {reason}. Nothing was measured.")
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        shared = Path(folder)
        (shared / "pair.yaml").write_text(FILE.format(steps=given.steps, hidden=given.hidden, inner=2 * given.hidden))
        rows.append(figures("local", run_on(None, shared, "local"), None, given.steps))
        for name in ("ray, one machine", "ray, two machines"):
            with two_machines(shared) as (a, b):
                if name == "ray, one machine":
                    a.start_ray(is_head=True, rollout=1, train=1)
                else:
                    a.start_ray(is_head=True, train=1)
                    b.start_ray(rollout=1)
                before = link_bytes(b)
                summary = run_on(a, shared, name.replace(", ", "-").replace(" ", "-"))
                rows.append(figures(name, summary, link_bytes(b) - before, given.steps))
    show(rows, as_json=given.json)


def show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(
        "| where | s a step: reverse, sort | makespan s | MB over the link, a step | weights |\n|---|---|---|---|---|"
    )
    for row in rows:
        steps = ", ".join(f"{seconds:.3f}" for seconds in row["step_s"].values())
        moved = "-" if row["mb_a_step"] is None else f"{row['mb_a_step']:.2f}"
        weights = "equal" if row["sha256"] == rows[0]["sha256"] else "**other**"
        print(f"| {row['where']} | {steps} | {row['makespan_s']:.1f} | {moved} | {weights} |")


if __name__ == "__main__":
    main()

"""Whether another version trains the same weights: every example is run by both, and the hashes are compared.

    git worktree add ../before 5ca7131
    python benchmarks/same_as_before.py --before ../before [--steps 4] [--policies rollmux,jigsaw] [--only tool_use]

Each version runs its own copy of an example (matched by name, numbers in front left out), with its own words in the
file and this interpreter's torch. Exits with 1 where any pipeline's weights differ or a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
NOT_TRAINED = "cluster_what_if"
"""The example that `plan` and `simulate` are for: nothing in it trains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--policies", default="", help="instead of the policy that each file names")
    parser.add_argument("--only", default="", help="one example, by its name without number")
    options = parser.parse_args()
    before, now = examples(options.before), examples(HERE)
    names = [name for name in now if name in before and options.only in ("", name)]
    if not names:
        sys.exit(f"no example of {HERE / 'examples'} is in {options.before / 'examples'} too: {', '.join(now)}")
    num_different = 0
    print(f"{'example':<20}{'policy':<11}{'pipeline':<12}{'before':<14}{'now':<14}same")
    for name in names:
        for policy in options.policies.split(","):
            old = weights(options.before, before[name], policy, options.steps)
            new = weights(HERE, now[name], policy, options.steps)
            for pipeline in sorted(old | new):
                first, second = old.get(pipeline, "-"), new.get(pipeline, "-")
                num_different += first != second or first == "-"
                told = f"{name:<20}{policy or '(file)':<11}{pipeline:<12}{first[:12]:<14}{second[:12]:<14}"
                print(told + ("yes" if first == second != "-" else "NO"), flush=True)
    sys.exit(num_different > 0)


def examples(checkout: Path) -> dict[str, Path]:
    """The training examples of a checkout, by name without number."""
    found = {re.sub(r"^\d+_", "", path.stem): path for path in sorted((checkout / "examples").glob("*.yaml"))}
    return {name: path for name, path in found.items() if not name.endswith(NOT_TRAINED)}


def weights(checkout: Path, file: Path, policy: str, num_steps: int) -> dict[str, str]:
    """SHA-256 of the last weights of each pipeline of a run; empty where the run failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", str(file.resolve()), "--out", folder + "/run", "--json", "--set", f"defaults.steps={num_steps}"]
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                "from rlmux.cli import main; main()",
                *words,
                *(["--policy", policy] if policy else []),
            ],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode != 0:
        print(f"{file}: exit code {ran.returncode}: {ran.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return {name: one["weights_sha256"] for name, one in json.loads(ran.stdout)["pipelines"].items()}


if __name__ == "__main__":
    main()

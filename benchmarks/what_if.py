"""Is what `rlmux whatif` said of a live run what then happened?

    python benchmarks/what_if.py [--rounds 30] [--policies rollmux,rlmux,colocated] [--steps 40] [--ask-after 10]

Each round trains the demo pair under the next policy; when both have made `--ask-after` steps (and up to nine more),
asks when they will end as things are, and if a third pipeline like the first were submitted; submits such a one; and
compares the second answer with the run. A row for each pipeline: seconds from the question to its end, said and seen.
Then the median and the largest deviation; goal: a median of 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rlmux.report.api import read_timeline

PAIR = Path("examples/01_two_pipelines.yaml")
RLMUX = (sys.executable, "-m", "rlmux")


def files(folder: Path, num_steps: int) -> tuple[Path, Path, str]:
    """The pair with so many steps, the third pipeline without a cluster, and the name of the one that it is like."""
    spec = yaml.safe_load(PAIR.read_text(encoding="utf-8"))
    spec["pipelines"] = [{**each, "steps": num_steps} for each in spec["pipelines"]]
    first = spec["pipelines"][0]
    third = {**first, "name": f"{first['name']}-2", "seed": 97}
    pair, more = folder / "pair.yaml", folder / "more.yaml"
    pair.write_text(yaml.safe_dump(spec), encoding="utf-8")
    rest = {key: value for key, value in spec.items() if key not in ("cluster", "pipelines", "policy")}
    more.write_text(yaml.safe_dump({**rest, "pipelines": [third]}), encoding="utf-8")
    return pair, more, first["name"]


def num_steps_done(run: Path) -> int:
    """Steps that every pipeline of the run has made."""
    if not (run / "run.db").exists():
        return 0
    pipelines = read_timeline(run).pipelines.values()
    return min((max(one.published, default=0) for one in pipelines), default=0)


def answer(run: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(subprocess.check_output([*RLMUX, "whatif", str(run), *words, "--json"]))
    return found


def follow_up(folder: Path, policy: str, num_steps: int, ask_after: int) -> list[float]:
    """Train, ask, do what was asked about; the deviation of each pipeline's end, as a part of the seconds seen."""
    pair, more, name = files(folder, num_steps)
    run = folder / "run"
    with subprocess.Popen(
        [*RLMUX, "run", str(pair), "--policy", policy, "--out", str(run)], stdout=subprocess.DEVNULL
    ) as training:
        while training.poll() is None and num_steps_done(run) < ask_after:
            time.sleep(0.5)
        started = time.perf_counter()
        said = answer(run, "--add", "1", "--like", name)
        took_s = time.perf_counter() - started
        subprocess.check_call([*RLMUX, "submit", str(more), "--to", str(run)], stdout=subprocess.DEVNULL)
        training.wait()
    print(f"policy {policy}, asked at second {said['at_s']:.1f}, answered in {took_s:.1f} s")
    deviations = []
    for pipeline, record in read_timeline(run).pipelines.items():
        seen_s = (record.ended_s or 0.0) - said["at_s"]
        now = said["now"]["pipelines"].get(pipeline, {}).get("ends_s")
        then = said["then"]["pipelines"][pipeline]["ends_s"]
        alone = "-" if now is None else f"{now:.1f}"
        deviations.append(then / seen_s - 1)
        print(
            f"{pipeline:10} without the third {alone:>6}  with it, said {then:6.1f}  seen {seen_s:6.1f}  "
            f"deviation {deviations[-1]:+.1%}",
            flush=True,
        )
    return deviations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default="rollmux,rlmux,colocated")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ask-after", type=int, default=10)
    asked = parser.parse_args()
    policies = asked.policies.split(",")
    errors: list[float] = []
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory(prefix="rlmux-whatif-") as folder:
            policy = policies[number % len(policies)]
            found = follow_up(Path(folder), policy, asked.steps, asked.ask_after + number % 10)
            errors += [abs(deviation) for deviation in found]
    print(
        f"{len(errors)} ends in {asked.rounds} rounds: deviation {median(errors):.1%} median, {max(errors):.1%} largest"
    )


if __name__ == "__main__":
    main()

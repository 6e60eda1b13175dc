"""Is what `rlmux whatif` said of a live run what then happened?

    python benchmarks/what_if.py [--policy rollmux] [--steps 60] [--ask-after 15] [--keep DIR]

Trains the demo pair; when both have made `--ask-after` steps, asks when they will end as things are, and if a third
pipeline like the first were submitted; submits such a one; and compares the second answer with the run. A row for each
pipeline: seconds from the question to its end, said and seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="rollmux")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ask-after", type=int, default=15)
    parser.add_argument("--keep", type=Path, help="folder for the run")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="rlmux-"))
    folder.mkdir(parents=True, exist_ok=True)
    pair, more, name = files(folder, arguments.steps)
    run = folder / "run"
    words = ["run", str(pair), "--policy", arguments.policy, "--out", str(run), "--overwrite"]
    with subprocess.Popen([*RLMUX, *words], stdout=subprocess.DEVNULL) as training:
        while training.poll() is None and num_steps_done(run) < arguments.ask_after:
            time.sleep(1)
        started = time.perf_counter()
        said = answer(run, "--add", "1", "--like", name)
        took_s = time.perf_counter() - started
        subprocess.check_call([*RLMUX, "submit", str(more), "--to", str(run)], stdout=subprocess.DEVNULL)
        training.wait()
    print(f"policy {arguments.policy}, asked at second {said['at_s']:.1f}, answered in {took_s:.1f} s")
    for pipeline, record in read_timeline(run).pipelines.items():
        seen_s = (record.ended_s or 0.0) - said["at_s"]
        now = said["now"]["pipelines"].get(pipeline, {}).get("ends_s")
        then = said["then"]["pipelines"][pipeline]["ends_s"]
        alone = "-" if now is None else f"{now:.1f}"
        print(
            f"{pipeline:10} without the third {alone:>6}  with it, said {then:6.1f}  seen {seen_s:6.1f}  "
            f"deviation {then / seen_s - 1:+.1%}"
        )


if __name__ == "__main__":
    main()

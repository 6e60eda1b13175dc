"""Two machines train what one trains: over a link, with a link that is down, with a head and a machine that die.

The machines are namespaces of this one (`two_machines.py`); the runs are those of the command line.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")

from tests.runtime.killed_runs import weights
from tests.runtime.ray.two_machines import ADDRESS, SHARED, Machine, missing, rlmux_words, two_machines
from tests.waiting import until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]

_PAIR = """\
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
policy: rollmux
defaults:
  steps: 8
  model: {architecture: qwen3, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, intermediate_size: 64}
  sft_warmup: {updates: 4, batch_size: 16}
  algorithm: {name: grpo, prompts_per_step: 8, group_size: 4, micro_batch_size: 8}
  rollout: {max_prompt_tokens: 32, max_new_tokens: 16, slots: 8}
pipelines:
  - {name: reverse, seed: 1, task: {name: reverse, letters: 5, alphabet: 8}}
  - name: sort
    seed: 2
    task: {name: sort, min_digits: 2, mean_digits: 4, max_digits: 8, reward: "held:score", reward_timeout_s: 600}
"""
_REWARD = """\
import time
from pathlib import Path

def score(prompts, completions, answer, **others):
    while Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    return [sum(a == b for a, b in zip(given, right)) / 16 for given, right in zip(completions, answer)]
"""
"""It waits while the file `hold` is beside it: a run that is held is in the middle until the file goes."""
_TWO_RANKS = (
    _PAIR.replace("train: {devices: 1}", "train: {devices: 2}")
    .replace("  rollout: {max", "  train: {workers: 2}\n  rollout: {max")
    .replace("steps: 8", "steps: 3")
)
_ONE_RANK = _PAIR.replace("steps: 8", "steps: 3")
_DOWN_S = 40.0
_LIMIT_S = 300.0


class Place(NamedTuple):
    """Two machines without Ray."""

    a: Machine
    b: Machine
    shared: Path
    """Their shared folder, as this process sees it."""

    def start(self, *words: str, address: str = ADDRESS) -> subprocess.Popen[bytes]:
        """Start `rlmux` on machine a; its output is the shared file `output`."""
        return self.a.start(*rlmux_words(*words, "--address", address), output=self.shared / "output")

    def output(self) -> str:
        return (self.shared / "output").read_text()

    def wait(self, process: subprocess.Popen[bytes], what: str = "the end of the run") -> int:
        """The exit code of a run."""
        until(lambda: process.poll() is not None, what, limit_s=_LIMIT_S, seen=self.output, poll_s=0.1)
        return process.wait()

    def until_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        """Wait until both pipelines have so many steps."""
        files = [self.shared / "run" / name / "metrics.jsonl" for name in ("reverse", "sort")]
        until(
            lambda: all(file.is_file() and len(file.read_text().splitlines()) >= step for file in files),
            f"step {step}",
            limit_s=_LIMIT_S,
            process=process,
            seen=self.output,
        )


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if lacking := missing():
        pytest.skip(f"no two machines here: {lacking}")
    shared = tmp_path_factory.mktemp("shared")
    with two_machines(shared) as (a, b):
        yield Place(a, b, shared)


@pytest.fixture
def place(machines: Place) -> Iterator[Place]:
    """The machines with an empty folder; what a test starts there ends with it."""
    machines.a.run("bash", "-c", "rm -rf /mnt/*")
    _write(machines.shared, _PAIR)
    yield machines
    machines.a.kill_all()
    machines.b.kill_all()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weights of the pair on this machine."""
    return _weights_here(tmp_path_factory.mktemp("local"), _PAIR)


def _weights_here(folder: Path, text: str) -> dict[str, str]:
    _write(folder, text)
    words = rlmux_words("run", str(folder / "pair.yaml"), "--out", str(folder / "run"))
    subprocess.run(words, check=True, capture_output=True)
    return weights(folder / "run")


def _write(folder: Path, text: str) -> None:
    (folder / "pair.yaml").write_text(text)
    (folder / "held.py").write_text(_REWARD)


def _run(place: Place, out: Path = SHARED / "run") -> subprocess.Popen[bytes]:
    return place.start("run", str(SHARED / "pair.yaml"), "--backend", "ray", "--out", str(out))


def _start_pair(place: Place) -> None:
    """Ray with training on a, which is the head, and rollouts on b."""
    place.a.start_ray(is_head=True, train=1)
    place.b.start_ray(rollout=1)


def test_a_pair_over_two_machines_trains_the_weights_of_one(place, local):
    _start_pair(place)
    assert place.wait(_run(place)) == 0, place.output()
    assert weights(place.shared / "run") == local


def test_training_ranks_on_two_machines_train_the_weights_of_one_rank(place, tmp_path):
    place.a.start_ray(is_head=True, rollout=1, train=1)
    place.b.start_ray(train=1)
    _write(place.shared, _TWO_RANKS)
    assert place.wait(_run(place)) == 0, place.output()
    assert weights(place.shared / "run") == _weights_here(tmp_path, _ONE_RANK)


def test_a_folder_that_one_machine_lacks_is_refused_before_the_start(place):
    _start_pair(place)
    assert place.wait(_run(place, out=Path("/tmp/run"))) == 2
    (line,) = [line for line in place.output().splitlines() if line.strip()]
    assert "Ray node 10.77.0.2 does not share --out /tmp/run" in line


def test_a_link_that_is_down_for_forty_seconds_changes_no_weights(place, local):
    """The one wait on a clock: the time for which the link is down is the claim."""
    _start_pair(place)
    process = _run(place)
    place.until_step(process, 2)
    place.b.set_link(is_up=False)
    time.sleep(_DOWN_S)
    assert process.poll() is None, "it ended before: the test shows nothing"
    place.b.set_link(is_up=True)
    assert place.wait(process) == 0, place.output()
    assert weights(place.shared / "run") == local


def test_a_run_whose_head_is_killed_stops_in_one_line_and_resumes_on_a_new_cluster(place, local):
    _start_pair(place)
    process = _run(place)
    place.until_step(process, 2)
    (place.shared / "hold").touch()
    place.a.kill("gcs_server")
    assert place.wait(process) == 1
    assert "the head of the Ray cluster 10.77.0.1:6379 is gone" in place.output().splitlines()[-1]
    (place.shared / "hold").unlink()
    place.a.kill_all()
    place.b.kill_all()
    _start_pair(place)
    assert place.wait(place.start("resume", str(SHARED / "run"))) == 0, place.output()
    assert weights(place.shared / "run") == local


def test_a_killed_machine_that_joins_again_changes_no_weights(place, local):
    _start_pair(place)
    process = _run(place)
    place.until_step(process, 2)
    place.b.kill_all()
    gone = "node rollout-0 is gone"
    until(lambda: gone in place.output(), "the line of the lost node", process=process, seen=place.output)
    place.b.start_ray(rollout=1)
    assert place.wait(process) == 0, place.output()
    assert weights(place.shared / "run") == local

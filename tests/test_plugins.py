"""Parts that users add: found by `module:name`, or by the entry points of an installed package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests import command_line

from rlmux import plugins
from rlmux.cli import inputs
from rlmux.config.serve_file import written
from rlmux.config.service_file import load_service_file
from rlmux.core.errors import UserError
from rlmux.log.run_log import RunLog, run_header
from rlmux.policies import POLICIES, make_policy
from rlmux.runtime import launch
from rlmux.service.hosted_lane import served_of

pytestmark = pytest.mark.xdist_group("plugins")  # one installation for all
EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
FILE = """\
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
policy: newest-first
pipelines:
  - name: counts
    steps: 2
    task: {name: count-up, numbers: 2}
    model: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, intermediate_size: 32}
    algorithm: {prompts_per_step: 2, group_size: 2}
    rollout: {max_new_tokens: 4, slots: 4, engine: two-at-a-time}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the example package is installed into, by pip."""
    target, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source")
    for file in EXAMPLE.iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", *words, str(source)], check=True, capture_output=True)
    return target


RLMUX = [sys.executable, "-m", "rlmux"]


def rlmux(
    *words: str, installed: Path, folder: Path, command: Sequence[str] = RLMUX
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([*command, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_an_installed_package_adds_a_policy_and_a_workload_by_name(installed, tmp_path):
    said = rlmux(
        "simulate", "two-sizes:pairs=1", "--policies", "solo,newest-first", "--json",
        installed=installed, folder=tmp_path,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    figures = json.loads(said.stdout)["policies"]
    assert list(figures) == ["solo", "newest-first"]
    assert figures["newest-first"]["cost_usd_per_hour"] < figures["solo"]["cost_usd_per_hour"]


@pytest.mark.slow
def test_an_installed_package_adds_a_task_an_engine_and_a_policy_to_a_real_run(installed, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "file.yaml").write_text(FILE, encoding="utf-8")
    words = ["run", "file.yaml", "--out", "run", "--json"]
    said = rlmux(*words, installed=installed, folder=tmp_path, command=command_line.command())
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    assert (summary["policy"], summary["pipelines"]["counts"]["status"]) == ("newest-first", "finished")
    assert summary["pipelines"]["counts"]["promise"] in ("exact", "replayable"), "it was tried as ours is"
    rows = [json.loads(line) for line in (tmp_path / "run" / "counts" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2


def test_what_no_package_adds_is_refused_with_what_there_is(tmp_path):
    said = rlmux("simulate", "weave", "--policies", "newest-frist", installed=tmp_path, folder=tmp_path)
    assert said.returncode == 2
    assert "rollmux" in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(text)` writes my_parts.py beside nothing else, on the search path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)

    def write(text: str) -> None:
        (tmp_path / "my_parts.py").write_text(text, encoding="utf-8")

    yield write
    sys.modules.pop("my_parts", None)


@pytest.mark.parametrize(
    ("source", "text", "line"),
    [
        ("", "my_parts:Own", "'my_parts' has no 'Own'; it has: none"),
        ("def other(): pass", "my_parts:Own", "'my_parts' has no 'Own'; it has: other"),
        ("", "no_parts:Own", "policy 'no_parts:Own': no module 'no_parts'; accepted: one beside the file, "),
        ("import no_such", "my_parts:Own", "policy 'my_parts:Own' imports 'no_such', which is not installed"),
        ("1 / 0", "my_parts:Own", "'my_parts' raised ZeroDivisionError: division by zero (my_parts.py, line 1)"),
        ("Own = 3", "my_parts:Own", "policy 'my_parts:Own' is 3; accepted: a class or a function"),
        ("", "rolmux", "is unknown; accepted: rollmux, or module:name of your own; did you mean 'rollmux'?"),
    ],
)  # fmt: skip
def test_each_mistake_with_a_plug_in_is_one_line(module, source, text, line):
    module(source)
    with pytest.raises(UserError) as refused:
        plugins.find("policy", text, ("rollmux",))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`module:Class` of a policy in a file's folder, which is not the working folder."""
    (tmp_path / "own_order.py").write_text("from rlmux.policies.baselines import Fifo as Mine\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_order:Mine"
    sys.modules.pop("own_order", None)


def test_a_broker_takes_a_policy_that_lies_beside_its_file(own_policy, tmp_path):
    file = tmp_path / "broker.yaml"
    file.write_text(f"cluster: {{pools: {{gpu0: {{phase: both}}}}}}\npolicy: {own_policy}\n")
    spec = inputs.load_for_broker(str(file), None, None)
    assert make_policy(spec.policy).name == own_policy
    with pytest.raises(UserError, match="no such policy; nearest: fifo"):
        inputs.load_for_broker(str(file), ["policy=fifi"], None)


def test_a_server_takes_a_policy_that_lies_beside_its_file_and_goes_on_with_it(own_policy, tmp_path):
    file = tmp_path / "serve.yaml"
    models = "{rlmux/tiny: {model: {hidden_size: 16, heads: 2}}}"
    pools = "{rollout: {devices: 1}, train: {devices: 1}}"
    text = f"lanes:\n  a: {{policy: '{own_policy}', cluster: {{pools: {pools}}}, serve: {{models: {models}}}}}\n"
    file.write_text(text)
    lane = load_service_file(file, policies=list(POLICIES))["a"]
    header = run_header(
        policy=lane.spec.policy, backend="local", cluster=lane.spec.cluster, spec=launch.header(lane.spec)
    )
    RunLog.create(tmp_path / "served", header).close()
    assert lane.serve is not None
    (tmp_path / "served" / "serve.yaml").write_text(written(lane.serve))
    assert make_policy(served_of(tmp_path / "served").policy).name == own_policy
    file.write_text(text.replace(own_policy, "rolmux"))
    with pytest.raises(UserError, match="no such policy; nearest: rollmux"):
        load_service_file(file, policies=list(POLICIES))

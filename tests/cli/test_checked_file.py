"""`rlmux check`: the first half of `run`, and of `serve` and `broker`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.small_files import small_file

from rlmux.cli.checked_file import kind_of
from rlmux.config.file_kind import FileKind
from rlmux.runtime import launch, local

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = small_file("{name: a, task: sort}", steps=2)
POOLS = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}"


def test_a_file_without_mistakes_is_one_line(rlmux):
    assert rlmux("check", "small.yaml") == (
        0,
        "small.yaml: ok: 2 pipelines, policy rollmux, devices rollout 1, train 1\n",
        "",
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("serve/lanes.yaml", "1 lane; small: policy rlmux, devices rollout 1, train 1"),
        ("serve/tiny.yaml", "1 lane; tiny: policy rollmux, devices rollout 1, train 1, models rlmux/tiny"),
        ("09_permits.yaml", "permits, policy fifo, devices gpu0 1"),
    ],
)
def test_each_kind_of_file_is_checked_by_its_own_loader(rlmux, name, line):
    file = str(EXAMPLES / name)
    assert rlmux("check", file) == (0, f"{file}: ok: {line}\n", "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{POOLS}\npipeline: []", FileKind.PIPELINES),
        (f"{POOLS}\npolicy: fifo", FileKind.PERMITS),
        ("clustre: {}\nlease_s: 3", FileKind.PERMITS),
        ("lanes: {}", FileKind.LANES),
        (f"{POOLS}\nserve: {{}}", FileKind.LANES),
        ("", FileKind.PIPELINES),
        ("[1, 2]", FileKind.PIPELINES),
    ],
)
def test_a_mistyped_file_keeps_its_kind(folder, text, kind):
    (folder / "file.yaml").write_text(text, encoding="utf-8")
    assert kind_of("file.yaml") is kind


def test_all_mistakes_are_printed_and_the_first_is_the_one_of_run(rlmux, folder):
    pipeline = "{name: a, task: sort, slo_probability: true, alerts: {no_signal: 3}, rollout: {slot: 1}}"
    text = small_file(pipeline, "{name: b, tsk: sort}", steps=0)
    (folder / "wrong.yaml").write_text(text, encoding="utf-8")
    code, out, err = rlmux("check", "wrong.yaml")
    assert (code, out) == (2, "")
    assert [line.split(" is ")[0].rpartition(": ")[2] for line in err.splitlines()] == [
        "pipelines.a.steps",  # of `defaults`, and so printed once
        "pipelines.a.rollout.slot",
        "pipelines.a.slo_probability",
        "pipelines.a.alerts.no_signal",
        "pipelines.b.tsk",
    ]
    assert rlmux("run", "wrong.yaml").err == err.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "pipelines.a.task={name: file, path: none.jsonl}"],
        ["--set", "pipelines.a.task={name: sort, reward: 'my_rewards:score'}"],
        ["--set", "pipelines.a.model={path: nowhere}"],
        ["--set", "policy=rolmux"],
        ["--set", "cluster.pools.train.device_memory_gb=1e-9"],
    ],
)
def test_what_run_refuses_is_refused_with_the_same_line_and_nothing_is_made(rlmux, folder, words):
    refused = rlmux("run", "small.yaml", *words)
    assert refused.code == 2
    assert rlmux("check", "small.yaml", *words) == refused
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


def test_a_promise_is_left_to_the_run(rlmux):
    code, _, err = rlmux("check", "small.yaml", "--set", "pipelines.a.promise=exact")
    assert (code, err) == (0, "rlmux: promises of a: not probed; `rlmux run` probes them before it starts\n")


def test_check_says_how_often_a_large_model_has_a_checkpoint_unless_the_file_does(rlmux):
    large = "pipelines.a.model={hidden_size: 4096, layers: 32, intermediate_size: 12288, heads: 32}"
    given = "pipelines.a.footprint={rollout_host_gb: 1, train_host_gb: 1, rollout_device_gb: 1, train_device_gb: 1}"
    words = ["check", "small.yaml", "--set", large, "--set", given]
    code, _, err = rlmux(*words)
    assert code == 0
    assert "a: a checkpoint every 10 steps, as for any model of its size; checkpoint_every sets another interval" in err
    assert rlmux(*words, "--set", "pipelines.a.checkpoint_every=1").err == ""


def test_a_device_of_several_gpus_is_shown_with_their_number(rlmux, folder):
    pools = "cluster: {pools: {rollout: {nodes: 2, gpus_per_node: 4}, train: {devices: 1}}}"
    (folder / "wide.yaml").write_text(f"{pools}\npipelines: [{{name: a, task: sort}}]")
    assert "devices rollout 2 of 4 GPUs, train 1\n" in rlmux("check", "wide.yaml").out
    (cluster,) = json.loads(rlmux("check", "wide.yaml", "--json").out)["clusters"]
    assert (cluster["devices"], cluster["gpus_per_device"]) == ({"rollout": 2, "train": 1}, {"rollout": 4})


def test_overrides_are_refused_for_files_that_take_none(rlmux):
    file = str(EXAMPLES / "serve" / "tiny.yaml")
    line = f"rlmux: --set policy=fifo: {file} has lanes; accepted: a file of `rlmux run` or `broker`\n"
    assert rlmux("check", file, "--set", "policy=fifo") == (2, "", line)


def test_json_has_what_was_found_or_every_mistake(rlmux):
    assert json.loads(rlmux("check", "small.yaml", "--json").out) == {
        "file": "small.yaml",
        "ok": True,
        "kind": "pipelines",
        "names": ["a", "b"],
        "clusters": [
            {
                "lane": None,
                "policy": "rollmux",
                "devices": {"rollout": 1, "train": 1},
                "models": [],
                "gpus_per_device": {},
            }
        ],
        "mistakes": [],
    }
    code, out, err = rlmux(
        "check", "small.yaml", "--json", "--set", "defaults.steps=0", "--set", "defaults.checkpoint_every=x"
    )
    assert (code, err) == (2, "")
    result = json.loads(out)
    assert not result["ok"]
    assert [mistake.partition(": ")[0] for mistake in result["mistakes"]] == [
        "--set defaults.steps=0",
        "--set defaults.checkpoint_every=x",
    ]


@pytest.mark.parametrize("words", [["check"], ["run", "--out", "out"], ["compare", "--out", "out"]])
@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_what_training_needs_is_missed_before_anything_starts(rlmux, folder, monkeypatch, words, package):
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name == package else True)
    line = f"rlmux: training: {package} is not installed; install it with: pip install 'rlmux[train]'\n"
    assert rlmux(*words, "small.yaml") == (2, "", line)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("num_here", "is_noted"), [(9, True), (10, False)])
def test_more_devices_than_cores_are_told_of(rlmux, folder, monkeypatch, num_here, is_noted):
    monkeypatch.setattr(local, "visible_gpus", list)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: set(range(num_here)))
    (folder / "nine.yaml").write_text(SMALL.replace("rollout: {devices: 1}", "rollout: {devices: 9}"))
    said = rlmux("check", "nine.yaml")
    assert said.code == 0
    line = f"rlmux: cluster.pools: 10 devices share {num_here} cores of this machine: they wait for each other, "
    assert said.err.startswith(line) is is_noted

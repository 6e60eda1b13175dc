"""A renamed key is accepted for one release, with a hint that names the new one."""

from __future__ import annotations

import pytest
import yaml

from rlmux.cli import inputs
from rlmux.config.error_messages import fields_by_key
from rlmux.config.old_keys import NEW_BY_OLD
from rlmux.config.tree import PipelineConfig

HINT = "warm_start is now sft_warmup; the old key is accepted until the next release"


def test_an_old_key_means_what_the_new_one_means(load, good):
    old = load(good.replace("    task: reverse\n", "    task: reverse\n    warm_start: {updates: 9}\n"))
    new = load(good.replace("    task: reverse\n", "    task: reverse\n    sft_warmup: {updates: 9}\n"))
    assert old.pipelines == new.pipelines
    assert old.hints == (f"two.yaml:14: {HINT}",)
    assert new.hints == ()


def test_old_keys_of_defaults_and_overrides_are_accepted_too(load, good):
    text = good.replace("defaults:\n", "defaults:\n  warm_start: {updates: 5, batch_size: 8}\n")
    spec = load(text, "pipelines.sort.warm_start.updates=6", "defaults.warm_start.learning_rate=1e-3")
    sort, reverse = (pipeline.config.sft_warmup for pipeline in spec.pipelines)
    assert (sort.num_updates, sort.batch_size, sort.learning_rate) == (6, 8, 1e-3)
    assert (reverse.num_updates, reverse.batch_size) == (5, 8)
    assert spec.hints == (
        f"two.yaml:6: {HINT}",
        f"--set pipelines.sort.warm_start.updates=6: {HINT}",
        f"--set defaults.warm_start.learning_rate=1e-3: {HINT}",
    )
    whole = "defaults={warm_start: {updates: 3}}"
    spec = load(good, whole)
    assert spec.pipelines[1].config.sft_warmup.num_updates == 3
    assert spec.hints == (f"--set {whole}: {HINT}",)


def test_an_override_by_the_new_key_wins_over_the_old_key_of_the_file(load, good):
    text = good.replace("defaults:\n", "defaults:\n  warm_start: {updates: 5}\n")
    assert load(text, "defaults.sft_warmup.updates=7").pipelines[0].config.sft_warmup.num_updates == 7


def test_old_and_new_key_together_are_refused(complaint, good):
    both = "task: reverse\n    sft_warmup: {updates: 1}\n    warm_start: {updates: 2}"
    message = complaint(good, replace=[("task: reverse", both)])
    assert message == (
        "two.yaml:15: warm_start is the old name of sft_warmup, which is given too; accepted: sft_warmup"
    )


def test_the_resolved_file_has_new_keys_only(load, good):
    spec = load(good, "pipelines.*.warm_start.updates=4")
    assert [pipeline["sft_warmup"]["updates"] for pipeline in yaml.safe_load(spec.resolved)["pipelines"]] == [4, 4]
    assert "warm_start" not in spec.resolved


def test_the_command_line_prints_the_hint_on_stderr(load, good, capsys):
    load(good)
    inputs.load("two.yaml", ["pipelines.sort.warm_start.updates=4"])
    printed = capsys.readouterr()
    assert printed.err == f"rlmux: --set pipelines.sort.warm_start.updates=4: {HINT}\n"
    assert printed.out == ""


@pytest.mark.parametrize("old", NEW_BY_OLD)
def test_every_new_name_is_a_key_of_a_pipeline(old):
    assert NEW_BY_OLD[old] in fields_by_key(PipelineConfig)
    assert old not in fields_by_key(PipelineConfig)
